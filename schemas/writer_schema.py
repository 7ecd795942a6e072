"""Schemas that users wrote their records with: parsed once, and only if reading them is safe.

fastavro follows a recursive schema on the C stack and an array of nothing for as long as a count says, so records could
end the process. Such schemas are refused before anything is read with them.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, NamedTuple, Protocol
from uuid import UUID

import fastavro
from fastavro.schema import SchemaParseException

from schemas.wire import HEADER_BYTES, CodecError, bad_avro, schema_id_of
from sie_stream.errors import ConfigError


class WriterSchema(NamedTuple):
    """A registered schema, ready to read with."""

    id: int
    name: str
    """Full name of the record."""
    parsed: Any


class SchemaTable(Protocol):
    """Finds registered schemas by id."""

    def find(self, schema_id: int) -> WriterSchema | None: ...


def parse_writer_schema(schema_id: int, text: str) -> WriterSchema:
    """Raises ConfigError for what is no Avro record schema, is recursive, or has an array of items without bytes."""
    try:
        plain = json.loads(text)
        parsed = fastavro.parse_schema(plain)
        _least_bytes(parsed, {}, ())
    except (SchemaParseException, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"not an Avro schema: {type(error).__name__}: {error}") from error
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise ConfigError("the schema must be a record: its fields are the request")
    return WriterSchema(schema_id, parsed["name"], parsed)


def _least_bytes(schema: Any, named: dict[str, int], inside: tuple[str, ...]) -> int:
    """Least length of a value (1 stands for more). Raises ConfigError for what is not safe to read."""
    if isinstance(schema, str):
        if schema in inside:
            raise ConfigError(f"the type {schema!r} contains itself; recursive schemas are not read")
        return named[schema] if schema in named else int(schema != "null")
    if isinstance(schema, Sequence):
        for branch in schema:
            _least_bytes(branch, named, inside)
        return 1
    match schema["type"]:
        case "record" | "error":
            name = schema["name"]
            least = 0
            for field in schema["fields"]:
                least = max(least, _least_bytes(field["type"], named, (*inside, name)))
            named[name] = least
            return least
        case "array":
            if not _least_bytes(schema["items"], named, inside):
                raise ConfigError("an array whose items take no bytes is not read")
            return 1
        case "map":
            _least_bytes(schema["values"], named, inside)
            return 1
        case "fixed":
            named[schema["name"]] = int(schema["size"] > 0)
            return named[schema["name"]]
        case "enum":
            named[schema["name"]] = 1
            return 1
        case inner:
            return _least_bytes(inner, named, inside)


def read_datum(value: bytes, writer: Any, reader: Any = None) -> Any:
    """The value after the frame, resolved from the writer's to the reader's schema. Raises CodecError."""
    source = io.BytesIO(value)
    source.seek(HEADER_BYTES)
    try:
        found = fastavro.schemaless_reader(source, writer, reader)
    except (ValueError, TypeError, ArithmeticError, EOFError, LookupError, RecursionError, MemoryError) as error:
        raise bad_avro(f"{type(error).__name__}: {error}") from error
    if source.tell() != len(value):
        raise bad_avro(f"{len(value) - source.tell()} bytes after the end of the record")
    return found


def read_fields(value: bytes | None, schemas: SchemaTable) -> tuple[dict[str, Any], int]:
    """The fields of a record by its writer's schema, and the schema's id. Raises CodecError."""
    schema_id = schema_id_of(value)
    schema = schemas.find(schema_id)
    if schema is None:
        raise CodecError(
            "unknown_schema_id", f"schema id {schema_id} is not registered. See the ids with `sie-stream get schemas`."
        )
    assert value is not None
    return read_datum(value, schema.parsed), schema_id


def json_text(value: Any) -> bytes:
    """Fields as JSON. bytes are base64, decimals and dates are texts. Raises CodecError for NaN and infinities."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain).encode()
    except (ValueError, RecursionError) as error:
        raise bad_avro(f"not JSON: {error}") from error


def _plain(value: object) -> str:
    match value:
        case bytes():
            return b64encode(value).decode()
        case Decimal() | UUID():
            return str(value)
        case datetime() | date() | time():
            return value.isoformat()
        case _:
            raise ValueError(f"{type(value).__name__} has no JSON form")
