"""Follows sie.schemas, so that records written with schemas of users can be read. Over ports only."""

from __future__ import annotations

from schemas.registry_table import RegistryTable
from schemas.writer_schema import WriterSchema
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import Clock, LogReader

STEPS_MAX = 600
POLL_MAX = 5_000
POLL_WAIT_MS = 100
MISS_EVERY_MS = 100
"""An unknown id makes it look at the topic again, at most this often: a flood of them costs 1 % of the time."""


class SchemaTableFollower:
    """Implements schemas.codec.SchemaTable. Ids never change their meaning, so only unknown ids cause reading.

    The reader is this object's own; it joins no group and commits nothing.
    """

    def __init__(self, reader: LogReader, topic: str, clock: Clock) -> None:
        self.table = RegistryTable()
        self.problems: list[str] = []
        """Records that do not count, for the owner to log and clear."""
        self._reader = reader
        self._topic = topic
        self._clock = clock
        self._partitions: list[TopicPartition] = []
        self._looked_ms: float | None = None

    def find(self, schema_id: int) -> WriterSchema | None:
        """Raises FatalLogError when the topic has to be read and cannot be: a request is not rejected for that."""
        found = self.table.find(schema_id)
        if found is None and self._may_look():
            self.read_table()
            found = self.table.find(schema_id)
        return found

    def _may_look(self) -> bool:
        return self._looked_ms is None or self._clock.monotonic_ms() - self._looked_ms >= MISS_EVERY_MS

    def read_table(self) -> None:
        """Everything up to the present end; no topic means no schemas. Raises FatalLogError when it cannot be had."""
        for _ in range(STEPS_MAX):
            if self._at_end():
                self._looked_ms = self._clock.monotonic_ms()
                return
        raise FatalLogError(f"{self._topic}: the schemas could not be read within {STEPS_MAX} polls")

    @property
    def topic_exists(self) -> bool:
        """Known after read_table."""
        return bool(self._partitions)

    def _at_end(self) -> bool:
        """One step of reading."""
        try:
            if not self._partitions and not self._assign():
                return True
            ends = self._reader.end_offsets(self._partitions)
            if all(self._reader.position(partition) >= ends[partition] for partition in self._partitions):
                return True
            for record in self._reader.poll(POLL_MAX, POLL_WAIT_MS):
                problem = self.table.apply(record.key, record.value)
                if problem:
                    self.problems.append(f"{self._topic} offset {record.offset}: {problem}")
        except Retriable:
            return False
        return False

    def _assign(self) -> bool:
        """False when there is no such topic."""
        partitions = [TopicPartition(self._topic, number) for number in range(self._reader.partitions_of(self._topic))]
        if partitions:
            self._reader.assign(self._reader.beginning_offsets(partitions))
            self._partitions = partitions
        return bool(partitions)
