"""The codecs written by hand against fastavro, and against anything else that may be in a record."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import avro.schema
import msgspec
import pytest
from avro.io import BinaryDecoder, DatumReader
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, Struct

from schemas import codec, reference
from schemas.catalog import CURRENT, schema_text
from schemas.codec import CodecError, ReplicaResults
from schemas.wire import HEADER_BYTES, MEMO_MAX, Cursor, frame, long_bytes, read_long
from sie_stream.control import (
    ApplyModel,
    Decision,
    Device,
    ModelRow,
    RouteRow,
    Tick,
    WorkerFenced,
    WorkerHeartbeat,
    WorkerJoined,
)
from sie_stream.records import InferenceRequest, Provenance, Result, Timings, Usage, WorkItem
from tests.examples import examples
from tests.unit.schemas import records_strategy as make

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes | None], Any]


def decode_request(value: bytes | None) -> InferenceRequest:
    return codec.decode_request(value)[0]


CODECS: dict[str, tuple[st.SearchStrategy, Encode, Decode]] = {
    "InferenceRequest": (make.REQUESTS, codec.encode_request, decode_request),
    "WorkItem": (make.WORK_ITEMS, codec.encode_work, codec.decode_work),
    "Result": (make.RESULTS, codec.encode_result, codec.decode_result),
    "RawOutput": (make.RAW_OUTPUTS, codec.encode_raw_output, codec.decode_raw_output),
    "DeadLetter": (make.DEAD_LETTERS, codec.encode_deadletter, codec.decode_deadletter),
    "TokenDelta": (make.TOKEN_DELTAS, codec.encode_token_delta, codec.decode_token_delta),
}
ALL = pytest.mark.parametrize("name", CODECS)
TICK = codec.encode_cluster(Tick("scheduler-1"))
DECODERS: tuple[Decode, ...] = (*(decode for _, _, decode in CODECS.values()), codec.decode_cluster)


def outcome(decode: Decode, value: bytes) -> str:
    """The code of the CodecError, empty for a value; any other error is the test's failure."""
    try:
        decode(value)
    except CodecError as error:
        return error.code
    return ""


def example(name: str) -> Struct:
    result = Result(
        *("r-1", "ok", "mi-0123456789ab", "credit-risk", "1.0.0", "stable", b'{"score": 0.5}', None, Usage(3, 4)),
        Timings(1.0, 2.0, 3.0, 4.0, 5.0, 15.0),
        Provenance(
            "sie.requests", 1, 70_000, "sie.work.credit-risk", 2, 900, 3, 4, "w0", "i0", "cpu:0", "d", "e", 7, 8, 9
        ),
        1_700_000_000_000,
    )
    work = WorkItem(
        *(
            "r-1",
            "mi-0123456789ab",
            "credit-risk",
            "1.0.0",
            "stable",
            3,
            1,
            b'{"x": 1}' * 20,
            b"key",
            "sie.requests",
            1,
        ),
        *(70_000, 1_700_000_000_000, 1_700_000_000_001, 1_700_000_000_002),
        token_ids=(1, 200, 50_000),
        session="s",
    )
    request = InferenceRequest(model="credit-risk", inputs=Raw(b'{"x": 1}'), priority="P1", deadline_ms=500)
    examples = {"InferenceRequest": request, "WorkItem": work, "Result": result}
    return examples[name]


@ALL
@given(data=st.data())
@examples(60)
def test_same_bytes_and_values_as_fastavro(name: str, data: st.DataObject) -> None:
    strategy, encode, decode = CODECS[name]
    record = data.draw(strategy)
    value = encode(record)
    assert value == reference.encode(record, name)
    assert decode(value) == record
    assert decode(value) == record, "the second time from what was remembered"
    assert reference.decode(value, type(record)) == record


@given(make.WORK_ITEMS, make.RESULTS, st.binary(max_size=30).map(lambda b: b.hex().encode()))
@examples(60)
def test_results_of_a_replica_are_those_of_encode_result(item: WorkItem, parts: Result, outputs: bytes) -> None:
    origin = parts.provenance
    replica = ReplicaResults(
        version=parts.version,
        placement_epoch=origin.placement_epoch,
        work_topic=origin.work_topic,
        worker=origin.worker,
        incarnation=origin.incarnation,
        device=origin.device,
        weights_digest=origin.weights_digest,
        engine=origin.engine,
    )
    result = msgspec.structs.replace(
        parts,
        request_id=item.request_id,
        status="ok",
        instance=item.instance,
        model=item.model,
        variant=item.variant,
        outputs=outputs,
        error=None,
        provenance=msgspec.structs.replace(
            origin,
            source_topic=item.source_topic,
            source_partition=item.source_partition,
            source_offset=item.source_offset,
            route_epoch=item.route_epoch,
            seed=item.seed,
            schema_id=item.schema_id,
        ),
    )
    for _ in range(2):
        made = replica.encode_ok(
            item,
            outputs,
            timings_ms=msgspec.structs.astuple(parts.timings_ms),
            finished_at=parts.finished_at,
            batch_size=origin.batch_size,
            work_partition=origin.work_partition,
            work_offset=origin.work_offset,
            usage=parts.usage,
        )
        assert made == codec.encode_result(result)


