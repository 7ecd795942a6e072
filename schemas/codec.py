"""Every record of the log as bytes and back: Avro in Confluent framing.

decode functions raise CodecError (code bad_avro, unknown_schema_id or empty_record) and nothing else. What was written
with an older release of a schema is resolved to the current one by Avro's rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from schemas import reference, request_codec, result_codec, work_codec
from schemas.catalog import BY_ID, CURRENT
from schemas.reference import RELEASED_TABLE
from schemas.request_codec import encode_request, request_from_fields
from schemas.result_codec import ReplicaResults, encode_raw_output, encode_result
from schemas.wire import (
    FALSE,
    TRUE,
    CodecError,
    Cursor,
    bad_avro,
    blob_bytes,
    frame,
    ints_bytes,
    long_bytes,
    schema_id_of,
    text_bytes,
)
from schemas.work_codec import encode_work
from schemas.writer_schema import SchemaTable, json_text, read_fields
from sie_stream.control import ClusterRecord, Decision
from sie_stream.records import DeadLetter, InferenceRequest, RawOutput, Result, TokenDelta, WorkItem

__all__ = [
    "CodecError",
    "SchemaTable",
    "ReplicaResults",
    "encode_request",
    "decode_request",
    "decode_fields",
    "encode_work",
    "decode_work",
    "encode_result",
    "decode_result",
    "encode_raw_output",
    "decode_raw_output",
    "encode_deadletter",
    "decode_deadletter",
    "encode_token_delta",
    "decode_token_delta",
    "encode_cluster",
    "decode_cluster",
    "encode_row",
    "decode_row",
    "encode_decision",
    "decode_decision",
]

RecordT = TypeVar("RecordT", bound=Struct)

_ENVELOPE_FRAME = frame(CURRENT["ControlEnvelope"].id)
_DEADLETTER_FRAME = frame(CURRENT["DeadLetter"].id)
_DELTA_FRAME = frame(CURRENT["TokenDelta"].id)


def _decoder(own: bytes, read: Callable[[bytes], RecordT], kind: type[RecordT]) -> Callable[[bytes | None], RecordT]:
    """Decodes by hand when the record has the current schema's frame `own`, else by the schema that it names."""

    def decode(value: bytes | None) -> RecordT:
        if value is None or not value.startswith(own):
            return reference.decode(value, kind)
        try:
            return read(value)
        except IndexError as error:
            raise bad_avro(f"the {kind.__name__} ends too early") from error
        except UnicodeDecodeError as error:
            raise bad_avro(f"a text of the {kind.__name__} is not UTF-8: {error}") from error

    return decode


# ---------------------------------------------------------------- data plane


_decode_own_request = _decoder(request_codec.FRAME, request_codec.read_request, InferenceRequest)
_OWN_REQUEST_ID = CURRENT["InferenceRequest"].id


def decode_request(value: bytes | None, schemas: SchemaTable = RELEASED_TABLE) -> tuple[InferenceRequest, int]:
    """The request and the id of the schema it was written with: ours, or one of the user's that `schemas` knows."""
    if value is not None and value.startswith(request_codec.FRAME):
        return _decode_own_request(value), _OWN_REQUEST_ID
    schema_id = schema_id_of(value)
    released = BY_ID.get(schema_id)
    if released is None:
        fields, _ = read_fields(value, schemas)
        return request_from_fields(fields), schema_id
    if released.name != "InferenceRequest":
        raise CodecError(
            "unknown_schema_id", f"schema id {schema_id} is {released.name}: a request is an InferenceRequest"
        )
    return reference.decode(value, InferenceRequest), schema_id


def decode_fields(value: bytes | None, schemas: SchemaTable = RELEASED_TABLE) -> tuple[Raw, int]:
    """All fields of a record of any registered schema as a JSON object, and the schema's id."""
    fields, schema_id = read_fields(value, schemas)
    return Raw(json_text(fields)), schema_id


decode_work = _decoder(work_codec.FRAME, work_codec.read_work, WorkItem)
decode_result = _decoder(result_codec.RESULT_FRAME, result_codec.read_result, Result)
decode_raw_output = _decoder(result_codec.RAW_OUTPUT_FRAME, result_codec.read_raw_output, RawOutput)


def encode_deadletter(letter: DeadLetter) -> bytes:
    return b"".join(
        (
            _DEADLETTER_FRAME,
            text_bytes(letter.request_id),
            text_bytes(letter.reason),
            text_bytes(letter.message),
            text_bytes(letter.source_topic),
            long_bytes(letter.source_partition),
            long_bytes(letter.source_offset),
            blob_bytes(letter.original),
            long_bytes(letter.original_bytes),
            text_bytes(letter.original_sha256),
            text_bytes(letter.stack_digest),
            long_bytes(letter.attempts),
            long_bytes(letter.at_ms),
            text_bytes(letter.component),
        )
    )


