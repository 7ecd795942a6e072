"""InferenceRequest as bytes and back, and requests that users wrote with a schema of their own.

A schema of one's own needs fields of the same names; others are ignored, missing ones have their defaults, and
`inputs` and `parameters` may be records, maps or arrays instead of JSON texts.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Raw

from schemas.catalog import CURRENT
from schemas.wire import (
    FALSE,
    HEADER_BYTES,
    MEMO_MAX,
    NULL,
    SOME,
    TRUE,
    Cursor,
    bad_avro,
    check_utf8,
    frame,
    json_bytes,
    long_bytes,
    optional_long,
    optional_text,
    read_span,
    text_bytes,
)
from schemas.writer_schema import json_text
from sie_stream.records import InferenceRequest, InputsRef

FRAME = frame(CURRENT["InferenceRequest"].id)
Priority = Literal["P0", "P1", "P2"]
PRIORITIES: tuple[Priority, ...] = ("P0", "P1", "P2")
_PRIORITY_BYTES: dict[str | None, bytes] = {
    None: NULL,
    **{name: SOME + long_bytes(index) for index, name in enumerate(PRIORITIES)},
}
_FIELDS = InferenceRequest.__struct_fields__
_JSON_TEXTS = ("inputs", "parameters")


def encode_request(request: InferenceRequest) -> bytes:
    """Frame and body. Raises CodecError for a text that is not valid and a number beyond 64 bits."""
    return b"".join(
        (
            FRAME,
            text_bytes(request.model),
            text_bytes(request.instance),
            json_bytes(bytes(request.inputs)),
            text_bytes(request.request_id),
            _options(request),
        )
    )


def _options(request: InferenceRequest) -> bytes:
    parameters = request.parameters
    return b"".join(
        (
            NULL if parameters is None else SOME + json_bytes(bytes(parameters)),
            _PRIORITY_BYTES[request.priority],
            optional_long(request.deadline_ms),
            optional_text(request.session),
            optional_text(request.tenant),
            TRUE if request.stream else FALSE,
            optional_text(request.reply_topic),
            NULL if request.inputs_ref is None else _ref(request.inputs_ref),
        )
    )


def _ref(ref: InputsRef) -> bytes:
    return b"".join((SOME, text_bytes(ref.url), text_bytes(ref.sha256), optional_long(ref.size)))


_Options = tuple[Raw | None, Priority | None, int | None, str | None, str | None, bool, str | None, InputsRef | None]
_OPTIONS_BYTES_MAX = 256
_seen_options: dict[bytes, _Options] = {}


def _read_options(value: bytes, at: int) -> _Options:
    cursor = Cursor(value, at)
    parameters = cursor.optional_json()
    options = (
        None if parameters is None else Raw(parameters),
        PRIORITIES[cursor.index(len(PRIORITIES))] if cursor.some() else None,
        cursor.optional_long(),
        cursor.optional_text(),
        cursor.optional_text(),
        cursor.flag(),
        cursor.optional_text(),
        InputsRef(cursor.text(), cursor.text(), cursor.optional_long()) if cursor.some() else None,
    )
    cursor.end()
    if len(value) - at <= _OPTIONS_BYTES_MAX:
        if len(_seen_options) >= MEMO_MAX // 8:
            _seen_options.clear()
        _seen_options[value[at:]] = options
    return options


def read_request(value: bytes) -> InferenceRequest:
    """The record after a frame that was checked. Raises IndexError, UnicodeDecodeError or CodecError when it is bad."""
    start, at = read_span(value, HEADER_BYTES)
    model = value[start:at].decode()
    start, at = read_span(value, at)
    instance = value[start:at].decode()
    start, at = read_span(value, at)
    inputs = value[start:at]
    if not inputs.isascii():
        check_utf8(inputs)
    start, at = read_span(value, at)
    request_id = value[start:at].decode()
    options = _seen_options.get(value[at:]) or _read_options(value, at)
    return InferenceRequest(model, instance, Raw(inputs), request_id, *options)


def request_from_fields(fields: dict[str, Any]) -> InferenceRequest:
    """A request from the fields of a record with a schema of the user's. Raises CodecError."""
    plain = {name: fields[name] for name in _FIELDS if name in fields and name not in _JSON_TEXTS}
    if fields.get("inputs") is None and fields.get("inputs_ref") is None:
        raise bad_avro("the record has no field `inputs`, and no `inputs_ref` instead")
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