@pytest.mark.parametrize("name", ["InferenceRequest", "WorkItem", "Result"])
def test_apache_avro_reads_it_too(name: str) -> None:
    record = example(name)
    decoder = BinaryDecoder(io.BytesIO(CODECS[name][1](record)[HEADER_BYTES:]))
    assert DatumReader(avro.schema.parse(schema_text(name))).read(decoder) == reference.datum(record)


@given(make.LONGS)
def test_numbers(number: int) -> None:
    assert read_long(b"\xff" + long_bytes(number), 1) == (number, 1 + len(long_bytes(number)))


def test_numbers_by_hand() -> None:
    # from the Avro specification's table of zigzag examples
    for number, expected in ((0, "00"), (-1, "01"), (1, "02"), (-2, "03"), (2, "04"), (-64, "7f"), (64, "8001")):
        assert long_bytes(number).hex() == expected


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70])
def test_a_number_beyond_64_bits_is_refused(number: int) -> None:
    with pytest.raises(CodecError, match="64 bits"):
        long_bytes(number)
    with pytest.raises(CodecError, match="beyond 64 bits"):
        read_long(b"\xff" * 9 + b"\x02", 0)
    with pytest.raises(CodecError, match="ten bytes"):
        read_long(b"\xff" * 10 + b"\x00", 0)


@given(st.lists(make.INTS, max_size=50), st.lists(st.integers(1, 5)))
def test_arrays_in_several_blocks(numbers: list[int], cuts: list[int]) -> None:
    """Other writers may cut an array into blocks, and say their size in bytes."""
    value, rest = b"", list(numbers)
    for size in [*cuts, len(numbers)]:
        block, rest = rest[:size], rest[size:]
        if block:
            items = b"".join(map(long_bytes, block))
            value += (
                long_bytes(-len(block)) + long_bytes(len(items)) + items if size % 2 else long_bytes(len(block)) + items
            )
    cursor = Cursor(value + b"\x00", 0)
    assert cursor.ints() == tuple(numbers)
    cursor.end()


def test_memos_stay_bounded() -> None:
    item = example("WorkItem")
    assert isinstance(item, WorkItem)
    for number in range(MEMO_MAX + 10):
        changed = msgspec.structs.replace(item, route_epoch=number, received_at_ms=1_700_000_000_000 + number)
        value = codec.encode_work(changed)
        if number % 100 == 0:
            assert codec.decode_work(value) == changed


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("decode", DECODERS)
@given(body=st.binary(max_size=200), number=st.integers(0, 9))
@examples(60)
def test_any_bytes_are_a_value_or_a_codec_error(decode: Decode, body: bytes, number: int) -> None:
    for value in (body, frame(number) + body):
        assert outcome(decode, value) in ("", "bad_avro", "unknown_schema_id", "empty_record")


@pytest.mark.parametrize("name", ["InferenceRequest", "WorkItem", "Result"])
@given(data=st.data())
@examples(100)
def test_damaged_records(name: str, data: st.DataObject) -> None:
    """One byte changed, or some cut out: a value or CodecError, never anything else."""
    _, encode, decode = CODECS[name]
    value = bytearray(encode(example(name)))
    at = data.draw(st.integers(5, len(value) - 1))
    if data.draw(st.booleans()):
        value[at] = data.draw(st.integers(0, 255))
    else:
        del value[at : at + data.draw(st.integers(1, 9))]
    assert outcome(decode, bytes(value)) in ("", "bad_avro")


