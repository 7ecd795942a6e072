"""Our records by fastavro: for older releases of our schemas, and the slow twin of the fast codecs in tests."""

from __future__ import annotations

import io
from typing import Any, TypeVar

import fastavro
import msgspec
from msgspec import Raw, Struct

from schemas.catalog import BY_ID, CURRENT, released_text
from schemas.wire import CodecError, bad_avro, frame, schema_id_of
from schemas.writer_schema import WriterSchema, parse_writer_schema, read_datum
from sie_stream.records import InferenceRequest

RecordT = TypeVar("RecordT", bound=Struct)
JSON_TEXTS = ("inputs", "outputs", "parameters")
"""Fields that are JSON texts: bytes or Raw in our structs, strings in Avro."""

_parsed: dict[int, WriterSchema] = {}


class ReleasedTable:
    """Implements writer_schema.SchemaTable: the released schemas and no others."""

    def find(self, schema_id: int) -> WriterSchema | None:
        found = _parsed.get(schema_id)
        if found is None and schema_id in BY_ID:
            found = _parsed[schema_id] = parse_writer_schema(schema_id, released_text(BY_ID[schema_id]))
        return found


RELEASED_TABLE = ReleasedTable()


def released_schema(schema_id: int) -> Any:
    """A released schema as fastavro has it. Raises CodecError for an unknown id."""
    found = RELEASED_TABLE.find(schema_id)
    if found is None:
        raise CodecError("unknown_schema_id", f"schema id {schema_id} is not of a released schema")
    return found.parsed


def datum(record: Struct) -> dict[str, Any]:
    """A struct as fastavro wants it."""
    out: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, Struct):
            value = datum(value)
        elif name in JSON_TEXTS and value is not None:
            value = bytes(value).decode()
        elif isinstance(value, tuple):
            value = list(value)
        out[name] = value
    return out


def struct(values: dict[str, Any], kind: type[RecordT]) -> RecordT:
    """The inverse of `datum`. Raises CodecError when a value is not allowed."""
    texts = {name: values[name].encode() for name in JSON_TEXTS if isinstance(values.get(name), str)}
    plain = {name: value for name, value in values.items() if name not in texts}
    if isinstance(plain.get("result"), dict):
        plain["result"] = _with_texts(plain["result"])
    if kind is InferenceRequest:
        made = _converted(plain, kind)
        return msgspec.structs.replace(made, **{name: Raw(text) for name, text in texts.items()})
    return _converted(plain | texts, kind)


def _with_texts(values: dict[str, Any]) -> dict[str, Any]:
    texts = {name: values[name].encode() for name in JSON_TEXTS if isinstance(values.get(name), str)}
    return values | texts


def _converted(values: dict[str, Any], kind: type[RecordT]) -> RecordT:
    try:
        return msgspec.convert(values, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise bad_avro(str(error)) from error


def encode(record: Struct, name: str) -> bytes:
    """Frame and body of one record by the current schema of that name. Raises CodecError."""
    released = CURRENT[name]
    out = io.BytesIO()
    out.write(frame(released.id))
    try:
        fastavro.schemaless_writer(out, released_schema(released.id), datum(record))
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise bad_avro(f"{name}: {error}") from error
    return out.getvalue()


def decode(value: bytes | None, kind: type[RecordT]) -> RecordT:
    """One record written with any release of its schema. Raises CodecError."""
    name = kind.__name__
    schema_id = schema_id_of(value)
    if schema_id not in BY_ID or BY_ID[schema_id].name != name:
        raise CodecError("unknown_schema_id", f"schema id {schema_id} is not one of {name}")
    assert value is not None
    return struct(read_datum(value, released_schema(schema_id), released_schema(CURRENT[name].id)), kind)
