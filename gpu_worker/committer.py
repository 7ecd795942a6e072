"""Carries out one Commit at a time. It may run beside the loop: a slow broker must not make a live worker look dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpu_worker.facts import Commit, CommitAborted, CommitSucceeded
from sie_stream.errors import RecordTooLarge, Retriable, TransactionAborted
from sie_stream.ports import Clock, LogReader, TransactionalWriter
from sie_stream.records import LogWrite

TOPIC_CHECK_MS = 30_000
"""How long the (non-)existence of a user's topic is believed."""


class CommitPort(Protocol):
    """Where the host puts its commits."""

    def start(self, commit: Commit) -> None:
        """At most one at a time."""
        ...

    def outcome(self) -> CommitSucceeded | CommitAborted | None:
        """Once, when there is one. Raises Fenced or FatalLogError when the process must end."""
        ...


class TransactionRunner:
    """One transaction per Commit: records, then offsets, then commit; or nothing of it."""

    def __init__(self, writer: TransactionalWriter, reader: LogReader, clock: Clock, system_prefix: str) -> None:
        self._writer = writer
        self._reader = reader
        self._clock = clock
        self._system_prefix = system_prefix
        self._topics: dict[str, tuple[bool, float]] = {}

    def run(self, commit: Commit) -> CommitSucceeded | CommitAborted:
        """Raises Fenced (another incarnation owns our id) or FatalLogError (the outcome is unknown): end the process.

        A new producer is never made here. Taking the transactional id again would also undo the scheduler's fence.
        """
        started_at = self._clock.monotonic_ms()
        try:
            copies = self.writable(commit.copies)
            self._writer.begin()
            self._writer.write(commit.writes)
            if copies:
                self._writer.write(copies)
            self._writer.send_offsets(self._reader, commit.offsets)
            self._writer.commit()
        except (TransactionAborted, RecordTooLarge, Retriable) as error:
            self._writer.abort()
            return CommitAborted(commit.commit_id, str(error))
        return CommitSucceeded(commit.commit_id, self._clock.monotonic_ms() - started_at)

    def writable(self, copies: Sequence[LogWrite]) -> list[LogWrite]:
        """Copies whose topic exists and is not one of ours. The terminal record itself is on sie.results anyway."""
        if not copies:
            return []
        return [write for write in copies if self._exists(write.topic)]

    def _exists(self, topic: str) -> bool:
        if topic.startswith(self._system_prefix):
            return False
        now = self._clock.monotonic_ms()
        known = self._topics.get(topic)
        if known is None or now - known[1] >= TOPIC_CHECK_MS:
            known = self._topics[topic] = (self._reader.partitions_of(topic) > 0, now)
        return known[0]


class InlineCommitter:
    """Implements CommitPort within the caller: for simulation, and wherever virtual time passes."""

    def __init__(self, runner: TransactionRunner) -> None:
        self._runner = runner
        self._outcome: CommitSucceeded | CommitAborted | None = None

    def start(self, commit: Commit) -> None:
        assert self._outcome is None
        self._outcome = self._runner.run(commit)

    def outcome(self) -> CommitSucceeded | CommitAborted | None:
        outcome, self._outcome = self._outcome, None
        return outcome
