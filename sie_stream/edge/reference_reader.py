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
"""Threads that stores keep waiting after their time; with more, fewer are read at once, and at last nothing is, until
some come back."""


class _Entry:
    __slots__ = ("answered", "asked", "began_ms", "outcome", "ref", "running", "wanted_ms")

    def __init__(self, ref: InputsRef) -> None:
        self.ref = ref
        self.began_ms = self.wanted_ms = 0.0
        self.running = self.asked = self.answered = False
        self.outcome: bytes | InvalidRequest | None = None


class _Silence:
    """Readings of one store that came to nothing, one after the other."""

    __slots__ = ("count", "until_ms")

    def __init__(self) -> None:
        self.count = 0
        self.until_ms = float("-inf")


class ReferenceReader:
    """Implements ports.Contents.

    `read` raises InvalidRequest; what else it raises is a fault: it ends the request, and the thread with a traceback.
    `timeout_ms` is for one reading. A thread that hangs in a store cannot be ended: it is left behind, and another
    takes its place. A store that let `at_once` readings in a row hang is left alone for two timeouts, and what is asked
    of it fails at once: else each of its references would hold the requests behind it for a timeout. One that is only
    slow makes them wait.

    What was asked for holds a partition, so it goes before what was only prepared, and takes its room when there is
    none: what is prepared may stand behind it, and would never be taken while it waits.
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
        self._asked: dict[InputsRef, _Entry] = {}
        """Waiting to be read because somebody asked; `_ahead`: only prepared."""
        self._ahead: dict[InputsRef, _Entry] = {}
        self._silent: dict[str, _Silence] = {}
        self._queue: SimpleQueue[_Entry] = SimpleQueue()
        self._changed = threading.Condition()
        self._threads = self._running = self._hung = 0
        """Threads: those that are not hung."""
        self._finished = self._seen = 0
        """Readings that ended, and how many of them had when something was asked for that was not there."""

    def prepare(self, ref: InputsRef) -> None:
        with self._changed:
            self._entry(ref)
            self._start_more()

    def ask(self, ref: InputsRef) -> bytes | InvalidRequest | None:
        with self._changed:
            entry = self._entry(ref)
            entry.asked = True
            if self._ahead.pop(ref, None):
                self._asked[ref] = entry
            self._start_more()
            entry.answered = entry.outcome is not None
            if not entry.answered:
                self._seen = self._finished
            return entry.outcome

    def wait(self, wait_ms: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._finished != self._seen, wait_ms / 1_000)

    def settled(self) -> None:
        """Forgets what was answered, and what nobody wants any more: its partition went to another process."""
        with self._changed:
            stale_ms = self._clock.monotonic_ms() - 2 * self._timeout_ms
            for ref, entry in list(self._entries.items()):
                stale = entry.wanted_ms < stale_ms and not entry.running
                if entry.answered or stale:
                    del self._entries[ref]
                    self._asked.pop(ref, None)
                    self._ahead.pop(ref, None)
            self._start_more()

    def _entry(self, ref: InputsRef) -> _Entry:
        entry = self._entries.get(ref)
        if entry is None:
            entry = self._entries[ref] = self._ahead[ref] = _Entry(ref)
        entry.wanted_ms = self._clock.monotonic_ms()
        return entry

    def _start_more(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._give_up_overdue(now_ms)
        running_max = max(0, min(self._at_once, self._at_once + HUNG_MAX - self._hung))
        while waiting := self._asked or self._ahead:
            entry = next(iter(waiting.values()))
            if self._silence(entry.ref).until_ms > now_ms or not running_max:
                del waiting[entry.ref]
                entry.outcome = _left_alone(entry.ref)
                continue
            if self._running >= running_max or not self._has_room(entry):
                return
            del waiting[entry.ref]
            entry.running, entry.began_ms = True, now_ms
            self._running += 1
            if self._threads < self._running:
                self._threads += 1
                threading.Thread(target=self._work, name="references", daemon=True).start()
            self._queue.put(entry)

    def _has_room(self, entry: _Entry) -> bool:
        held = {ref: len(one.outcome) for ref, one in self._entries.items() if isinstance(one.outcome, bytes)}
        size = sum(held.values())
        limit = ROOM_BYTES - (self._running + 1) * self._bytes_max
        prepared = [ref for ref in held if not self._entries[ref].asked]
        if entry.asked and (size - sum(held[ref] for ref in prepared) <= limit or not self._running):
            while size > limit and prepared:
                ref = prepared.pop()
                size -= held[ref]
                del self._entries[ref]  # read again when its turn comes
        return size <= limit or not (size or self._running)

    def _give_up_overdue(self, now_ms: float) -> None:
        """Also those that nobody asks for any more: they would keep the places of others for ever."""
        for entry in self._entries.values():
            if entry.running and now_ms - entry.began_ms >= self._timeout_ms:
                self._give_up(entry)

    def _silence(self, ref: InputsRef) -> _Silence:
        return self._silent.setdefault("/".join(ref.url.split("/", 3)[:3]), _Silence())

    def _give_up(self, entry: _Entry) -> None:
        """Of a reading that hangs; its thread is left behind."""
        entry.outcome = InvalidRequest(
            "reference_timeout",
            f"{entry.ref.url} was not read within {self._timeout_ms} ms (setting reference_timeout_ms). Send the "
            "request again with a new request_id.",
            FIELD,
        )
        entry.running = False
        self._running -= 1
        self._threads -= 1
        self._hung += 1
        silence = self._silence(entry.ref)
        silence.count += 1
        if silence.count >= self._at_once:
            silence.until_ms = self._clock.monotonic_ms() + 2 * self._timeout_ms

    def _work(self) -> None:
        while True:
            entry = self._queue.get()
            try:
                outcome: bytes | InvalidRequest = self._read(entry.ref)
            except InvalidRequest as refusal:
                outcome = refusal
            except BaseException:
                if self._ended(entry, _failed(entry.ref)):
                    with self._changed:
                        self._threads -= 1
                        self._start_more()
                raise
            if not self._ended(entry, outcome):
                return

    def _ended(self, entry: _Entry, outcome: bytes | InvalidRequest) -> bool:
        """False when it was given up before, and another thread has the place of this one."""
        with self._changed:
            if not entry.running:
                self._hung -= 1
                return False
            entry.running = False
            entry.outcome = outcome
            self._silence(entry.ref).count = 0
            self._running -= 1
            self._finished += 1
            self._start_more()
            self._changed.notify_all()
            return True


def _failed(ref: InputsRef) -> InvalidRequest:
    return InvalidRequest(
        "reference_unavailable", f"{ref.url} was not read: reading it failed; ingress logs why.", FIELD
    )


def _left_alone(ref: InputsRef) -> InvalidRequest:
    return InvalidRequest(
        "reference_unavailable",
        f"{ref.url} was not read: stores did not answer several times in a row. Send the request again later with a "
        "new request_id.",
        FIELD,
    )
