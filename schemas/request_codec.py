"""InferenceRequest as bytes and back, and requests that users wrote with a schema of their own.

A schema of one's own needs fields of the same names; others are ignored, missing ones have their defaults, and
`inputs` and `parameters` may be records, maps or arrays instead of JSON texts.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from schemas.catalog import CURRENT
from schemas.wire import (
    FALSE,
    NULL,
    SOME,
    TRUE,
    Cursor,
    bad_avro,
    frame,
    json_bytes,
    long_bytes,
    optional_long,
    optional_text,
    text_bytes,
)
from schemas.writer_schema import json_text
from sie_stream.records import InferenceRequest

FRAME = frame(CURRENT["InferenceRequest"].id)
PRIORITIES = ("P0", "P1", "P2")
_PRIORITY_BYTES: dict[str | None, bytes] = {
    None: NULL,
    **{name: SOME + long_bytes(index) for index, name in enumerate(PRIORITIES)},
}
_FIELDS = InferenceRequest.__struct_fields__
_JSON_TEXTS = ("inputs", "parameters")


def encode_request(request: InferenceRequest) -> bytes:
    """Frame and body. Raises CodecError for a text that is not valid and a number beyond 64 bits."""
    parameters = request.parameters
    return b"".join(
        (
            FRAME,
            text_bytes(request.model),
            text_bytes(request.instance),
            json_bytes(bytes(request.inputs)),
            text_bytes(request.request_id),
            NULL if parameters is None else SOME + json_bytes(bytes(parameters)),
            _PRIORITY_BYTES[request.priority],
            optional_long(request.deadline_ms),
            optional_text(request.session),
            optional_text(request.tenant),
            TRUE if request.stream else FALSE,
            optional_text(request.reply_topic),
        )
    )


def read_request(value: bytes) -> InferenceRequest:
    """The record after a frame that was checked. Raises IndexError or CodecError when it is bad."""
    cursor = Cursor(value)
    model, instance, inputs, request_id = cursor.text(), cursor.text(), cursor.json(), cursor.text()
    parameters = cursor.optional_json()
    request = InferenceRequest(
        model,
        instance,
        Raw(inputs),
        request_id,
        None if parameters is None else Raw(parameters),
        PRIORITIES[cursor.index(len(PRIORITIES))] if cursor.some() else None,
        cursor.optional_long(),
        cursor.optional_text(),
        cursor.optional_text(),
        cursor.flag(),
        cursor.optional_text(),
    )
    cursor.end()
    return request


def request_from_fields(fields: dict[str, Any]) -> InferenceRequest:
    """A request from the fields of a record with a schema of the user's. Raises CodecError."""
    plain = {name: fields[name] for name in _FIELDS if name in fields and name not in _JSON_TEXTS}
    if fields.get("inputs") is None:
        raise bad_avro("the record has no field `inputs`")
    try:
        request = msgspec.convert(plain, InferenceRequest)
    except msgspec.ValidationError as error:
        raise bad_avro(str(error)) from error
    texts = {name: Raw(_json_of(fields[name])) for name in _JSON_TEXTS if fields.get(name) is not None}
    return msgspec.structs.replace(request, **texts)


def _json_of(value: Any) -> bytes:
    """A JSON text as it is; anything else as JSON."""
    match value:
        case str():
            return value.encode()
        case bytes():
            json_bytes(value)
            return value
        case _:
            return json_text(value)