@pytest.mark.parametrize("name", ["InferenceRequest", "WorkItem", "Result"])
def test_truncated_and_with_something_after_the_end(name: str) -> None:
    _, encode, decode = CODECS[name]
    value = encode(example(name))
    for size in range(5, len(value)):
        with pytest.raises(CodecError) as caught:
            decode(value[:size])
        assert caught.value.code == "bad_avro"
    for more in (b"\x00", b"\x00\x00", b"x" * 500):
        with pytest.raises(CodecError) as caught:
            decode(value + more)
        assert caught.value.code == "bad_avro"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "empty_record"),
        (b"", "empty_record"),
        (b"{}", "bad_avro"),
        (b"\x00\x00", "bad_avro"),
        (frame(4_000), "unknown_schema_id"),
        (frame(0), "unknown_schema_id"),
    ],
)
def test_frames(value: bytes | None, code: str) -> None:
    for decode in DECODERS:
        with pytest.raises(CodecError) as caught:
            decode(value)
        assert caught.value.code == code


def test_the_id_of_another_record_is_unknown_here() -> None:
    with pytest.raises(CodecError) as caught:
        codec.decode_work(codec.encode_result(example("Result")))  # type: ignore[arg-type]  # examples are Structs
    assert caught.value.code == "unknown_schema_id"
    with pytest.raises(CodecError, match="is WorkItem: a request is an InferenceRequest"):
        codec.decode_request(codec.encode_work(example("WorkItem")))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [-1, -(2**62), 2**20, 2**40, 2**62])
def test_false_lengths_allocate_nothing(length: int) -> None:
    for decode, schema in ((decode_request, "InferenceRequest"), (codec.decode_result, "Result")):
        with pytest.raises(CodecError, match="a length of"):
            decode(frame(CURRENT[schema].id) + long_bytes(length) + b"abc")
    with pytest.raises(CodecError):
        Cursor(long_bytes(length) + b"\x02", 0).ints()


def test_invalid_utf8() -> None:
    good = codec.encode_request(example("InferenceRequest"))  # type: ignore[arg-type]
    for text in (b"credit-risk", b'{"x": 1}'):
        bad = good.replace(text, b"\xff" + text[1:])
        with pytest.raises(CodecError, match="not UTF-8"):
            codec.decode_request(bad)
    item = example("WorkItem")
    assert isinstance(item, WorkItem)
    good = codec.encode_work(item)
    for text in (b"r-1", b'{"x": 1}', b"credit-risk"):
        with pytest.raises(CodecError, match="UTF-8"):
            codec.decode_work(good.replace(text, b"\xff" + text[1:]))
    with pytest.raises(CodecError, match="not UTF-8"):
        codec.encode_work(msgspec.structs.replace(item, inputs=b'"\xff"'))
    with pytest.raises(CodecError, match="not a valid text"):
        codec.encode_work(msgspec.structs.replace(item, request_id="\ud800"))


# ---------------------------------------------------------------- control plane


def test_control_records() -> None:
    for record in (Tick("s"), WorkerHeartbeat("w0", "i0"), ApplyModel(Raw(b'{"model_id": "a"}'), "me")):
        assert codec.decode_cluster(codec.encode_cluster(record)) == record
    row = ModelRow("m", "1", 1, Raw(b"{}"), "accepted", 5)
    assert codec.decode_row(codec.encode_row(row), ModelRow) == row
    decision = Decision("d-1-0", "replica_placed", "m", "room", 1, 2, {"worker": "w0"})
    assert codec.decode_decision(codec.encode_decision(decision)) == decision
    with pytest.raises(CodecError, match="the record is 'ModelRow', expected 'RouteRow'"):
        codec.decode_row(codec.encode_row(row), RouteRow)
    with pytest.raises(CodecError, match="its body is 'Tick'"):
        codec.decode_cluster(TICK.replace(b"\x08Tick{", b"\x08Tock{").replace(b"\x08Tick", b"\x08Tock", 1))
    with pytest.raises(CodecError, match="Tick"):
        codec.decode_cluster(TICK.replace(b"{", b"["))


@pytest.mark.parametrize("wide", [2**63, -(2**63) - 1, 10**400])
def test_a_number_of_the_control_plane_that_is_no_long_is_refused(wide: int) -> None:
    fine = WorkerFenced("1" * 40, "a", -(2**63))
    assert codec.decode_cluster(codec.encode_cluster(fine)) == fine, "digits in a text are no number"
    with pytest.raises(CodecError, match="bits"):
        codec.decode_cluster(codec.encode_cluster(WorkerFenced("w", "a", wide)))
    device = Device("cpu:0", "cpu", wide)
    with pytest.raises(CodecError, match="bits"):
        codec.decode_cluster(codec.encode_cluster(WorkerJoined("w", "a", "h", 1, (device,), (), {})))
