"""One partition of the simulated log: offsets, open transactions, the last stable offset, retention."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord, LogWrite


class Watcher(Protocol):
    """A reader that wants to know when a partition may have something new."""

    def stir(self, place: TopicPartition) -> None: ...


class SimPartition:
    """Entries by offset. None is what no read_committed reader sees: a transaction marker or an aborted record."""

    __slots__ = ("_open", "end", "entries", "held_until_ms", "lso", "place", "start", "times", "watchers")

    def __init__(self, place: TopicPartition) -> None:
        self.place = place
        self.entries: list[LogRecord | None] = []
        self.times: list[int] = []
        self.start = 0
        """First offset that retention has left."""
        self.end = 0
        self.lso = 0
        """Last stable offset: everything below it is decided."""
        self.held_until_ms = 0
        """Fault: readers get nothing of this partition before this time."""
        self.watchers: list[Watcher] = []
        self._open: dict[str, int] = {}

    def append(self, write: LogWrite, now_ms: int) -> int:
        """Append a record; the caller publishes it with `settle` (or opens a transaction with `open`)."""
        offset = self.end
        topic, partition = self.place
        self.entries.append(LogRecord(topic, partition, offset, now_ms, write.key, write.value, write.headers))
        self.times.append(now_ms)
        self.end = offset + 1
        return offset

    def open(self, transactional_id: str, offset: int) -> None:
        """An undecided transaction begins at `offset`: nothing from there on is stable."""
        self._open[transactional_id] = offset

    def decide(self, transactional_id: str, now_ms: int) -> None:
        """The transaction committed, or its records were erased: write its marker."""
        self.entries.append(None)
        self.times.append(now_ms)
        self.end += 1
        del self._open[transactional_id]
        self.settle()

    def erase(self, offsets: list[int]) -> None:
        """Aborted records stay in the log but are seen by nobody."""
        for offset in offsets:
            self.entries[offset] = None

    def settle(self) -> None:
        """Recompute the last stable offset and wake the readers when it moved."""
        stable = min(self._open.values()) if self._open else self.end
        if stable != self.lso:
            self.lso = stable
            for watcher in self.watchers:
                watcher.stir(self.place)

    def delete_before(self, offset: int) -> None:
        """Retention: forget what lies below `offset`."""
        self.start = max(self.start, min(offset, self.end))
        for watcher in self.watchers:
            watcher.stir(self.place)

    def read(self, position: int, records_max: int, into: list[LogRecord]) -> int:
        """Append up to `records_max` visible records from `position` on; returns the next position."""
        entries = self.entries
        stable = self.lso
        room = records_max
        while position < stable and room > 0:
            entry = entries[position]
            position += 1
            if entry is not None:
                into.append(entry)
                room -= 1
        return position

    def offset_at(self, timestamp_ms: int) -> int:
        """First stable offset at or after `timestamp_ms`, or the last stable offset."""
        return min(max(bisect_left(self.times, timestamp_ms), self.start), self.lso)
