"""What becomes of good requests."""

from __future__ import annotations

import json

import pytest
from msgspec import Raw
from msgspec.structs import replace

from processors.ingress.events import (
    BatchAborted,
    BatchTooLarge,
    RoutesChanged,
    ShareChanged,
    Subscribe,
    Unsubscribe,
    WindowRead,
)
from processors.ingress.machine import IngressMachine
from schemas import codec
from sie_stream.control import RouteRow, VariantRow
from sie_stream.records import REQUEST_ID_HEADER, InferenceRequest
from sie_stream.routing import bucket_of
from tests.unit.processors.kit import NAMES, NOW_MS, body, machine, record, route, take_up

GENERATIVE_SCHEMA = {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]}


def test_a_request_becomes_one_work_item_with_everything_on_it() -> None:
    ingress = machine(route(deadline_ms=5_000, output_topic="scores"), topics=["scores", "replies"])
    value = body(request_id="r1", session="s", tenant="t", priority="P0", stream=True, reply_topic="replies")
    headers = ((REQUEST_ID_HEADER, b"r1"), ("traceparent", b"00-abc-def-01"))
    written = take_up(ingress, record(value, offset=9, headers=headers), now_ms=NOW_MS + 3)
    (work,) = written.work
    assert (work.request_id, work.instance, work.version, work.variant) == ("r1", "mi-wine", "1.0.0", "stable")
    assert (work.source_topic, work.source_partition, work.source_offset) == (NAMES.requests, 0, 9)
    assert (work.requested_at_ms, work.received_at_ms, work.deadline_at_ms) == (NOW_MS, NOW_MS + 3, NOW_MS + 5_000)
    assert (work.priority, work.session, work.tenant, work.stream) == (0, "s", "t", True)
    assert (work.reply_topic, work.output_topic, work.traceparent) == ("replies", "scores", "00-abc-def-01")
    assert (work.route_epoch, work.schema_id, work.key, json.loads(work.inputs)) == (7, 0, b"k", {"x": 1})
    assert written.work_writes[0].partition == 0


def test_avro_and_json_requests_mean_the_same() -> None:
    ingress = machine(route())
    request = InferenceRequest(model="wine", inputs=Raw(b'{"x": 2}'), request_id="a", session="s")
    framed = codec.encode_request(request)
    as_avro = take_up(ingress, record(framed)).work[0]
    as_json = take_up(ingress, record(body(inputs={"x": 2}, request_id="b", session="s"))).work[0]
    assert as_avro.schema_id == int.from_bytes(framed[1:5], "big") != 0
    assert replace(as_avro, request_id="b", schema_id=0, inputs=as_json.inputs) == as_json


def test_partition_is_lane_times_width_plus_bucket() -> None:
    ingress = machine(route(width=4))
    for priority, lane in (("P0", 0), ("P1", 1), ("P2", 2), (None, 1)):
        for session in ("alice", "bob", "carol"):
            written = take_up(ingress, record(body(priority=priority, session=session)))
            assert written.work_writes[0].partition == lane * 4 + bucket_of(session.encode(), 4)


def test_a_version_can_be_pinned() -> None:
    ingress = machine(route(variants=(VariantRow("stable", "1", 10_000), VariantRow("canary", "2", 0))))
    assert [take_up(ingress, record(body(model=name))).work[0].version for name in ("wine", "wine@1", "wine@2")] == [
        "1",
        "1",
        "2",
    ]


def test_a_request_can_name_the_instance() -> None:
    ingress = machine(route())
    assert len(take_up(ingress, record(b'{"instance":"mi-wine","inputs":{"x":1}}')).work) == 1


def test_repeats_are_dropped_and_their_offset_moves() -> None:
    ingress = machine(route())
    take_up(ingress, record(body(request_id="a")))
    repeat = take_up(ingress, record(body(request_id="a"), offset=1), record(body(request_id="a"), offset=2))
    assert (repeat.work, repeat.results) == ([], [])
    assert [one.offset for _, positions in repeat.batch.offsets for one in positions.values()] == [3]
    assert ingress.counts.duplicates == 2


def test_requests_without_id_are_never_repeats() -> None:
    ingress = machine(route())
    written = take_up(ingress, record(body(), offset=0), record(body(), offset=1))
    assert [work.request_id for work in written.work] == ["src:sie.requests:0:0", "src:sie.requests:0:1"]


