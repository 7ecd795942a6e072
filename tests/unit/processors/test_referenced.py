"""Requests that name their inputs: resolved, refused, or waited for while the others go on."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest

from processors.ingress.references import AHEAD_MAX, BATCH_BYTES_MAX
from schemas import codec
from sie_stream.control import VariantRow
from sie_stream.errors import InvalidRequest
from sie_stream.ids import TopicPartition
from sie_stream.records import InferenceRequest, InputsRef
from sie_stream.rollout_records import VariantRule
from tests.unit.processors.kit import NAMES, NOW_MS, Contents, World, body, machine, record, route, take_up

PLACE = "s3://bucket/in/"
INPUTS = b'{"x": 1, "name": "abc"}'


def ref(name: str = "a", content: bytes = INPUTS) -> dict[str, Any]:
    return {"url": PLACE + name, "sha256": sha256(content).hexdigest()}


def asked(name: str = "a", **changes: Any) -> bytes:
    return json.dumps({"model": "wine", "inputs_ref": ref(name), **changes}).encode()


def with_contents(**there: bytes | InvalidRequest) -> Contents:
    contents = Contents()
    contents.there = {PLACE + name: content for name, content in there.items()}
    return contents


def test_the_work_item_holds_what_the_reference_names() -> None:
    ingress = machine(route(), contents=with_contents(a=INPUTS), reference_prefixes=PLACE)
    (work,) = take_up(ingress, record(asked())).work
    assert work.inputs == INPUTS
    assert ingress.counts.referenced == 1


def test_avro_requests_name_inputs_too() -> None:
    value = codec.encode_request(InferenceRequest(model="wine", inputs_ref=InputsRef(**ref())))
    ingress = machine(route(), contents=with_contents(a=INPUTS), reference_prefixes=PLACE)
    (work,) = take_up(ingress, record(value)).work
    assert work.inputs == INPUTS


def test_the_schema_is_held_against_what_is_named() -> None:
    ingress = machine(route(), contents=with_contents(a=b'{"x": 11}'), reference_prefixes=PLACE)
    (result,) = take_up(ingress, record(asked())).results
    assert result.error is not None
    assert (result.status, result.error.code, result.error.field) == ("rejected", "out_of_range", "inputs.x")


def test_content_rules_see_what_is_named() -> None:
    variants = (VariantRow("stable", "1.0.0", 10_000), VariantRow("canary", "2.0.0", 0))
    rules = (VariantRule("field", "name", "abc", "canary"),)
    ingress = machine(route(variants=variants, rules=rules), contents=with_contents(a=INPUTS), reference_prefixes=PLACE)
    (work,) = take_up(ingress, record(asked())).work
    assert work.variant == "canary"


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (asked(inputs={"x": 1}), "ambiguous_inputs"),
        (asked(inputs_ref={**ref(), "url": "file:///etc/passwd"}), "reference_not_allowed"),
        (asked(inputs_ref={**ref(), "sha256": "x"}), "bad_reference"),
        (asked(inputs_ref={"url": PLACE}), "wrong_type"),
        (asked(inputs_ref={**ref(), "size": 9_000_000}), "reference_too_large"),
        (asked(inputs_ref=PLACE), "wrong_type"),
        (asked(model="nine"), "unknown_model"),
    ],
)
def test_what_is_wrong_without_reading(request_: bytes, code: str) -> None:
    contents = Contents()
    ingress = machine(route(), contents=contents, reference_prefixes=PLACE)
    found = take_up(ingress, record(request_))
    (result,) = found.results
    assert result.error is not None
    assert (result.status, result.error.code) == ("rejected", code)
    assert contents.asked == []


@pytest.mark.parametrize(
    ("code", "status"),
    [("reference_missing", "rejected"), ("reference_timeout", "failed"), ("reference_unavailable", "failed")],
)
def test_inputs_that_are_not_to_be_had_end_the_request_alone(code: str, status: str) -> None:
    contents = with_contents(gone=InvalidRequest(code, "because", "inputs_ref"), a=INPUTS)
    ingress = machine(route(), contents=contents, reference_prefixes=PLACE)
    found = take_up(ingress, record(asked("gone"), 0), record(asked("a"), 1), record(body(), 2))
    (result,) = found.results
    assert result.error is not None
    assert (result.status, result.error.code) == (status, code)
    assert len(found.work) == 2
    assert found.batch.held == ()


def test_a_reference_that_is_not_there_yet_holds_its_partition_only() -> None:
    contents = with_contents()
    ingress = machine(route(), contents=contents, reference_prefixes=PLACE)
    waiting = [record(body(request_id="before"), 5), record(asked("late", request_id="late"), 6)]
    behind = [record(body(request_id="behind"), 7), record(asked("next"), 8), record(b"{", 9)]
    other = [record(body(request_id="other"), 3)]
    other = [type(one)(one.topic, 1, *[getattr(one, name) for name in one.__struct_fields__[2:]]) for one in other]
    found = take_up(ingress, *waiting, *other, *behind)
    assert [work.request_id for work in found.work] == ["before", "other"]
    assert found.results == []
    ((_, offsets),) = found.batch.offsets
    places = {place.partition: position.offset for place, position in offsets.items()}
    assert places == {0: 6, 1: 4}
    assert found.batch.held == ((NAMES.ingress_group, {TopicPartition(NAMES.requests, 0): 6}),)
    assert contents.prepared == [PLACE + "next"]
    contents.there = {PLACE + "late": INPUTS, PLACE + "next": INPUTS}
    again = take_up(ingress, waiting[1], *behind)
    assert [work.request_id for work in again.work][:2] == ["late", "behind"]
    assert len(again.work) == 3
    assert ingress.counts.duplicates == 0, "what was held was never taken up"


def test_what_ends_without_its_inputs_is_not_prepared() -> None:
    contents = with_contents(done=INPUTS)
    ingress = machine(route(), contents=contents, reference_prefixes=PLACE)
    take_up(ingress, record(asked("done", request_id="done"), 0))
    found = take_up(
        ingress,
        record(asked("late"), 1),
        record(asked("repeat", request_id="done"), 2),
        record(asked("unknown", model="nine"), 3),
        record(asked("expired", deadline_ms=1), 4),
        record(asked("both", inputs={"x": 1}), 5),
        record(asked("next"), 6),
        now_ms=NOW_MS + 1,
    )
    assert found.batch.held
    assert contents.prepared == [PLACE + "next"]


def test_a_partition_held_at_its_first_record_commits_nothing() -> None:
    ingress = machine(route(), contents=Contents(), reference_prefixes=PLACE)
    found = take_up(ingress, record(asked(), 5), record(body(), 6))
    assert found.batch.offsets == ((NAMES.ingress_group, {}),)
    assert found.batch.writes == []


def test_a_repeat_is_dropped_without_reading() -> None:
    contents = with_contents(a=INPUTS)
    ingress = machine(route(), contents=contents, reference_prefixes=PLACE)
    take_up(ingress, record(asked(request_id="one"), 0))
    take_up(ingress, record(asked("b", request_id="one"), 1))
    assert contents.asked == [PLACE + "a"]


def test_who_waits_past_his_deadline_expires() -> None:
    ingress = machine(route(), contents=Contents(), reference_prefixes=PLACE)
    late = record(asked(deadline_ms=100))
    assert take_up(ingress, late, now_ms=NOW_MS + 99).batch.held
    found = take_up(ingress, late, now_ms=NOW_MS + 100)
    assert [result.status for result in found.results] == ["expired"]


def test_a_quota_is_used_once_however_long_the_inputs_take() -> None:
    contents = Contents()
    ingress = machine(route(quota_per_s=1.0), contents=contents, reference_prefixes=PLACE)
    for _ in range(5):
        assert take_up(ingress, record(asked())).batch.held
    contents.there = {PLACE + "a": INPUTS}
    assert len(take_up(ingress, record(asked())).work) == 1


def test_one_transaction_holds_only_so_many_bytes() -> None:
    large = b'{"x": 1' + b" " * (BATCH_BYTES_MAX // 3) + b"}"
    contents = with_contents(**dict.fromkeys("01234", large))
    ingress = machine(route(), contents=contents, reference_prefixes=PLACE, reference_bytes_max=BATCH_BYTES_MAX)
    found = take_up(ingress, *(record(asked(str(number)), number) for number in range(5)))
    assert len(found.work) == 3
    assert found.batch.held


def test_only_so_many_are_looked_at_behind_a_waiting_one() -> None:
    """Whatever they hold: a partition that waits comes again every few milliseconds with all that stands behind."""
    contents = Contents()
    ingress = machine(route(), contents=contents, reference_prefixes=PLACE)
    first = [asked("waits"), *[body(x=1)] * 100]
    values = [*first, *(asked(str(number)) for number in range(AHEAD_MAX))]
    take_up(ingress, *(record(value, number) for number, value in enumerate(values)))
    assert len(contents.prepared) == AHEAD_MAX - 100


def test_inputs_too_large_for_a_record_are_told_how_to_come() -> None:
    ingress = machine(route(), reference_prefixes=PLACE, request_bytes_max=1_024)
    (result,) = take_up(ingress, record(body(inputs={"x": 1, "name": "a" * 2_000}))).results
    assert result.error is not None
    assert result.error.code == "payload_too_large"
    assert f"below {PLACE} and send inputs_ref" in result.error.message


# ------------------------------------------------------------------------------------------------ over the log


def test_neighbours_go_on_and_everything_ends_once() -> None:
    world = World(route(), partitions=2, reference_prefixes=PLACE)
    host = world.ingress()
    world.send(body(request_id="before"), asked(request_id="late"), body(request_id="behind"), key=b"one")
    world.send(*(body(request_id=f"other{number}") for number in range(3)), key=b"four")
    world.run(host)
    assert {work.request_id for work in world.work()} == {"before", "other0", "other1", "other2"}
    assert world.contents.waits >= 3
    world.send(body(request_id="other3"), key=b"four")
    world.run(host)
    assert len(world.work()) == 5
    world.contents.there[PLACE + "a"] = INPUTS
    world.run(host)
    assert sorted(work.request_id for work in world.work()) == sorted(
        ["before", "late", "behind", "other0", "other1", "other2", "other3"]
    )
    assert host.machine.counts.duplicates == 0


def test_a_process_that_dies_while_it_waits_loses_nothing() -> None:
    world = World(route(), partitions=1, reference_prefixes=PLACE)
    first = world.ingress()
    world.send(body(request_id="before"), asked(request_id="late"), body(request_id="behind"))
    world.run(first)
    second = world.ingress()
    world.contents.there[PLACE + "a"] = INPUTS
    world.run(second)
    assert [work.request_id for work in world.work()] == ["before", "late", "behind"]
    assert world.results() == []
