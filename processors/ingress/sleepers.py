"""Finds work of models that sleep, and tells the scheduler, which cannot see it. Over ports only.

The topic of every sleeping model is read from where the workers stopped (their committed offsets). The first request
found there wakes the model: WorkWaiting, repeated every second until the route says that it is awake. Every ingress
does this for itself, so it does not matter who routed a request, when, or which of them died since; what is told twice
the scheduler ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from schemas.codec import encode_cluster
from sie_stream.control import RouteRow, WorkWaiting
from sie_stream.errors import Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import Clock, LogReader, PlainWriter
from sie_stream.records import LogWrite

REPEAT_MS = 1_000
RETRY_MS = 200
POLL_MAX = 256


class _Sleeper(Struct):
    row: RouteRow
    reading: tuple[TopicPartition, ...] = ()
    waiting: int = 0
    """Requests found; then its topic is not read any further."""
    due_ms: float = 0.0
    """When it is told again."""


class SleepWatch:
    """`make_reader`: its offsets are those of the workers' group, it commits nothing; made when one sleeps."""

    def __init__(
        self,
        make_reader: Callable[[], LogReader],
        writer: PlainWriter,
        names: TopicNames,
        clock: Clock,
    ) -> None:
        self._make_reader = make_reader
        self._reader: LogReader | None = None
        self._writer = writer
        self._names = names
        self._clock = clock
        self._sleepers: dict[str, _Sleeper] = {}
        """By topic."""
        self._retry_ms = 0.0

    def change(self, rows: Iterable[tuple[str, RouteRow | None]]) -> None:
        """Rows of sie.routes, oldest first; None: the row was deleted."""
        for name, row in rows:
            for topic in [topic for topic, one in self._sleepers.items() if one.row.model == name]:
                _stop(self._reader, self._sleepers.pop(topic))
            if row is not None and row.asleep:
                self._sleepers[row.topic] = _Sleeper(row)

    def turn(self) -> None:
        """Look at the topics, and tell what is due. Never waits."""
        if not self._sleepers or (now_ms := self._clock.monotonic_ms()) < self._retry_ms:
            return
        try:
            if self._reader is None:
                self._reader = self._make_reader()
            self._look(self._reader)
            self._tell(self._writer, now_ms)
        except Retriable:
            self._retry_ms = now_ms + RETRY_MS

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _look(self, reader: LogReader) -> None:
        for sleeper in self._sleepers.values():
            if not sleeper.reading and not sleeper.waiting:
                _read(reader, sleeper)
        for record in reader.poll(POLL_MAX, 0):
            sleeper = self._sleepers.get(record.topic)
            if sleeper is not None:
                sleeper.waiting += 1
        for sleeper in self._sleepers.values():
            if sleeper.waiting:
                _stop(reader, sleeper)

    def _tell(self, writer: PlainWriter, now_ms: float) -> None:
        for sleeper in self._sleepers.values():
            if sleeper.waiting and now_ms >= sleeper.due_ms:
                found = WorkWaiting(sleeper.row.model, sleeper.row.route_epoch, sleeper.waiting)
                writer.write([LogWrite(self._names.cluster, encode_cluster(found), None, 0)])
                sleeper.due_ms = now_ms + REPEAT_MS


def _read(reader: LogReader, sleeper: _Sleeper) -> None:
    """Start where the workers stopped."""
    row = sleeper.row
    places = tuple(TopicPartition(row.topic, number) for number in range(row.lanes * row.width))
    committed = reader.committed(places)
    starts = reader.beginning_offsets([place for place in places if committed[place] is None])
    reader.assign({place: starts[place] if (at := committed[place]) is None else at.offset for place in places})
    sleeper.reading = places


def _stop(reader: LogReader | None, sleeper: _Sleeper) -> None:
    if reader is not None and sleeper.reading:
        reader.unassign(sleeper.reading)
        sleeper.reading = ()