def test_an_aborted_batch_is_forgotten_and_a_committed_one_is_not() -> None:
    ingress = machine(route(), topics=["sie.work.wine"])
    committed = take_up(ingress, record(body(request_id="kept")))
    aborted = take_up(ingress, record(body(request_id="kept"), offset=1), record(body(request_id="lost"), offset=2))
    ingress.decide([BatchAborted(aborted.batch)])
    again = take_up(ingress, record(body(request_id="kept"), offset=1), record(body(request_id="lost"), offset=2))
    assert len(committed.work) == 1
    assert [work.request_id for work in again.work] == ["lost"]


def test_ids_read_back_are_repeats() -> None:
    ingress = machine(route())
    ingress.decide([WindowRead(NAMES.ingress_group, NAMES.requests, (("a", NOW_MS - 1_000),))])
    assert take_up(ingress, record(body(request_id="a"))).work == []


def test_a_record_the_broker_refuses_is_rejected_next_time() -> None:
    ingress = machine(route(input_schema={"properties": {"x": {}}}), topics=["sie.work.wine"])
    big = body(request_id="big", inputs={"x": "a" * 50_000})
    first = take_up(ingress, record(big))
    ingress.decide([BatchTooLarge(first.batch)])
    second = take_up(ingress, record(big), record(body(request_id="small"), offset=1))
    assert [work.request_id for work in second.work] == ["small"]
    error = second.results[0].error
    assert error is not None
    assert error.code == "payload_too_large"


def test_endings_are_copied_to_the_bound_and_the_reply_topic() -> None:
    ingress = machine(route(output_topic="scores", output_serializer="json"), topics=["scores", "replies"])
    written = take_up(ingress, record(body(inputs={}, request_id="r", reply_topic="replies")))
    assert [copy.topic for copy in written.copies] == ["scores", "replies"]
    for copy in written.copies:
        text = json.loads(copy.value or b"")
        assert (text["status"], text["error"]["code"], text["request_id"]) == ("rejected", "missing_field", "r")
        assert copy.headers == ((REQUEST_ID_HEADER, b"r"),)


def test_a_missing_bound_output_topic_costs_only_the_copy() -> None:
    ingress = machine(route(output_topic="scores"))
    written = take_up(ingress, record(body(inputs={})))
    assert (len(written.results), written.copies) == (1, [])


def test_results_may_not_be_sent_back_as_requests() -> None:
    ingress = machine(route(input_topic="orders"), topics=["orders"])
    error = take_up(ingress, record(body(reply_topic="orders"))).results[0].error
    assert error is not None
    assert (error.code, error.field) == ("bad_reply_topic", "reply_topic")


def test_a_result_without_a_usable_key_has_the_request_id() -> None:
    ingress = machine(route())
    values = [record(b"{", key=None), record(b"{", key=b"", offset=1), record(b"{", key=b"k" * 5_000, offset=2)]
    written = take_up(ingress, *values)
    keys = [write.key for write in written.batch.writes if write.topic == NAMES.results]
    assert keys == [f"src:sie.requests:0:{offset}".encode() for offset in range(3)]


@pytest.mark.parametrize("parameters", [None, {"temperature": 0.5}])
def test_generative_requests_get_a_seed_that_follows_from_their_id(parameters: dict[str, float] | None) -> None:
    generator = route("lm", service_type="text-generation", input_schema=GENERATIVE_SCHEMA)
    value = body(model="lm", request_id="r", inputs={"prompt": "hi"}, parameters=parameters)
    first, second = (take_up(machine(generator), record(value)).work[0] for _ in range(2))
    assert first.seed == second.seed
    assert first.seed in range(2**53)
    assert (first.parameters is None) == (parameters is None)


def test_a_seed_that_is_asked_for_is_taken() -> None:
    ingress = machine(route("lm", service_type="text-generation", input_schema=GENERATIVE_SCHEMA))
    value = body(model="lm", inputs={"prompt": "hi"}, parameters={"seed": 11, "max_tokens": 4})
    assert take_up(ingress, record(value)).work[0].seed == 11
    for wrong in (-1, 2**63, "7", 1.5):
        result = take_up(
            ingress, record(body(model="lm", inputs={"prompt": "hi"}, parameters={"seed": wrong}))
        ).results[0]
        assert result.error is not None
        assert result.error.field == "parameters.seed"


