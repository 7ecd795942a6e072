"""Stage 2 for pooled models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from processors.egress.host import EgressHost
from processors.egress.machine import EgressMachine, OutputsPolled, RoutesChanged
from processors.tokenise import TextEncoder
from schemas import codec
from sie_stream.control import RouteRow
from sie_stream.errors import ConfigError, InvalidRequest
from sie_stream.postprocess import Stage2, build_outputs, finish_result, stage2_of
from sie_stream.provenance import NO_USAGE
from sie_stream.records import (
    LogWrite,
    Provenance,
    RawOutput,
    Result,
    ResultError,
    Timings,
)
from sie_stream.rollout_records import PINNED
from sie_stream.settings import Settings
from tests.unit.processors.kit import NAMES, NOW_MS, World, record, route

OUTPUT_SCHEMA = {"properties": {"label": {"type": "string"}}, "required": ["label"]}


def raw(request_id: str = "r", model: str = "wine", **changes: Any) -> RawOutput:
    partial = Result(
        request_id=request_id,
        status="ok",
        instance=f"mi-{model}",
        model=model,
        version="1",
        variant="stable",
        outputs=None,
        error=None,
        usage=NO_USAGE,
        timings_ms=Timings(queue=1.0, inference=2.0, total=10.0),
        provenance=Provenance("sie.requests", 0, 4, schema_id=0),
        finished_at=NOW_MS - 5,
    )
    return replace(RawOutput(partial, b"k", outputs=b'{"label":"a"}'), **changes)


class Words:
    """Token ids are words."""

    digest = "words"

    @property
    def separators(self) -> dict[str, int]:
        return {}

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    encode_plain = encode

    def render_chat(self, messages: Sequence[object]) -> str:
        return str(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join("w" * one for one in token_ids)


def encoder_of(path: str, digest: str) -> TextEncoder:
    if path == "missing":
        raise ConfigError("no such tokenizer")
    return Words()


def egress(*rows: RouteRow, topics: Sequence[str] = (), **settings: Any) -> EgressMachine:
    made = EgressMachine(Settings(**settings), encoder_of, lambda topic: topic in topics)
    made.decide([RoutesChanged(tuple((row.model, row) for row in rows))])
    return made


def finish(machine: EgressMachine, *outputs: RawOutput) -> list[LogWrite]:
    records = [
        record(codec.encode_raw_output(output), offset=offset, topic=NAMES.outputs)
        for offset, output in enumerate(outputs)
    ]
    (command,) = machine.decide([OutputsPolled(records, NOW_MS)])
    assert [one.offset for one in command.offsets.values()] == [len(outputs)]
    return command.writes


def only_result(writes: list[LogWrite]) -> Result:
    (result,) = [codec.decode_result(write.value) for write in writes if write.topic == NAMES.results]
    return result


def test_outputs_become_a_terminal_record() -> None:
    writes = finish(egress(route()), raw())
    result = only_result(writes)
    assert (result.status, result.outputs, result.error) == ("ok", b'{"label":"a"}', None)
    assert (result.timings_ms.postprocess, result.timings_ms.total, result.finished_at) == (5.0, 15.0, NOW_MS)
    assert (result.timings_ms.queue, result.provenance.source_offset) == (1.0, 4)
    assert writes[0].key == b"k"


def test_the_mark_of_pinned_requests_goes_on() -> None:
    for variant, topic in (("canary", NAMES.results), ("~canary", NAMES.shadow)):
        output = raw()
        output = replace(output, result=replace(output.result, variant=variant))
        pinned = record(codec.encode_raw_output(output), headers=(*PINNED, ("other", b"1")), topic=NAMES.outputs)
        [command] = egress(route()).decide([OutputsPolled([pinned], NOW_MS)])
        assert [(write.topic, write.headers) for write in command.writes] == [(topic, PINNED)]


def test_tokens_become_text() -> None:
    row = route("lm", service_type="text-generation", tokenizer="t.json")
    output = raw(model="lm", outputs=None, token_ids=(2, 3), finish_reason="stop")
    assert json.loads(only_result(finish(egress(row), output)).outputs or b"") == {
        "text": "ww www",
        "finish_reason": "stop",
    }


def test_copies_go_to_bound_and_reply_topics() -> None:
    machine = egress(route(output_serializer="json"), topics=["scores", "replies"])
    writes = finish(machine, raw(output_topic="scores", reply_topic="replies"))
    assert [write.topic for write in writes] == [NAMES.results, "scores", "replies"]
    assert json.loads(writes[1].value or b"")["outputs"] == {"label": "a"}
    gone = finish(egress(route()), raw(output_topic="scores"))
    assert [write.topic for write in gone] == [NAMES.results]


BAD = [
    ("output_schema_mismatch", "outputs.label", {"outputs": b'{"label":5}'}, {"output_schema": OUTPUT_SCHEMA}, {}),
    ("output_schema_mismatch", "outputs", {"outputs": b"[1]"}, {"output_schema": OUTPUT_SCHEMA}, {}),
    (
        "output_too_large",
        "outputs",
        {"outputs": b'{"label":"' + b"a" * 30_000 + b'"}'},
        {},
        {"record_bytes_max": 20_000},
    ),
    ("output_missing", "", {"outputs": None}, {}, {}),
    ("output_missing", "", {"outputs": None, "token_ids": (1,)}, {}, {}),
    ("model_unavailable", "", {}, {"tokenizer": "missing"}, {}),
]


@pytest.mark.parametrize(("code", "field", "output", "row", "settings"), BAD)
def test_what_cannot_be_finished_ends_as_failed(
    code: str, field: str, output: dict[str, Any], row: dict[str, Any], settings: dict[str, Any]
) -> None:
    machine = egress(with_schema(**row), **settings)
    result = only_result(finish(machine, raw(**output)))
    assert result.error is not None
    assert (result.status, result.outputs, result.error.code, result.error.field) == ("failed", None, code, field)
    assert result.provenance.source_offset == 4
    good = only_result(finish(egress(with_schema()), raw()))
    assert good.status == "ok"


def with_schema(**changes: Any) -> RouteRow:
    schema = changes.pop("output_schema", None)
    row = route(**changes)
    return row if schema is None else replace(row, output_schema=route(input_schema=schema).input_schema)


def test_an_unknown_model_is_failed_and_a_deleted_one_is_finished() -> None:
    machine = egress(route())
    unknown = only_result(finish(machine, raw(model="other")))
    assert unknown.error is not None
    assert unknown.error.code == "model_unavailable"
    machine.decide([RoutesChanged((("wine", None),))])
    assert only_result(finish(machine, raw())).status == "ok"


def test_a_failure_of_the_engine_stays_one() -> None:
    failed = raw(outputs=None)
    partial = replace(failed.result, status="failed", error=ResultError("engine_error", "boom"))
    result = only_result(finish(egress(route()), replace(failed, result=partial)))
    assert (result.status, result.error) == ("failed", ResultError("engine_error", "boom"))


def test_bytes_that_are_no_output_are_dead_letters() -> None:
    machine = egress(route())
    (command,) = machine.decide([OutputsPolled([record(b"{}", topic=NAMES.outputs)], NOW_MS)])
    assert [write.topic for write in command.writes] == [NAMES.deadletter]
    assert codec.decode_deadletter(command.writes[0].value).component == "egress"


def test_the_host_settles_outputs_once_across_a_restart() -> None:
    world = World(route())
    writer = world.log.plain_writer()

    def host() -> EgressHost:
        made = EgressHost(world.settings, world.ports("egress"), encoder_of, world)
        made.start()
        return made

    first = host()
    writer.write([LogWrite(NAMES.outputs, codec.encode_raw_output(raw("a")), b"a")])
    world.run(first)
    second = host()
    writer.write([LogWrite(NAMES.outputs, codec.encode_raw_output(raw("b")), b"b")])
    world.run(second)
    assert [one.request_id for one in world.results()] == ["a", "b"]


def test_the_size_limit_leaves_room_for_the_rest_of_a_result() -> None:
    stage2 = stage2_of(20_000)
    outputs = b'"' + b"a" * (stage2.outputs_bytes_max - 2) + b'"'
    built = build_outputs(stage2, outputs, None, "")
    assert built == outputs
    result = finish_result(raw("r" * 256).result, built, 1.0, NOW_MS)
    assert len(codec.encode_result(result)) <= 20_000


def test_a_check_that_refuses_says_where() -> None:
    def check(_outputs: bytes) -> None:
        raise InvalidRequest("wrong_type", "score is a string", "score")

    built = build_outputs(Stage2(None, check, 1_000), b"{}", None, "")
    assert isinstance(built, ResultError)
    assert (built.code, built.field) == ("output_schema_mismatch", "outputs.score")
    assert "score is a string" in built.message
