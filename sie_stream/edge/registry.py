"""Writes the schema registry's topic: for `topics apply`, the command line and the gateway. Over ports only."""

from __future__ import annotations

from schemas.registry_follower import SchemaTableFollower
from schemas.registry_table import Registration, RegistryTable, registration_write
from sie_stream.errors import FatalLogError
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader, PlainWriter, TransactionalWriter

FLUSH_MS = 10_000


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
    if not follower.topic_exists:
        raise FatalLogError(f"topic {names.schemas!r} does not exist. Create it with `sie-stream topics apply`.")
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