def test_quota_is_shared_between_processes() -> None:
    def admitted(share: float) -> int:
        ingress = machine(route(quota_per_s=100.0))
        ingress.decide([ShareChanged(share)])
        return len(take_up(ingress, *(record(body(), offset=offset) for offset in range(200))).work)

    assert (admitted(1.0), admitted(0.25)) == (100, 25)


# ------------------------------------------------------------------------------------------------ bound topics


def subscriptions(ingress: IngressMachine, *rows: RouteRow) -> list[object]:
    return list(ingress.decide([RoutesChanged(tuple((row.model, row) for row in rows))]))


def test_bound_topics_are_read_in_their_groups() -> None:
    ingress = machine()
    orders = route("a", input_topic="orders", input_group="mine", input_offset_reset="latest")
    assert subscriptions(ingress, orders, route("b", input_topic="others")) == [
        Subscribe(NAMES.ingress_group, (NAMES.requests, "others"), "earliest"),
        Subscribe("mine", ("orders",), "latest"),
    ]
    assert ingress.decide([RoutesChanged((("a", None), ("b", None)))]) == [
        Unsubscribe("mine"),
        Subscribe(NAMES.ingress_group, (NAMES.requests,), "earliest"),
    ]
    assert ingress.decide([RoutesChanged((("c", route("c")),))]) == []


def test_topics_on_other_clusters_and_our_own_are_left_alone() -> None:
    ingress = machine()
    there = route("a", input_topic="orders", input_bootstrap="elsewhere:9092")
    assert subscriptions(ingress, there, route("b", input_topic="sie.results")) == []
    assert "belongs to SIE-Stream" in ingress.routes.conflicts[0]


def test_two_models_cannot_share_a_topic_in_one_group() -> None:
    ingress = machine(route("a", input_topic="t"), route("b", input_topic="t"))
    assert "already reads 't' for model 'a'" in ingress.routes.conflicts[0]
    assert ingress.routes.bound(NAMES.ingress_group, "t") is not None


@pytest.mark.parametrize(
    ("deserializer", "value", "inputs"),
    [
        ("json", b'{"x": 3}', {"x": 3}),
        ("string", b"hello", {"name": "hello"}),
        ("request-json", b'{"inputs": {"x": 4}}', {"x": 4}),
        ("request-avro", codec.encode_request(InferenceRequest(inputs=Raw(b'{"x": 5}'))), {"x": 5}),
    ],
)
def test_bound_topics_are_read_as_declared(deserializer: str, value: bytes, inputs: dict[str, object]) -> None:
    schema = {"properties": {"x": {"type": "number"}, "name": {"type": "string"}}}
    text = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    row = route(
        input_topic="orders", input_deserializer=deserializer, input_schema=text if deserializer == "string" else schema
    )
    written = take_up(machine(row), record(value, topic="orders", offset=5))
    (work,) = written.work
    assert json.loads(work.inputs) == inputs
    assert work.request_id == "src:orders:0:5:mi-wine"


def test_two_models_may_read_one_topic_in_their_own_groups() -> None:
    rows = [route(name, input_topic="orders", input_group=name, input_deserializer="json") for name in ("a", "b")]
    ingress = machine(*rows)
    header = ((REQUEST_ID_HEADER, b"same"),)
    for group in ("a", "b"):
        written = take_up(ingress, record(b'{"x":1}', topic="orders", headers=header), group=group)
        assert [(work.model, work.request_id) for work in written.work] == [(group, "same")]
        assert take_up(ingress, record(b'{"x":1}', topic="orders", offset=1, headers=header), group=group).work == []


def test_records_of_a_topic_that_is_bound_no_more_are_rejected() -> None:
    ingress = machine(route(input_topic="orders"))
    ingress.decide([RoutesChanged((("wine", None),))])
    error = take_up(ingress, record(b'{"x":1}', topic="orders")).results[0].error
    assert error is not None
    assert error.code == "not_bound"


def test_a_new_route_epoch_is_used_at_once() -> None:
    ingress = machine(route())
    take_up(ingress, record(body()))
    newer = route(route_epoch=8, variants=(VariantRow("stable", "2", 10_000),))
    ingress.decide([RoutesChanged((("wine", newer),))])
    work = take_up(ingress, record(body(), offset=1)).work[0]
    assert (work.route_epoch, work.version) == (8, "2")