def _read_deadletter(value: bytes) -> DeadLetter:
    cursor = Cursor(value)
    text, long = cursor.text, cursor.long
    letter = DeadLetter(
        *(text(), text(), text(), text(), long(), long(), cursor.blob()),
        *(long(), text(), text(), long(), long(), text()),
    )
    cursor.end()
    return letter


decode_deadletter = _decoder(_DEADLETTER_FRAME, _read_deadletter, DeadLetter)


def encode_token_delta(delta: TokenDelta) -> bytes:
    return b"".join(
        (
            _DELTA_FRAME,
            text_bytes(delta.request_id),
            long_bytes(delta.index),
            ints_bytes(delta.token_ids),
            text_bytes(delta.text),
            TRUE if delta.provisional else FALSE,
            text_bytes(delta.worker),
            text_bytes(delta.incarnation),
            long_bytes(delta.attempt),
        )
    )


def _read_token_delta(value: bytes) -> TokenDelta:
    cursor = Cursor(value)
    text, long = cursor.text, cursor.long
    delta = TokenDelta(text(), long(), cursor.ints(), text(), cursor.flag(), text(), text(), long())
    cursor.end()
    return delta


decode_token_delta = _decoder(_DELTA_FRAME, _read_token_delta, TokenDelta)


# ---------------------------------------------------------------- control plane


class ControlEnvelope(Struct, frozen=True, gc=False):
    """Any record of the control plane: its name, and its fields as a JSON object."""

    kind: str
    body: str


_cluster_decoder = msgspec.json.Decoder(ClusterRecord)
_row_decoders: dict[type, msgspec.json.Decoder[Any]] = {}
_LONG_END = 2**63
_MANY_DIGITS = re.compile(r"[0-9]{19}")
"""Only a text with so many digits in a row can hold a number that is too wide."""


def _seal(kind: str, record: Struct) -> bytes:
    body = msgspec.json.encode(record)
    return b"".join((_ENVELOPE_FRAME, text_bytes(kind), blob_bytes(body)))


def _read_envelope(value: bytes) -> ControlEnvelope:
    cursor = Cursor(value)
    envelope = ControlEnvelope(cursor.text(), cursor.text())
    cursor.end()
    return envelope


_decode_envelope = _decoder(_ENVELOPE_FRAME, _read_envelope, ControlEnvelope)


def _open(value: bytes | None, decoder: msgspec.json.Decoder[Any], kind: str) -> Any:
    """The record in an envelope; `kind` empty: any."""
    envelope = _decode_envelope(value)
    if kind and envelope.kind != kind:
        raise bad_avro(f"the record is {envelope.kind!r}, expected {kind!r}")
    try:
        record = decoder.decode(envelope.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_avro(f"{envelope.kind}: {error}") from error
    if type(record).__name__ != envelope.kind:
        raise bad_avro(f"the envelope says {envelope.kind!r}, its body is {type(record).__name__!r}")
    if _MANY_DIGITS.search(envelope.body) and (wide := _wide_number(record)) is not None:
        raise bad_avro(f"{envelope.kind}: a number of {wide.bit_length()} bits, allowed are 63")
    return record


def _wide_number(value: Any) -> int | None:
    """The first integer in a record that does not fit into a long of Avro; JSON texts inside it are not looked into.

    JSON's integers have any size. Sums, floats and other formats further on do not.
    """
    if isinstance(value, int):
        return None if -_LONG_END <= value < _LONG_END else value
    if isinstance(value, Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    elif isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return None
    return next((wide for one in value if (wide := _wide_number(one)) is not None), None)


def encode_cluster(record: ClusterRecord) -> bytes:
    """A fact or command for sie.cluster."""
    return _seal(type(record).__name__, record)


def decode_cluster(value: bytes | None) -> ClusterRecord:
    return _open(value, _cluster_decoder, "")


def encode_row(row: Struct) -> bytes:
    """A row of a state table: ModelRow, InstanceRow, RouteRow or PlacementRow."""
    return _seal(type(row).__name__, row)


def decode_row(value: bytes | None, kind: type[RecordT]) -> RecordT:
    """A row of that kind; any other is bad_avro."""
    decoder = _row_decoders.get(kind)
    if decoder is None:
        decoder = _row_decoders[kind] = msgspec.json.Decoder(kind)
    return _open(value, decoder, kind.__name__)


def encode_decision(decision: Decision) -> bytes:
    """For sie.decisions."""
    return _seal("Decision", decision)


def decode_decision(value: bytes | None) -> Decision:
    return decode_row(value, Decision)
