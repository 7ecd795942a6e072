"""Follow sie.routes (the whole table first, then what changes) and sie.schemas (when an unknown id is met)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schemas import codec
from schemas.codec import CodecError
from schemas.registry_table import RegistryTable
from schemas.writer_schema import WriterSchema
from sie_stream.control import RouteRow
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import Clock, LogReader
from sie_stream.records import LogRecord

TABLE_STEPS_MAX = 600
REGISTRY_STEPS_MAX = 20
REGISTRY_MISS_MS = 200.0
REGISTRY_MISSES_MAX = 1_000
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

    def changes(self) -> tuple[RouteChange, ...]:
        """What was published since the last call; does not wait."""
        try:
            records = self._reader.poll(POLL_MAX, 0)
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


class RegistryFollower:
    """Implements schemas.codec.SchemaTable over sie.schemas. Ids keep their meaning, so it reads only on a miss."""

    def __init__(self, reader: LogReader, topic: str, clock: Clock) -> None:
        self.problems: list[str] = []
        """Registrations that do not count, for the owner to log."""
        self._table = RegistryTable()
        self._reader = reader
        self._topic = topic
        self._clock = clock
        self._assigned = False
        self._ask_again_ms: dict[int, float] = {}

    def find(self, schema_id: int) -> WriterSchema | None:
        """The schema, looked for once more in the topic if it is not known; each id at most every REGISTRY_MISS_MS."""
        found = self._table.find(schema_id)
        now_ms = self._clock.monotonic_ms()
        if found is None and now_ms >= self._ask_again_ms.get(schema_id, 0.0):
            self._read()
            if len(self._ask_again_ms) >= REGISTRY_MISSES_MAX:
                self._ask_again_ms.clear()
            self._ask_again_ms[schema_id] = now_ms + REGISTRY_MISS_MS
            found = self._table.find(schema_id)
        return found

    def _read(self) -> None:
        """Up to the present end, or as far as Kafka lets us now."""
        try:
            partitions = [
                TopicPartition(self._topic, number) for number in range(self._reader.partitions_of(self._topic))
            ]
            if not partitions:
                return
            if not self._assigned:
                self._reader.assign(self._reader.beginning_offsets(partitions))
                self._assigned = True
            ends = self._reader.end_offsets(partitions)
            for _ in range(REGISTRY_STEPS_MAX):
                if all(self._reader.position(partition) >= ends[partition] for partition in partitions):
                    return
                for record in self._reader.poll(POLL_MAX, POLL_WAIT_MS):
                    problem = self._table.apply(record.key, record.value)
                    if problem:
                        self.problems.append(f"{self._topic} offset {record.offset}: {problem}")
        except Retriable:
            return
