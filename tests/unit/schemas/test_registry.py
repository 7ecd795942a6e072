"""The registry topic, and requests written with schemas of the users' own."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from schemas import codec
from schemas.catalog import CURRENT, USER_ID_FIRST, schema_text
from schemas.registry_follower import SchemaTableFollower
from schemas.registry_table import Registration, RegistryTable, registration_write, registry_key
from schemas.wire import CodecError, frame
from schemas.writer_schema import parse_writer_schema
from sie_stream.edge.registry import register, register_released, registry_table
from sie_stream.errors import ConfigError, FatalLogError, Fenced
from sie_stream.ids import TopicNames
from sie_stream.ports import TopicSpec, TransactionalWriter
from sie_stream.records import InferenceRequest, LogWrite
from sie_stream.sim.log import SimLog
from tests.examples import examples

NAMES = TopicNames()
SUBJECT = "orders-value"


def schema(*fields: Mapping[str, object], name: str = "com.acme.Order") -> str:
    return json.dumps({"type": "record", "name": name, "fields": fields})


MODEL = {"name": "model", "type": "string"}
INPUTS = {
    "name": "inputs",
    "type": {
        "type": "record",
        "name": "Features",
        "fields": [{"name": "age", "type": "int"}, {"name": "rates", "type": {"type": "array", "items": "double"}}],
    },
}
NESTED = schema(MODEL, INPUTS, {"name": "colour", "type": "string"})


def written(text: str, datum: Any, schema_id: int = USER_ID_FIRST) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(text)), datum)
    return frame(schema_id) + out.getvalue()


def table_with(*texts: str) -> RegistryTable:
    table = RegistryTable()
    for text in texts:
        registration = table.assign(SUBJECT, text)
        assert put(table, registration) == ""
    return table


def put(table: RegistryTable, registration: Registration) -> str:
    write = registration_write("sie.schemas", registration)
    return table.apply(write.key, write.value)


def grow(inner: st.SearchStrategy) -> st.SearchStrategy:
    keys = st.sampled_from(["type", "name", "fields", "items", "values", "symbols", "size", "default"])
    return st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4))


@pytest.fixture
def log() -> SimLog:
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.schemas, 1, {})])
    return log


# ---------------------------------------------------------------- requests with schemas of one's own


def test_inputs_may_be_a_record() -> None:
    value = written(NESTED, {"model": "risk", "inputs": {"age": 3, "rates": [0.5]}, "colour": "red"})
    request, schema_id = codec.decode_request(value, table_with(NESTED))
    assert request == InferenceRequest(model="risk", inputs=Raw(b'{"age":3,"rates":[0.5]}'))
    assert schema_id == USER_ID_FIRST
    fields, _ = codec.decode_fields(value, table_with(NESTED))
    assert json.loads(bytes(fields)) == {"model": "risk", "inputs": {"age": 3, "rates": [0.5]}, "colour": "red"}


def test_fields_of_a_schema_like_ours_are_all_taken() -> None:
    text = schema(
        *(MODEL, {"name": "inputs", "type": "string"}, {"name": "priority", "type": "string"}),
        *({"name": "deadline_ms", "type": "int"}, {"name": "parameters", "type": {"type": "map", "values": "int"}}),
    )
    datum = {"model": "m", "inputs": '{"x": 1}', "priority": "P0", "deadline_ms": 9, "parameters": {"seed": 4}}
    request, _ = codec.decode_request(written(text, datum), table_with(text))
    assert request.priority == "P0"
    assert (request.deadline_ms, request.inputs, request.parameters) == (9, Raw(b'{"x": 1}'), Raw(b'{"seed":4}'))
    with pytest.raises(CodecError, match="P9"):
        codec.decode_request(written(text, {**datum, "priority": "P9"}), table_with(text))


def test_logical_types_and_bytes_have_a_json_form() -> None:
    text = schema(
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "raw", "type": "bytes"},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
    )
    datum = {"at": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\xff\x00", "id": "b7bbd4dc-90a0-4d5b-8b8e-0d3b0d7c2b7d"}
    fields, _ = codec.decode_fields(written(text, datum), table_with(text))
    assert json.loads(bytes(fields)) == {**datum, "at": "2026-01-02T00:00:00+00:00", "raw": "/wA="}


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        ({"model": "m", "inputs": {"age": 1, "rates": [float("nan")]}, "colour": ""}, "not JSON"),
        ({"model": "m", "inputs": {"age": 1, "rates": [float("inf")]}, "colour": ""}, "not JSON"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(datum: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        codec.decode_request(written(NESTED, datum), table_with(NESTED))


def test_bad_records_of_a_schema_of_ones_own() -> None:
    value = written(NESTED, {"model": "m", "inputs": {"age": 1, "rates": []}, "colour": "x"})
    table = table_with(NESTED)
    for bad in (value[:-1], value + b"\x00", frame(USER_ID_FIRST), frame(USER_ID_FIRST) + b"\xff" * 40):
        with pytest.raises(CodecError) as caught:
            codec.decode_request(bad, table)
        assert caught.value.code == "bad_avro"
    with pytest.raises(CodecError) as caught:
        codec.decode_request(value)
    assert caught.value.code == "unknown_schema_id"
    without = schema(MODEL)
    with pytest.raises(CodecError, match="no field `inputs`"):
        codec.decode_request(written(without, {"model": "m"}), table_with(without))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not an Avro schema"),
        ('"string"', "must be a record"),
        ('{"type": "record"}', "not an Avro schema"),
        (schema({"name": "next", "type": ["null", "com.acme.Order"]}), "contains itself"),
        (schema({"name": "a", "type": {"type": "array", "items": "null"}}), "take no bytes"),
        (
            schema({"name": "a", "type": {"type": "array", "items": {"type": "record", "name": "E", "fields": []}}}),
            "take no bytes",
        ),
        (
            schema({"name": "a", "type": {"type": "map", "values": {"type": "array", "items": "com.acme.Order"}}}),
            "contains itself",
        ),
    ],
)
def test_schemas_that_are_not_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_writer_schema(1, text)


@given(
    st.recursive(st.sampled_from(["record", "int", "fields", "type", "name", "array", 1, None]), grow, max_leaves=20)
)
@examples(150)
def test_any_json_is_a_schema_or_refused(plain: object) -> None:
    text = json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": plain}]})
    with contextlib.suppress(ConfigError):
        parse_writer_schema(1, text)


def test_a_named_type_may_be_used_twice() -> None:
    text = schema(INPUTS, {"name": "again", "type": "com.acme.Features"})
    assert parse_writer_schema(1, text).name == "com.acme.Order"


# ---------------------------------------------------------------- the table


def test_equal_schemas_have_one_id_and_versions_count_up() -> None:
    table = table_with(NESTED, schema(MODEL, INPUTS))
    assert [(found.version, found.id) for found in table.versions(SUBJECT)] == [(1, 1000), (2, 1001)]
    assert table.assign(SUBJECT, json.dumps(json.loads(NESTED), indent=4)) == table.versions(SUBJECT)[0]
    assert table.assign("other-value", NESTED) == Registration("other-value", 1, 1000, NESTED)
    ours = json.dumps(json.loads(schema_text("InferenceRequest")))
    assert table.assign("mine-value", ours).id == CURRENT["InferenceRequest"].id
    assert table.subjects() == (SUBJECT,)
    assert table.text(1001) == schema(MODEL, INPUTS)


@pytest.mark.parametrize(
    ("registration", "message"),
    [
        (Registration("a-value", 1, 1000, schema(MODEL)), "already stands for another schema"),
        (Registration("a-value", 1, 1, schema(MODEL)), "already stands for another schema"),
        (Registration("a-value", 1, 999, schema(MODEL)), "reserved"),
        (Registration("a-value", 1, 1001, "{"), "not an Avro schema"),
    ],
)
def test_records_that_do_not_count(registration: Registration, message: str) -> None:
    table = table_with(NESTED)
    assert message in put(table, registration)
    assert table.subjects() == (SUBJECT,)
    assert table.text(1000) == NESTED


def test_garbage_on_the_topic_does_not_count() -> None:
    table = table_with(NESTED)
    good = registration_write("t", Registration("a-value", 1, 1001, schema(MODEL)))
    for key, value in ((b"k", b"{"), (b"k", b"[" * 100_000), (None, b"{}"), (b"a-value/2", good.value), (b"?", None)):
        assert table.apply(key, value) != ""
    assert table.subjects() == (SUBJECT,)


def test_a_deleted_version_leaves_its_subject_but_stays_readable() -> None:
    table = table_with(NESTED)
    assert table.apply(registry_key(SUBJECT, 1), None) == ""
    assert table.versions(SUBJECT) == ()
    assert table.find(1000) is not None


@pytest.mark.parametrize("subject", ["", "a/b", "a\n", "x" * 301])
def test_subjects(subject: str) -> None:
    with pytest.raises(ConfigError, match="subject"):
        RegistryTable().assign(subject, NESTED)


# ---------------------------------------------------------------- the topic


def test_released_schemas_are_registered_once(log: SimLog) -> None:
    assert register_released(log.reader("r1"), log.plain_writer(), NAMES) == 16
    assert register_released(log.reader("r2"), log.plain_writer(), NAMES) == 0
    table = registry_table(log.reader("r3"), NAMES)
    (results,) = table.versions("sie.results-value")
    assert (results.id, results.schema) == (CURRENT["Result"].id, schema_text("Result"))


def test_without_the_topic() -> None:
    with pytest.raises(FatalLogError, match="topics apply"):
        register_released(SimLog().reader("r"), SimLog().plain_writer(), NAMES)


def test_a_follower_sees_what_is_registered_later(log: SimLog) -> None:
    follower = SchemaTableFollower(log.reader("follower"), NAMES.schemas, log.clock)
    follower.read_table()
    assert follower.find(USER_ID_FIRST) is None
    made = register(log.reader("r"), log.transactional_writer(NAMES.schemas_transactional_id), NAMES, SUBJECT, NESTED)
    assert made == Registration(SUBJECT, 1, USER_ID_FIRST, NESTED)
    assert follower.find(USER_ID_FIRST) is None, "looked just now"
    log.clock.advance(100)
    value = written(NESTED, {"model": "m", "inputs": {"age": 1, "rates": []}, "colour": ""})
    assert codec.decode_request(value, follower)[0].model == "m"
    again = register(log.reader("r2"), log.transactional_writer(NAMES.schemas_transactional_id), NAMES, SUBJECT, NESTED)
    assert again == made


def test_a_follower_without_the_topic_knows_the_released_schemas() -> None:
    log = SimLog()
    follower = SchemaTableFollower(log.reader("follower"), NAMES.schemas, log.clock)
    assert follower.find(USER_ID_FIRST) is None
    assert follower.find(CURRENT["Result"].id) is not None


def test_a_follower_reports_what_does_not_count(log: SimLog) -> None:
    bad = Registration("a-value", 1, 5, schema(MODEL))
    writer = log.plain_writer()
    writer.write([registration_write(NAMES.schemas, bad)])
    writer.flush(1_000)
    follower = SchemaTableFollower(log.reader("follower"), NAMES.schemas, log.clock)
    follower.read_table()
    assert [problem.partition(":")[0] for problem in follower.problems] == ["sie.schemas offset 0"]


def write_now(writer: TransactionalWriter, write: LogWrite) -> None:
    writer.begin()
    writer.write([write])
    writer.commit()


def test_two_that_register_at_once_never_give_one_id_twice(log: SimLog) -> None:
    first = log.transactional_writer(NAMES.schemas_transactional_id)
    first.init()
    register(log.reader("r"), log.transactional_writer(NAMES.schemas_transactional_id), NAMES, "b-value", NESTED)
    with pytest.raises(Fenced):
        write_now(first, registration_write(NAMES.schemas, Registration(SUBJECT, 1, USER_ID_FIRST, schema(MODEL))))
    assert registry_table(log.reader("r2"), NAMES).text(USER_ID_FIRST) == NESTED
