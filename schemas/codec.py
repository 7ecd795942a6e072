"""Every record of the log as bytes and back: Avro in Confluent framing.

All decode functions raise CodecError (code bad_avro, unknown_schema_id or empty_record) and nothing else.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from schemas import reference
from schemas.catalog import CURRENT
from schemas.wire import CodecError
from sie_stream.control import ClusterRecord, Decision
from sie_stream.records import DeadLetter, InferenceRequest, RawOutput, Result, TokenDelta, WorkItem

RowT = TypeVar("RowT", bound=Struct)


class Envelope(Struct, frozen=True, gc=False):
    """The ControlEnvelope schema."""

    kind: str
    body: str


def encode_request(request: InferenceRequest) -> bytes:
    return reference.encode(request, "InferenceRequest")


def decode_request(value: bytes | None) -> tuple[InferenceRequest, int]:
    """The request and the schema id it was written with."""
    request = reference.decode(value, InferenceRequest)
    assert value is not None
    return request, int.from_bytes(value[1:5], "big")


def encode_work(item: WorkItem) -> bytes:
    return reference.encode(item, "WorkItem")


def decode_work(value: bytes | None) -> WorkItem:
    return reference.decode(value, WorkItem)


def encode_result(result: Result) -> bytes:
    return reference.encode(result, "Result")


def decode_result(value: bytes | None) -> Result:
    return reference.decode(value, Result)


def encode_raw_output(output: RawOutput) -> bytes:
    return reference.encode(output, "RawOutput")


def decode_raw_output(value: bytes | None) -> RawOutput:
    return reference.decode(value, RawOutput)


def encode_deadletter(letter: DeadLetter) -> bytes:
    return reference.encode(letter, "DeadLetter")


def decode_deadletter(value: bytes | None) -> DeadLetter:
    return reference.decode(value, DeadLetter)


def encode_token_delta(delta: TokenDelta) -> bytes:
    return reference.encode(delta, "TokenDelta")


def decode_token_delta(value: bytes | None) -> TokenDelta:
    return reference.decode(value, TokenDelta)


_cluster_decoder = msgspec.json.Decoder(ClusterRecord)
_row_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def _seal(kind: str, record: Struct) -> bytes:
    return reference.encode(Envelope(kind, msgspec.json.encode(record).decode()), "ControlEnvelope")


def _open(value: bytes | None) -> Envelope:
    name = "ControlEnvelope"
    schema_id = reference.schema_id_of(value)
    if schema_id != CURRENT[name].id:
        raise CodecError("unknown_schema_id", f"schema id {schema_id} is not one of {name}")
    assert value is not None
    schema = reference.parsed(schema_id)
    return Envelope(**reference.read(value, schema, schema))


def encode_cluster(record: ClusterRecord) -> bytes:
    return _seal(type(record).__name__, record)


def decode_cluster(value: bytes | None) -> ClusterRecord:
    envelope = _open(value)
    try:
        return _cluster_decoder.decode(envelope.body)
    except msgspec.DecodeError as error:
        raise CodecError("bad_avro", f"{envelope.kind}: {error}") from error


def encode_row(row: Struct) -> bytes:
    """A row of a state table: ModelRow, InstanceRow, RouteRow or PlacementRow."""
    return _seal(type(row).__name__, row)


def decode_row(value: bytes | None, kind: type[RowT]) -> RowT:
    """A row of the expected kind; another kind is bad_avro."""
    envelope = _open(value)
    if envelope.kind != kind.__name__:
        raise CodecError("bad_avro", f"the record is {envelope.kind!r}, expected {kind.__name__!r}")
    decoder = _row_decoders.get(kind)
    if decoder is None:
        decoder = _row_decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(envelope.body)
    except msgspec.DecodeError as error:
        raise CodecError("bad_avro", f"{envelope.kind}: {error}") from error


def encode_decision(decision: Decision) -> bytes:
    return _seal("Decision", decision)


def decode_decision(value: bytes | None) -> Decision:
    return decode_row(value, Decision)
