"""Which payloads a bundle holds, and how: over tables in the log in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest
from msgspec import Raw

from schemas.codec import encode_row
from sie_stream.cli.audit_contents import NO_SCHEMA, REFUSED, Payloads
from sie_stream.cli.audit_tables import REQUESTS, RESULTS, TableFile, result_row
from sie_stream.cli.trace_lookup import Routes
from sie_stream.control import ModelRow, RouteRow
from sie_stream.ids import TopicNames
from sie_stream.ports import TopicSpec
from sie_stream.privacy.datakeys import KeyTable
from sie_stream.records import InferenceRequest, LogRecord, LogWrite, Provenance, Result, Timings, Usage
from sie_stream.sim.log import SimLog

NAMES = TopicNames()
PERSON = {"type": "object", "properties": {"name": {"type": "string", "pii": True}, "age": {"type": "integer"}}}
PLAIN = {"type": "object", "properties": {"x": {"type": "number"}}}


def result(model: str, outputs: bytes | None) -> Result:
    origin = Provenance("sie.requests", 0, 1)
    return Result(*("r", "ok", "mi", model, "1", "s", outputs, None, Usage(), Timings(total=3.0), origin, 5))


@pytest.fixture
def payloads() -> Payloads:
    log = SimLog(session_timeout_ms=10_000)
    log.admin().ensure([TopicSpec(NAMES.routes, 1, {}), TopicSpec(NAMES.models, 1, {})])
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
    reader = log.reader("g")
    return Payloads(reader, Routes(reader, NAMES), NAMES, b"key", KeyTable())


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


def test_what_nobody_can_judge_is_left_out_and_counted(payloads: Payloads) -> None:
    assert payloads.inputs("people", b'{"nmae":"Ada"}', refused=True) is None
    assert payloads.inputs("gone", b'{"name":"Ada"}', refused=False) is None
    assert payloads.outputs(result("gone", b'{"name":"Ada"}')) is None
    assert payloads.left_out == {REFUSED: 1, NO_SCHEMA: 2}


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
