"""Side effects on threads of their own, so that the scheduler's loop never waits for a coordinator or a controller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from scheduler.effects import Fencer, Notice, ensure_topics, fence_worker
from sie_stream.control import ClusterRecord, EnsureTopic, FenceWorker
from sie_stream.ports import Clock, TopicAdmin
from sie_stream.settings import Settings

FENCES_AT_ONCE = 4


class ThreadedEffects:
    """Implements effects.SideEffects. Fences run in parallel, topics in one request after another.

    A topic request takes all that wait for it. An error that is no LogError is a bug or a broken client, and is raised
    by the next `outcomes`.
    """

    def __init__(self, fencer: Fencer, admin: TopicAdmin, settings: Settings, clock: Clock, notice: Notice) -> None:
        self._fencer = fencer
        self._admin = admin
        self._settings = settings
        self._clock = clock
        self._notice = notice
        self._fences = ThreadPoolExecutor(FENCES_AT_ONCE, thread_name_prefix="fence")
        self._topics = ThreadPoolExecutor(1, thread_name_prefix="topics")
        self._waiting: list[EnsureTopic] = []
        self._lock = threading.Lock()
        """Guards `_waiting`, which the topic thread empties."""
        self._done: queue.SimpleQueue[Future[list[ClusterRecord]]] = queue.SimpleQueue()
        self._running = 0

    def submit(self, fences: Sequence[FenceWorker], topics: Sequence[EnsureTopic]) -> None:
        for command in fences:
            self._watch(
                self._fences.submit(fence_worker, command, self._fencer, self._settings, self._clock, self._notice)
            )
        if topics:
            with self._lock:
                self._waiting += topics
            self._watch(self._topics.submit(self._ensure_all))

    def _watch(self, future: Future[list[ClusterRecord]]) -> None:
        self._running += 1
        future.add_done_callback(self._done.put)

    def _ensure_all(self) -> list[ClusterRecord]:
        with self._lock:
            commands, self._waiting = self._waiting, []
        return ensure_topics(commands, self._admin, self._settings)

    def outcomes(self) -> list[ClusterRecord]:
        records: list[ClusterRecord] = []
        while self._running:
            try:
                future = self._done.get_nowait()
            except queue.Empty:
                break
            self._running -= 1
            records += future.result()
        return records

    def pending(self) -> int:
        return self._running

    def close(self) -> None:
        """Starts nothing more and does not wait: the next leader asks again for what is not on the log."""
        self._fences.shutdown(wait=False, cancel_futures=True)
        self._topics.shutdown(wait=False, cancel_futures=True)
