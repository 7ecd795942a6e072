"""Encoding and decoding by fastavro: for schemas other than our own current ones, and the slow twin in tests."""

from __future__ import annotations

import io
from typing import Any, TypeVar

import fastavro
import msgspec
from msgspec import Raw, Struct

from schemas.catalog import BY_ID, CURRENT, released_text, schema_text
from schemas.wire import HEADER_BYTES, CodecError, frame, schema_id_of

RecordT = TypeVar("RecordT", bound=Struct)
JSON_TEXTS = ("inputs", "outputs", "parameters")
"""Fields that are JSON texts: bytes in our structs, strings in Avro."""

_parsed: dict[int, Any] = {}


def parsed(schema_id: int) -> Any:
    """A released schema, parsed. Raises CodecError for an unknown id."""
    found = _parsed.get(schema_id)
    if found is None:
        if schema_id not in BY_ID:
            raise CodecError("unknown_schema_id", f"schema id {schema_id} is not registered")
        found = fastavro.parse_schema(msgspec.json.decode(released_text(BY_ID[schema_id])))
        _parsed[schema_id] = found
    return found


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
    raw = kind.__name__ == "InferenceRequest"
    plain = {name: value for name, value in values.items() if not (raw and name in JSON_TEXTS)}
    if not raw:
        plain.update(texts)
    if isinstance(plain.get("result"), dict):
        result = plain["result"]
        plain["result"] = {**result, "outputs": None if result["outputs"] is None else result["outputs"].encode()}
    try:
        made = msgspec.convert(plain, kind, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise CodecError("bad_avro", str(error)) from error
    if raw:
        return msgspec.structs.replace(made, **{name: Raw(text) for name, text in texts.items()})
    return made


def encode(record: Struct, name: str) -> bytes:
    """Frame and body of one record by its current schema."""
    released = CURRENT[name]
    out = io.BytesIO()
    out.write(frame(released.id))
    try:
        fastavro.schemaless_writer(out, parsed(released.id), datum(record))
    except (ValueError, TypeError, OverflowError, AttributeError, KeyError) as error:
        raise CodecError("bad_avro", f"{name}: {error}") from error
    return out.getvalue()


def read(value: bytes, writer: Any, reader: Any) -> Any:
    """The datum after the frame, resolved from the writer's to the reader's schema."""
    source = io.BytesIO(value)
    source.seek(HEADER_BYTES)
    try:
        found = fastavro.schemaless_reader(source, writer, reader)
    except (ValueError, TypeError, OverflowError, EOFError, IndexError, KeyError, RecursionError, MemoryError) as error:
        raise CodecError("bad_avro", f"{type(error).__name__}: {error}") from error
    if source.tell() != len(value):
        raise CodecError("bad_avro", f"{len(value) - source.tell()} bytes after the end of the record")
    return found


def decode(value: bytes | None, kind: type[RecordT]) -> RecordT:
    """One record written with any released version of its schema. Raises CodecError."""
    name = kind.__name__
    schema_id = schema_id_of(value)
    if schema_id not in BY_ID or BY_ID[schema_id].name != name:
        raise CodecError("unknown_schema_id", f"schema id {schema_id} is not one of {name}")
    assert value is not None
    return struct(read(value, parsed(schema_id), parsed(CURRENT[name].id)), kind)


def development_schema(name: str) -> Any:
    """The schema in <name>.avsc, as plain JSON values."""
    return msgspec.json.decode(schema_text(name))
