"""The schema registry as a fold over its topic: which schema an id, or a version of a subject, stands for. Pure.

A record's key is SUBJECT/VERSION, so compaction keeps every version; its value is the JSON that a registry shows:
{subject, version, id, schemaType, schema}. An id never changes its meaning: the first record with it counts.
"""

from __future__ import annotations

import json
from typing import Literal

import msgspec
from msgspec import Struct

from schemas.catalog import BY_ID, RELEASED, USER_ID_FIRST, released_text, subjects
from schemas.reference import RELEASED_TABLE
from schemas.writer_schema import WriterSchema, parse_writer_schema
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicNames
from sie_stream.records import LogWrite

SUBJECT_CHARS_MAX = 300


class Registration(Struct, frozen=True, rename={"schema_type": "schemaType"}):
    """One version of one subject."""

    subject: str
    version: int
    id: int
    schema: str
    """Text of the schema."""
    schema_type: Literal["AVRO"] = "AVRO"


_decoder = msgspec.json.Decoder(Registration)


def registry_key(subject: str, version: int) -> bytes:
    return f"{subject}/{version}".encode()


def registration_write(topic: str, registration: Registration) -> LogWrite:
    """The record that registers it."""
    key = registry_key(registration.subject, registration.version)
    return LogWrite(topic, msgspec.json.encode(registration), key)


class RegistryTable:
    """Implements writer_schema.SchemaTable over the records of the registry topic and the released schemas."""

    def __init__(self) -> None:
        self._subjects: dict[str, dict[int, Registration]] = {}
        self._texts: dict[int, str] = {}
        self._writers: dict[int, WriterSchema] = {}

    def apply(self, key: bytes | None, value: bytes | None) -> str:
        """Take in one record of the topic. Says what is wrong with one that does not count, else returns ''."""
        if value is None:
            return self._forget(key or b"")
        try:
            registration = _decoder.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"not a registration: {error}"
        if key != registry_key(registration.subject, registration.version):
            return f"key {key!r} does not fit subject {registration.subject!r} version {registration.version}"
        known = self._text_of(registration.id)
        if known is not None and not same_schema(known, registration.schema):
            return f"id {registration.id} of {registration.subject!r} already stands for another schema"
        if known is None:
            if registration.id < USER_ID_FIRST:
                return f"id {registration.id} of {registration.subject!r}: ids below {USER_ID_FIRST} are reserved"
            try:
                self._writers[registration.id] = parse_writer_schema(registration.id, registration.schema)
            except ConfigError as error:
                return f"the schema of {registration.subject!r}: {error}"
            self._texts[registration.id] = registration.schema
        self._subjects.setdefault(registration.subject, {})[registration.version] = registration
        return ""

    def _forget(self, key: bytes) -> str:
        """A deleted version leaves its subject; its id stays readable, since records with it may be in the log."""
        subject, _, version = key.decode("utf-8", "replace").rpartition("/")
        versions = self._subjects.get(subject, {})
        if not version.isdecimal() or int(version) not in versions:
            return f"nothing to delete under key {key!r}"
        del versions[int(version)]
        if not versions:
            del self._subjects[subject]
        return ""

    def _text_of(self, schema_id: int) -> str | None:
        if schema_id in BY_ID:
            return released_text(BY_ID[schema_id])
        return self._texts.get(schema_id)

    def find(self, schema_id: int) -> WriterSchema | None:
        return self._writers.get(schema_id) or RELEASED_TABLE.find(schema_id)

    def text(self, schema_id: int) -> str | None:
        """Text of the schema with this id."""
        return self._text_of(schema_id)

    def subjects(self) -> tuple[str, ...]:
        return tuple(sorted(self._subjects))

    def versions(self, subject: str) -> tuple[Registration, ...]:
        """Of one subject, oldest first; empty when it is not known."""
        found = self._subjects.get(subject, {})
        return tuple(found[version] for version in sorted(found))

    def assign(self, subject: str, schema: str) -> Registration:
        """The registration to write for a schema, or the one that is there already.

        Equal schemas have one id in all subjects. Raises ConfigError for a schema that is not read.
        """
        if not 0 < len(subject) <= SUBJECT_CHARS_MAX or not subject.isprintable() or "/" in subject:
            raise ConfigError(
                f"subject {subject[:50]!r}: allowed are 1 to {SUBJECT_CHARS_MAX} printable characters without '/'; "
                "a topic's subject is TOPIC-value"
            )
        parse_writer_schema(0, schema)
        versions = self.versions(subject)
        for registration in versions:
            if same_schema(registration.schema, schema):
                return registration
        version = versions[-1].version + 1 if versions else 1
        for schema_id in (*BY_ID, *self._texts):
            text = self._text_of(schema_id)
            if text is not None and same_schema(text, schema):
                return Registration(subject, version, schema_id, text)
        return Registration(subject, version, max((USER_ID_FIRST - 1, *self._texts)) + 1, schema)

    def released_missing(self, names: TopicNames) -> tuple[Registration, ...]:
        """Registrations of released schemas that the topic does not have yet."""
        return tuple(
            Registration(subject, released.version, released.id, released_text(released))
            for subject, name in subjects(names)
            for released in RELEASED
            if released.name == name and released.version not in self._subjects.get(subject, {})
        )


def same_schema(one: str, other: str) -> bool:
    """Whether two texts are the same schema, however they are laid out."""
    return one == other or json.loads(one) == json.loads(other)
