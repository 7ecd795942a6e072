"""The schema registry on its compacted topic: written by `topics apply`, the command line and the gateway, followed by
ingress. Over ports only.
"""

from __future__ import annotations

from schemas.registry_table import Registration, RegistryTable, registration_write
from schemas.writer_schema import WriterSchema
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import Clock, LogReader, PlainWriter, TransactionalWriter

STEPS_MAX = 600
POLL_MAX = 5_000
POLL_WAIT_MS = 100
FLUSH_MS = 10_000
MISS_EVERY_MS = 100
"""An unknown id makes the follower look at the topic again, at most this often: a flood costs 1 % of the time."""


class SchemaTableFollower:
    """Implements schemas.writer_schema.SchemaTable. Ids never change their meaning, so only unknown ids cause reading.

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

    def read_table(self) -> None:
        """Everything up to the present end. Raises FatalLogError when nothing can be had for a minute."""
        for _ in range(STEPS_MAX):
            if self._at_end():
                self._looked_ms = self._clock.monotonic_ms()
                return
        raise FatalLogError(f"{self._topic}: the schemas could not be read within {STEPS_MAX} polls")

    def find(self, schema_id: int) -> WriterSchema | None:
        """Raises FatalLogError when the topic has to be read and cannot be."""
        found = self.table.find(schema_id)
        if found is None and self._may_look():
            self.read_table()
            found = self.table.find(schema_id)
        return found

    def _may_look(self) -> bool:
        return self._looked_ms is None or self._clock.monotonic_ms() - self._looked_ms >= MISS_EVERY_MS

    def _at_end(self) -> bool:
        """One step of reading."""
        try:
            if not self._partitions:
                self._assign()
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

    def _assign(self) -> None:
        partitions = [TopicPartition(self._topic, number) for number in range(self._reader.partitions_of(self._topic))]
        if not partitions:
            raise FatalLogError(f"topic {self._topic!r} does not exist. Create it with `sie-stream topics apply`.")
        self._reader.assign(self._reader.beginning_offsets(partitions))
        self._partitions = partitions


class _NoClock:
    """For reading a table once: time plays no part."""

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return 0.0


def registry_table(reader: LogReader, names: TopicNames) -> RegistryTable:
    """The registry as it is now. Raises FatalLogError when the topic is not there."""
    follower = SchemaTableFollower(reader, names.schemas, _NoClock())
    follower.read_table()
    return follower.table


def register_released(reader: LogReader, writer: PlainWriter, names: TopicNames) -> int:
    """Write the released schemas that are not registered yet; says how many. Repeating or racing it does no harm.

    Raises FatalLogError when the topic is not there, LogError when something could not be delivered.
    """
    missing = registry_table(reader, names).released_missing(names)
    if missing:
        writer.write(registration_write(names.schemas, registration) for registration in missing)
        writer.flush(FLUSH_MS)
    return len(missing)


def register(
    reader: LogReader, writer: TransactionalWriter, names: TopicNames, subject: str, schema: str
) -> Registration:
    """Register a user's schema; returns what is registered already when it is.

    `writer` has the id names.schemas_transactional_id: taking it fences whoever else is about to register, so no id is
    given twice. Raises ConfigError for a schema that is not read, Fenced when somebody else came after us.
    """
    writer.init()
    table = registry_table(reader, names)
    registration = table.assign(subject, schema)
    if registration in table.versions(subject):
        return registration
    writer.begin()
    writer.write([registration_write(names.schemas, registration)])
    writer.commit()
    return registration
