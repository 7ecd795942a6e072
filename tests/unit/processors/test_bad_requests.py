"""Every way a request can be wrong, and the one ending it has."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from msgspec import Raw

from processors.ingress.events import BatchAborted
from schemas import codec
from sie_stream.records import REQUEST_ID_HEADER, Headers, InferenceRequest, Status
from tests.unit.processors.kit import NOW_MS, Encoders, body, machine, record, route, take_up
from tests.unit.processors.test_egress import Words

DEEP = b'{"model":"wine","inputs":{"x":' + b"[" * 100 + b"]" * 100 + b"}}"
VERY_DEEP = b'{"model":"wine","inputs":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
HUGE = b'{"model":"wine","inputs":{"name":"' + b"a" * 10_000_000 + b'"}}'
NO_JSON = codec.encode_request(InferenceRequest(model="wine", inputs=Raw(b"{x}")))
AVRO = codec.encode_request(InferenceRequest(model="wine"))


class Row(NamedTuple):
    name: str
    value: bytes | None
    code: str
    field: str
    dead_letter: bool = False
    """The bytes could not be read as a request at all."""
    status: Status = "rejected"
    says: str = ""
    """Part of the message."""
    key: bytes | None = b"k"
    headers: Headers = ()


ROWS = [
    Row("tombstone", None, "tombstone", "", True),
    Row("tombstone without key", None, "tombstone", "", True, key=None),
    Row("empty record", b"", "empty_record", "", True),
    Row("10 MB record", HUGE, "payload_too_large", "", True),
    Row("giant key", body(), "payload_too_large", "", True, key=b"k" * 300_000),
    Row("truncated JSON", b'{"model":"wine"', "not_json", "", True),
    Row("not JSON", b"model=wine", "not_json", "", True),
    Row("byte order mark", b"\xef\xbb\xbf" + body(), "not_json", "", True),
    Row("invalid UTF-8 in a name", b'{"model":"wi\xffne","inputs":{"x":1}}', "bad_utf8", "", True),
    Row("invalid UTF-8 in inputs", b'{"model":"wine","inputs":{"name":"\xff"}}', "bad_utf8", "", True),
    Row("NaN", b'{"model":"wine","inputs":{"x":NaN}}', "not_finite", "", True),
    Row("Infinity", b'{"model":"wine","inputs":{"x":-Infinity}}', "not_finite", "", True),
    Row("a number beyond doubles", b'{"model":"wine","inputs":{"x":1e999}}', "not_finite", "inputs.x"),
    Row("nested 100 deep", DEEP, "too_deep", ""),
    Row("nested 100,000 deep", VERY_DEEP, "too_deep", "", True),
    Row("deep parameters", body(parameters={"stop": json.loads("[" * 70 + "]" * 70)}), "too_deep", ""),
    Row("an array", b"[1,2]", "wrong_type", "", True),
    Row("a string", b'"wine"', "wrong_type", "", True),
    Row("unknown field", body(modle="wine"), "unknown_field", "modle", True, says="Did you mean 'model'?"),
    Row("model is a number", body(model=5), "wrong_type", "model", True),
    Row("stream is a string", body(stream="yes"), "wrong_type", "stream", True),
    Row("bad priority", body(priority="P9"), "bad_priority", "priority", True, says="P0, P1 or P2"),
    Row("fractional deadline", body(deadline_ms=1.5), "bad_deadline", "deadline_ms", True),
    Row("negative deadline", body(deadline_ms=-1), "bad_deadline", "deadline_ms"),
    Row("zero deadline", body(deadline_ms=0), "bad_deadline", "deadline_ms"),
    Row("huge deadline", body(deadline_ms=10**30), "bad_deadline", "deadline_ms"),
    Row("no model", b'{"inputs":{"x":1}}', "missing_model", "model"),
    Row("model and instance", body(instance="mi-wine"), "ambiguous_model", "instance"),
    Row("unknown model", body(model="winee"), "unknown_model", "model", says="Did you mean 'wine'?"),
    Row("unknown instance", b'{"instance":"mi-wien","inputs":{"x":1}}', "unknown_model", "instance", says="mi-wine"),
    Row("unknown version", body(model="wine@9"), "unknown_version", "model", says="1.0.0"),
    Row("long request id", body(request_id="r" * 300), "bad_request_id", "request_id", True),
    Row("control characters in the id", body(request_id="a\nb"), "bad_request_id", "request_id", True),
    Row("ids differ", body(request_id="a"), "bad_request_id", "request_id", True, headers=((REQUEST_ID_HEADER, b"b"),)),
    Row("inputs are null", body(inputs=None), "wrong_type", "inputs"),
    Row("inputs are an array", body(inputs=[1]), "wrong_type", "inputs"),
    Row("input missing", body(inputs={}), "missing_field", "inputs.x"),
    Row("input unknown", body(inputs={"x": 1, "nam": "a"}), "unknown_field", "inputs.nam", says="Did you mean 'name'?"),
    Row("input of another type", body(inputs={"x": "1"}), "wrong_type", "inputs.x"),
    Row("input out of range", body(inputs={"x": 11}), "out_of_range", "inputs.x"),
    Row("input too long", body(inputs={"x": 1, "name": "abcdef"}), "too_long", "inputs.name"),
    Row("parameters are a list", body(parameters=[1]), "wrong_type", "parameters"),
    Row("long session", body(session="s" * 300), "too_long", "session"),
    Row("long tenant", body(tenant="t" * 300), "too_long", "tenant"),
    Row("reply topic of our own", body(reply_topic="sie.results"), "bad_reply_topic", "reply_topic", says="sie."),
    Row("reply topic that is missing", body(reply_topic="nowhere"), "bad_reply_topic", "reply_topic", says="create it"),
    Row("reply topic that is no name", body(reply_topic="a b"), "bad_reply_topic", "reply_topic"),
    Row("Avro without a body", b"\x00", "bad_avro", "", True),
    Row("Avro cut short", AVRO[:-2], "bad_avro", "", True),
    Row("Avro with a tail", AVRO + b"xx", "bad_avro", "", True),
    Row("Avro of an unknown schema", b"\x00\x00\x0f\x00\x00" + AVRO[5:], "unknown_schema_id", "", True),
    Row("Avro of another record", codec.encode_row(route()), "unknown_schema_id", "", True),
    Row("Avro with inputs that are no JSON", NO_JSON, "not_json", "inputs", True),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_bad_request_ends_once(row: Row) -> None:
    ingress = machine(route())
    written = take_up(ingress, record(row.value, offset=41, key=row.key, headers=row.headers))

    assert written.work == []
    (result,) = written.results
    assert result.error is not None
    assert (result.status, result.error.code, result.error.field) == (row.status, row.code, row.field)
    assert row.says in result.error.message
    assert result.provenance.source_offset == 41
    assert len(written.letters) == row.dead_letter
    for letter in written.letters:
        assert letter.reason == row.code
        assert letter.request_id == result.request_id
        assert letter.original_bytes == len(row.value or b"")
        assert len(letter.original) <= 64 * 1024
    (offsets,) = [positions for _, positions in written.batch.offsets]
    assert [one.offset for one in offsets.values()] == [42]


def test_a_bad_request_does_not_disturb_its_neighbours() -> None:
    ingress = machine(route())
    bad = [row.value for row in ROWS if len(row.value or b"") < 1_000 and row.key == b"k" and not row.headers]
    records = []
    for value in bad:
        records.append(record(value, offset=len(records)))
        records.append(record(body(request_id=f"good-{len(records)}"), offset=len(records)))
    written = take_up(ingress, *records)
    assert len(written.work) == len(written.results) == len(bad)
    assert len({result.request_id for result in written.results}) == len(bad)


def test_the_id_of_an_undecodable_request_is_recovered() -> None:
    ingress = machine(route())
    in_body = take_up(ingress, record(body(request_id="mine", priority="P9")))
    in_header = take_up(ingress, record(b"{", headers=((REQUEST_ID_HEADER, b"also-mine"),)))
    nowhere = take_up(ingress, record(b"{", offset=3))
    assert [one.results[0].request_id for one in (in_body, in_header, nowhere)] == [
        "mine",
        "also-mine",
        "src:sie.requests:0:3",
    ]


def test_an_undecodable_repeat_gets_no_second_ending() -> None:
    ingress = machine(route())
    first = take_up(ingress, record(body(request_id="a")))
    repeat = take_up(ingress, record(body(request_id="a", priority="P9"), offset=1))
    assert len(first.work) == 1
    assert (repeat.results, len(repeat.letters)) == ([], 1)


def test_deadline_quota_and_broken_models_have_their_own_status() -> None:
    ingress = machine(
        route(), route("slow", quota_per_s=1.0), route("text", tokenizer="missing.json"), route("old", deadline_ms=50)
    )
    late = take_up(ingress, record(body(deadline_ms=10), at_ms=NOW_MS - 10))
    by_default = take_up(ingress, record(body(model="old"), at_ms=NOW_MS - 60))
    within = take_up(ingress, record(body(model="slow"), offset=1))
    over = take_up(ingress, record(body(model="slow"), offset=2))
    broken = take_up(ingress, record(body(model="text"), offset=3))
    assert len(within.work) == 1
    endings = [(one.results[0].status, one.results[0].error) for one in (late, by_default, over, broken)]
    assert [(status, error.code if error else "") for status, error in endings] == [
        ("expired", "deadline_exceeded"),
        ("expired", "deadline_exceeded"),
        ("shed", "quota_exceeded"),
        ("failed", "model_unavailable"),
    ]


def test_a_missing_work_topic_is_noticed_after_an_abort() -> None:
    ingress = machine(route())
    first = take_up(ingress, record(body(request_id="a")))
    ingress.decide([BatchAborted(first.batch)])
    again = take_up(ingress, record(body(request_id="a")))
    assert again.work == []
    error = again.results[0].error
    assert error is not None
    assert error.code == "model_unavailable"


def test_inputs_without_a_text_are_the_fault_of_the_request_not_of_the_engine() -> None:
    ingress = machine(
        route("text", tokenizer="t.json", input_schema={"type": "object"}), encoders=Encoders({"t.json": Words()})
    )
    nothing = take_up(ingress, record(body(model="text", inputs={})))
    error = nothing.results[0].error
    assert error is not None
    assert (nothing.results[0].status, error.code, error.field) == ("rejected", "missing_field", "inputs")
    assert take_up(ingress, record(body(model="text", inputs={"prompt": "ab"}), offset=1)).work[0].token_ids
