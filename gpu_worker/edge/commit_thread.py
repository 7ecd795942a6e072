"""Transactions beside the loop: the loop keeps admitting, running and reporting while a commit waits for the broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from gpu_worker.committer import TransactionRunner
from gpu_worker.facts import Commit, CommitAborted, CommitSucceeded


class ThreadCommitter:
    """Implements CommitPort. `wake` is called from the thread when an outcome is there."""

    def __init__(self, runner: TransactionRunner, wake: Callable[[], None]) -> None:
        self._runner = runner
        self._wake = wake
        self._todo: SimpleQueue[Commit | None] = SimpleQueue()
        self._done: SimpleQueue[CommitSucceeded | CommitAborted | Exception] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._thread.start()

    def start(self, commit: Commit) -> None:
        self._todo.put(commit)

    def outcome(self) -> CommitSucceeded | CommitAborted | None:
        if self._done.empty():
            return None
        outcome = self._done.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self, timeout_s: float) -> None:
        """Let a commit under way finish; nothing new starts."""
        self._todo.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            commit = self._todo.get()
            if commit is None:
                return
            try:
                self._done.put(self._runner.run(commit))
            except Exception as error:  # noqa: BLE001  # outermost frame of the thread: the loop raises it again
                self._done.put(error)
                return
            finally:
                self._wake()
