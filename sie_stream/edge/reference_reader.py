"""Reads references beside a loop that must not wait: bounded in time, number and bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from sie_stream.errors import InvalidRequest
from sie_stream.ports import Clock
from sie_stream.records import InputsRef
from sie_stream.references import FIELD

ROOM_BYTES = 64 * 1024 * 1024
"""What is read and not yet settled, and what may come of what is being read; one object is always read."""
HUNG_MAX = 64
"""Threads that a store keeps waiting after their time; with more, fewer are read at once until some come back."""


class _Entry:
    __slots__ = ("answered", "outcome", "ref", "running", "since_ms", "wanted_ms")

    def __init__(self, ref: InputsRef, now_ms: float) -> None:
        self.ref = ref
        self.since_ms = self.wanted_ms = now_ms
        self.running = self.answered = False
        self.outcome: bytes | InvalidRequest | None = None


class ReferenceReader:
    """Implements ports.Contents.

    `read` raises InvalidRequest; what else it raises is a fault. `timeout_ms` counts from when a reference was first
    asked for, so waiting for others counts too. A thread that hangs in a store cannot be ended: it is left behind, and
    another takes its place.
    """

    def __init__(
        self, read: Callable[[InputsRef], bytes], clock: Clock, timeout_ms: int, at_once: int, bytes_max: int
    ) -> None:
        self._read = read
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._at_once = at_once
        self._bytes_max = bytes_max
        self._entries: dict[InputsRef, _Entry] = {}
        self._waiting: dict[InputsRef, _Entry] = {}
        self._queue: SimpleQueue[_Entry] = SimpleQueue()
        self._changed = threading.Condition()
        self._threads = self._running = self._hung = 0
        """Threads: those that are not hung."""

    def prepare(self, ref: InputsRef) -> None:
        with self._changed:
            self._entry(ref)
            self._start_more()

    def ask(self, ref: InputsRef) -> bytes | InvalidRequest | None:
        with self._changed:
            entry = self._entry(ref)
            if entry.outcome is None and self._clock.monotonic_ms() - entry.since_ms >= self._timeout_ms:
                self._give_up(entry)
            entry.answered = entry.outcome is not None
            self._start_more()
            return entry.outcome

    def wait(self, wait_ms: int) -> None:
        with self._changed:
            self._changed.wait_for(self._news, wait_ms / 1_000)

    def settled(self) -> None:
        """Forgets what was answered, and what nobody wants any more: its partition went to another process."""
        with self._changed:
            stale_ms = self._clock.monotonic_ms() - 2 * self._timeout_ms
            for ref, entry in list(self._entries.items()):
                stale = entry.wanted_ms < stale_ms and not entry.running
                if entry.answered or stale:
                    del self._entries[ref]
                    self._waiting.pop(ref, None)
            self._start_more()

    def _news(self) -> bool:
        return any(entry.outcome is not None and not entry.answered for entry in self._entries.values())

    def _entry(self, ref: InputsRef) -> _Entry:
        now_ms = self._clock.monotonic_ms()
        entry = self._entries.get(ref)
        if entry is None:
            entry = self._entries[ref] = self._waiting[ref] = _Entry(ref, now_ms)
        entry.wanted_ms = now_ms
        return entry

    def _give_up(self, entry: _Entry) -> None:
        entry.outcome = InvalidRequest(
            "reference_timeout",
            f"{entry.ref.url} was not read within {self._timeout_ms} ms (setting reference_timeout_ms). Send the "
            "request again with a new request_id.",
            FIELD,
        )
        self._waiting.pop(entry.ref, None)
        if entry.running:
            entry.running = False
            self._running -= 1
            self._threads -= 1
            self._hung += 1

    def _start_more(self) -> None:
        held = sum(len(entry.outcome) for entry in self._entries.values() if isinstance(entry.outcome, bytes))
        threads_max = max(0, min(self._at_once, self._at_once + HUNG_MAX - self._hung))
        while self._waiting and self._running < threads_max:
            if (held or self._running) and held + (self._running + 1) * self._bytes_max > ROOM_BYTES:
                return
            entry = self._waiting.pop(next(iter(self._waiting)))
            entry.running = True
            self._running += 1
            if self._threads < self._running:
                self._threads += 1
                threading.Thread(target=self._work, name="references", daemon=True).start()
            self._queue.put(entry)

    def _work(self) -> None:
        while True:
            entry = self._queue.get()
            try:
                outcome: bytes | InvalidRequest = self._read(entry.ref)
            except InvalidRequest as refusal:
                outcome = refusal
            with self._changed:
                if not entry.running:  # given up; its place is another's
                    self._hung -= 1
                    return
                entry.running = False
                entry.outcome = outcome
                self._running -= 1
                self._start_more()
                self._changed.notify_all()
