"""What a declaration says about personal data: which fields are hashed or encrypted, and whose they are. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from sie_stream.input_schema import compile_schema
from sie_stream.input_schema.language import Protection
from sie_stream.records import WorkItem
from sie_stream.routing import sticky_key

WITHHELD = "the engine's words are withheld, since they may repeat personal data"


class Rules(Struct, frozen=True):
    """{path: how} of the marked fields. `subject`: the input that names the data subject; empty: what routes the
    request, that is its session, else its record key, else its id."""

    inputs: dict[str, Protection]
    outputs: dict[str, Protection]
    subject: str = ""

    def subject_of(self, work: WorkItem) -> bytes:
        if self.subject:
            named = _named(work.inputs, self.subject)
            if named is not None:
                return named
        return sticky_key(work.session, work.key, work.request_id)


def rules_of(input_schema: bytes, output_schema: bytes, subject: str) -> Rules | None:
    """None: nothing is marked `hash` or `encrypt`. Raises SpecError for a schema that cannot be compiled."""
    if b'"pii"' not in input_schema and b'"pii"' not in output_schema:
        return None
    inputs, outputs = (
        compile_schema(msgspec.json.decode(schema, type=dict[str, object])).protected
        for schema in (input_schema, output_schema)
    )
    return Rules(inputs, outputs, subject) if inputs or outputs else None


def subject_bytes(value: Any) -> bytes:
    """A subject as it is hashed: text as it is, a number as JSON writes it."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else msgspec.json.encode(value)


def _named(inputs: bytes, field: str) -> bytes | None:
    try:
        value = msgspec.json.decode(inputs)
    except msgspec.DecodeError:
        return None
    found = value.get(field) if isinstance(value, dict) else None
    return None if found is None else subject_bytes(found)
