"""Follows sie.routes: the whole table first, then what changes. Over ports only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schemas import codec
from schemas.codec import CodecError
from sie_stream.control import RouteRow
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord

TABLE_STEPS_MAX = 600
POLL_MAX = 5_000
POLL_WAIT_MS = 100

RouteChange = tuple[str, RouteRow | None]


class RouteFollower:
    """Reads the route table with a reader of its own, which joins no group and commits nothing."""

    def __init__(self, reader: LogReader, topic: str) -> None:
        self.problems: list[str] = []
        """Rows that could not be read, for the owner to log; the last good row of such a model stays in force."""
        self._reader = reader
        self._topic = topic
        self._partitions: list[TopicPartition] = []

    def read_table(self) -> tuple[RouteChange, ...]:
        """Everything up to the present end. Raises FatalLogError when nothing can be had for a minute."""
        rows: list[RouteChange] = []
        for _ in range(TABLE_STEPS_MAX):
            if self._reached_end(rows):
                return tuple(rows)
        raise FatalLogError(f"{self._topic}: the route table could not be read within {TABLE_STEPS_MAX} polls")

    def changes(self, wait_ms: int = 0) -> tuple[RouteChange, ...]:
        """What was published since the last call; waits for something at most `wait_ms`."""
        try:
            records = self._reader.poll(POLL_MAX, wait_ms)
        except Retriable:
            return ()
        return tuple(self._rows(records))

    def _reached_end(self, rows: list[RouteChange]) -> bool:
        """One step of reading the table."""
        try:
            if not self._partitions:
                self._assign()
                return False
            ends = self._reader.end_offsets(self._partitions)
            rows += self._rows(self._reader.poll(POLL_MAX, POLL_WAIT_MS))
            return all(self._reader.position(partition) >= ends[partition] for partition in self._partitions)
        except Retriable:
            return False

    def _assign(self) -> None:
        partitions = [TopicPartition(self._topic, number) for number in range(self._reader.partitions_of(self._topic))]
        if not partitions:
            raise FatalLogError(f"topic {self._topic!r} does not exist. Create it with `sie-stream topics apply`.")
        self._reader.assign(self._reader.beginning_offsets(partitions))
        self._partitions = partitions

    def _rows(self, records: Sequence[LogRecord]) -> Iterator[RouteChange]:
        for record in records:
            name = (record.key or b"").decode("utf-8", "replace")
            if record.value is None:
                yield name, None
                continue
            try:
                yield name, codec.decode_row(record.value, RouteRow)
            except CodecError as error:
                self.problems.append(f"{self._topic} offset {record.offset}: the row of {name!r}: {error}")
