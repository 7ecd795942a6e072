"""Which payloads a bundle holds, and how: over tables in the log in memory."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest
from msgspec import Raw, structs

from schemas.codec import encode_cluster, encode_request, encode_row
from sie_stream.cli.audit_contents import GONE, NO_SCHEMA, REFERRED, REFUSED, UNFIT, WORDS, Payloads, request_row
from sie_stream.cli.audit_tables import REQUESTS, RESULTS, TableFile, result_row
from sie_stream.cli.declared_outputs import declared_outputs
from sie_stream.cli.trace_lookup import Routes
from sie_stream.commands import ApplyModel
from sie_stream.control import ModelRow, RouteRow
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.privacy.datakeys import KeyTable
from sie_stream.provenance import dead_letter
from sie_stream.records import (
    InferenceRequest,
    InputsRef,
    LogRecord,
    LogWrite,
    Provenance,
    Result,
    ResultError,
    Timings,
    Usage,
)
from sie_stream.sim.log import SimLog

NAMES = TopicNames()
PERSON = {"type": "object", "properties": {"name": {"type": "string", "pii": True}, "age": {"type": "integer"}}}
SPEC = {"model_id": "people", "source": "m.skops", "min_gpu_memory_mb": 64}
PLAIN = {"type": "object", "properties": {"x": {"type": "number"}}}


def result(model: str, outputs: bytes | None) -> Result:
    origin = Provenance("sie.requests", 0, 1)
    return Result(*("r", "ok", "mi", model, "1", "s", outputs, None, Usage(), Timings(total=3.0), origin, 5))


@pytest.fixture
def log() -> SimLog:
    log = SimLog(session_timeout_ms=10_000)
    log.admin().ensure([TopicSpec(topic, 1, {}) for topic in (NAMES.routes, NAMES.models, NAMES.cluster)])
    writer = log.plain_writer(1_000_000)
    for model, schema, bound in (("people", PERSON, "orders"), ("plain", PLAIN, "")):
        spec = Raw(json.dumps({"input_schema": schema, "output_schema": schema}).encode())
        row = ModelRow(model, "1", 1, spec, "accepted", 1)
        schema_text = Raw(json.dumps(schema).encode())
        route = RouteRow(
            *(f"mi-{model}", model, 1, NAMES.work(model), 3, 1, (), "classification", 1),
            *(schema_text, "", "", 0),
            input_topic=bound,
        )
        writer.write([LogWrite(NAMES.models, encode_row(row), model.encode())])
        writer.write([LogWrite(NAMES.routes, encode_row(route), model.encode())])
    writer.flush(1_000)
    return log


@pytest.fixture
def payloads(log: SimLog) -> Payloads:
    return payloads_of(log)


def payloads_of(log: SimLog) -> Payloads:
    reader = log.reader("g")
    declared = declared_outputs(reader, NAMES, lambda: log.reader("history"))
    return Payloads(reader, Routes(reader, NAMES), NAMES, b"key", KeyTable(), declared)


def test_marked_fields_of_inputs_and_outputs_are_hashed(payloads: Payloads) -> None:
    assert payloads.pii_fields == {"people": ("inputs.name", "outputs.name")}
    text = payloads.inputs("people", b'{"name":"Ada","age":36}', refused=False)
    assert text is not None
    assert json.loads(text)["age"] == 36
    assert b"Ada" not in text
    written = payloads.outputs(result("people", b'{"name":"Ada"}'))
    assert written is not None
    assert json.loads(written)["name"] == json.loads(text)["name"]
    assert payloads.inputs("plain", b'{"x":1}', refused=True) == b'{"x":1}'
    assert payloads.outputs(result("plain", None)) is None
    assert payloads.left_out == {}


def test_a_marked_value_that_looks_protected_is_hashed_like_any_other(payloads: Payloads) -> None:
    """Only `pii: hash` and `encrypt` leave protected values on the topics, and this is marked `true`."""
    looks = "hmac-sha256:ada-lovelace:" + "0" * 64
    written = payloads.outputs(result("people", json.dumps({"name": looks}).encode()))
    text = payloads.inputs("people", json.dumps({"name": looks}).encode(), refused=False)
    assert b"ada-lovelace" not in (written or b"") + (text or b"")


def test_which_weights_adapters_lay_over_is_told_by_model_and_version(payloads: Payloads) -> None:
    told = result("plain", None)
    for digest in ("sha256:a over sha256:b", "sha256:a over sha256:c", "sha256:a"):
        payloads.outputs(structs.replace(told, provenance=structs.replace(told.provenance, weights_digest=digest)))
    assert payloads.bases == {("plain", told.version): {"sha256:b", "sha256:c"}}


def test_what_nobody_can_judge_is_left_out_and_counted(payloads: Payloads) -> None:
    assert payloads.inputs("people", b'{"nmae":"Ada"}', refused=True) is None
    assert payloads.inputs("gone", b'{"name":"Ada"}', refused=False) is None
    assert payloads.outputs(result("gone", b'{"name":"Ada"}')) is None
    assert payloads.left_out == {REFUSED: 1, NO_SCHEMA: 2}


def test_inputs_behind_a_reference_are_told_by_url_and_digest(log: SimLog, payloads: Payloads, tmp_path: Path) -> None:
    ref = InputsRef("s3://bucket/in/a.json", "0" * 64, 9_000_000)
    value = encode_request(InferenceRequest(model="people", request_id="r1", inputs_ref=ref))
    row = request_row(LogRecord("sie.requests", 0, 1, 1, b"k", value), Routes(log.reader("g"), NAMES), payloads)
    with TableFile(tmp_path / "requests.parquet", REQUESTS) as file:
        file.add(row)
    (told,) = pyarrow.parquet.read_table(tmp_path / "requests.parquet").to_pylist()
    assert (told["inputs"], told["inputs_url"], told["inputs_sha256"]) == (None, ref.url, ref.sha256)
    assert payloads.left_out == {REFERRED: 1}


@pytest.mark.parametrize(
    "inputs", [b'{"nmae":"Ada"}', b'{"name":"Bob","person":"Ada"}', b'["Ada"]', b'{"age":"Ada"}', b"Ada"]
)
def test_requests_that_nobody_refused_are_held_against_the_schema_too(payloads: Payloads, inputs: bytes) -> None:
    """A repeat, or a request that came too late, was never checked, and so may hold a name anywhere."""
    assert payloads.inputs("people", inputs, refused=False) is None
    assert payloads.left_out == {UNFIT: 1}


def test_a_result_is_hidden_by_the_marks_of_its_own_version_too(log: SimLog) -> None:
    renamed = {"properties": {"first_name": {"type": "string", "pii": True}}}
    older = encode_cluster(
        ApplyModel(Raw(json.dumps(SPEC | {"version": "0", "output_schema": renamed}).encode()), "ada")
    )
    log.plain_writer().write([LogWrite(NAMES.cluster, older, partition=0)])
    payloads = payloads_of(log)
    was = msgspec.structs.replace(result("people", b'{"first_name":"Ada","age":3}'), version="0")
    written = payloads.outputs(was)
    assert written is not None
    assert json.loads(written)["age"] == 3
    assert b"Ada" not in written
    assert payloads.outputs(msgspec.structs.replace(was, version="never")) is None
    assert payloads.left_out == {GONE: 1}


def test_an_engines_words_are_left_out_where_fields_are_marked(payloads: Payloads) -> None:
    def said(model: str, status: str = "failed") -> str:
        error = ResultError("boom", "cannot read Ada", "inputs")
        told = payloads.told(msgspec.structs.replace(result(model, None), status=status, error=error)).error
        assert told is not None
        assert (told.code, told.field) == ("boom", "inputs")
        return told.message

    assert (said("plain"), said("people", "rejected")) == ("cannot read Ada", "cannot read Ada")
    assert "Ada" not in said("people") + said("gone")
    assert payloads.left_out == {WORDS: 2}
    record = LogRecord("sie.work.x", 0, 1, 1, None, b"x")
    for topic, told in (("sie.work.people", False), ("sie.work.plain", True), ("sie.work.gone", False)):
        letter = dead_letter(record, "r", ResultError("boom", "cannot read Ada"), 9, "worker", 1)
        letter = msgspec.structs.replace(letter, source_topic=topic)
        assert ("Ada" in payloads.told_letter(letter).message) is told


def test_a_model_whose_schema_cannot_be_read_is_as_one_without(log: SimLog) -> None:
    spec = Raw(b'{"input_schema":{"properties":{"name":{"type":"strng","pii":true}}}}')
    log.plain_writer().write(
        [LogWrite(NAMES.models, encode_row(ModelRow("people", "2", 2, spec, "accepted", 1)), b"people")]
    )
    payloads = payloads_of(log)
    assert payloads.inputs("people", b'{"name":"Ada"}', refused=False) is None
    assert payloads.personal("people")
    assert payloads.left_out == {NO_SCHEMA: 1}


def test_the_model_of_a_request_is_found_by_name_instance_and_topic(payloads: Payloads) -> None:
    assert payloads.model_of(InferenceRequest(model="people@1"), NAMES.requests) == "people"
    assert payloads.model_of(InferenceRequest(instance="mi-plain"), NAMES.requests) == "plain"
    assert payloads.model_of(None, "orders") == "people"
    assert payloads.model_of(InferenceRequest(model="gone@2"), NAMES.requests) == "gone"


def test_tables_keep_their_columns_and_come_back(tmp_path: Path) -> None:
    record = LogRecord("sie.results", 3, 7, 99, b"k", b"v")
    with TableFile(tmp_path / "r.parquet", RESULTS) as file:
        for _ in range(6_000):
            file.add(result_row(record, result("m", b'{"a":1}'), b'{"a":1}'))
    table = pyarrow.parquet.read_table(tmp_path / "r.parquet")
    assert (table.num_rows, file.rows) == (6_000, 6_000)
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["topic"], first["partition"], first["offset"], first["total_ms"]) == ("sie.results", 3, 7, 3.0)
    assert (first["source_topic"], first["outputs"], first["error_code"]) == ("sie.requests", '{"a":1}', None)
    with TableFile(tmp_path / "empty.parquet", REQUESTS):
        pass
    assert pyarrow.parquet.read_table(tmp_path / "empty.parquet").num_rows == 0


def test_looking_up_an_older_version_reads_no_result_away(log: SimLog) -> None:
    log.admin().ensure([TopicSpec(NAMES.results, 1, {})])
    log.plain_writer().write([LogWrite(NAMES.results, b"result", b"k") for _ in range(6)])
    reader = log.reader("g")
    declared = declared_outputs(reader, NAMES, lambda: log.reader("history"))
    payloads = Payloads(reader, Routes(reader, NAMES), NAMES, b"key", KeyTable(), declared)
    reader.assign({TopicPartition(NAMES.results, 0): 0})
    first = reader.poll(2, 0)
    payloads.outputs(structs.replace(result("people", b'{"name":"Ada"}'), version="0"))
    assert len(first) + len(reader.poll(100, 0)) == 6
