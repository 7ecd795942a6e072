"""What workers tell beside results: as bytes, in the story of a request, in its spans, and of the slow ones."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from sie_stream.control import PartitionReleased
from sie_stream.decisions import Decision, Move
from sie_stream.records import Timings
from sie_stream.touches import (
    HEADER_BYTES_MAX,
    LEFT_MAX,
    TOUCHES_HEADER,
    TOUCHES_MAX,
    CameIn,
    KeptOut,
    Moved,
    Retried,
    came_in_of,
    decode_touches,
    encode_touches,
    kept_headers,
    touch_headers,
    touches_in,
)
from sie_stream.tracing.evidence import ClusterFact, Evidence
from sie_stream.tracing.otlp import spans_json
from sie_stream.tracing.slow import SlowStudy
from sie_stream.tracing.story import tell
from tests.unit.tracing.test_story import T0, answered, result

MIB = 1024 * 1024
CAME = CameIn(
    *(T0 + 85, "w0", "cpu:0", "m@1", "host", 20 * MIB, 30.0, 40.0),
    gave_way=("a@1", "b@2"),
    left_for="a@1",
    away_ms=900.0,
)
MOVED = Moved("w1", "w1-1", T0 + 20, T0 + 60, 3 * MIB, T0 + 92)
ALL = (CAME, KeptOut(T0, "w0", "cpu:0", "m@1", "host", ("a@1",)), MOVED, Retried(T0 + 70, "w0", "poison", 1))


def story(*touches: CameIn | KeptOut | Moved | Retried, **changes: object) -> Evidence:
    return answered(touches=touches, **changes)


def test_they_come_back_as_they_were_and_cost_nothing_where_nothing_happened() -> None:
    assert touches_in(touch_headers(ALL)) == ALL
    assert touch_headers(()) == ()
    assert touches_in(()) == ()
    assert touches_in((("other", b"1"),)) == ()


def test_what_a_newer_release_or_a_stranger_wrote_is_left_out() -> None:
    body = msgspec.json.encode([{"type": "of_tomorrow", "at_ms": 1}, CAME, {**msgspec.to_builtins(MOVED), "new": 3}])
    assert decode_touches(body) == (CAME, MOVED)
    for bad in (b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 5_000, b'[{"type":"came_in"}]', b"null"):
        assert decode_touches(bad) == (), bad
    assert decode_touches(msgspec.json.encode([CAME] * 100)) == (), "longer than any that is written"
    assert kept_headers(((TOUCHES_HEADER, b"x" * (HEADER_BYTES_MAX + 1)),)) == ()


def test_the_newest_are_kept_and_the_length_is_bounded() -> None:
    assert touches_in(touch_headers([*[MOVED] * TOUCHES_MAX, *ALL]))[-4:] == ALL
    long = came_in_of(replace(CAME, model="m" * 500), ["n" * 500] * 20, "o" * 500, 1.0)
    assert (len(long.gave_way), long.gave_way_more) == (LEFT_MAX, 20 - LEFT_MAX)
    told = encode_touches([CAME, *[long] * TOUCHES_MAX])
    assert len(told) <= HEADER_BYTES_MAX
    assert decode_touches(told)[-1] == long


def test_a_model_that_came_in_stands_between_routing_and_the_end_of_the_queue() -> None:
    told = tell(story(CAME))
    stages = [step.stage for step in told.steps]
    assert stages == ["placement", "client", "ingress", "ingress", "device", "queue", "engine", "result"]
    step = told.steps[4]
    assert (step.at_ms, step.lasted_ms) == (T0 + 85, 30.0)
    assert step.what == (
        "m@1 came to cpu:0 from host memory: 20.0 MiB; a@1, b@2 gave way, after 40 ms of waiting for its turn. "
        "It had left for a@1 900 ms before"
    )
    assert "in the queue; its model had to come to cpu:0 first" in told.verdict
    assert told.touches == (CAME,)
    room = tell(story(replace(CAME, gave_way=(), waited_ms=0.0, left_for="", came_from="disk"))).steps[4]
    assert room.what == "m@1 came to cpu:0 from disk: 20.0 MiB; there was room"


def test_the_order_holds_when_the_clock_of_the_worker_is_behind() -> None:
    stages = [step.stage for step in tell(story(replace(CAME, at_ms=T0 - 500))).steps]
    assert stages == ["placement", "client", "ingress", "ingress", "device", "queue", "engine", "result"]


def test_a_request_that_ended_outside_says_who_was_on_the_device() -> None:
    origin = replace(result().provenance, batch_size=0, device="")
    ended = result(status="expired", provenance=origin)
    told = tell(story(KeptOut(T0 + 99, "w0", "cpu:0", "m@1", "host", ("a@1", "b@1")), result=ended))
    assert [step.stage for step in told.steps][-3:] == ["device", "queue", "result"]
    assert told.steps[-3].what == "m@1 was not on cpu:0, but in host memory; there were a@1, b@1"


def test_a_moved_request_names_both_workers_and_its_pause_and_is_one_attempt() -> None:
    released = ClusterFact(90, T0 + 62, PartitionReleased("w1", "w1-1", "m", 1, 9, 100))
    given = Decision(
        *("d-90-1", "partitions_assigned", "m", "They were free.", 90, T0 + 62, {}),
        moves=(Move("m", "partitions 0, 1", "", "w0"),),
    )
    told = tell(story(MOVED, facts=(released,), decisions=(given,)))
    own = [step for step in told.steps if step.stage != "control"][4:]
    assert [step.stage for step in own] == ["moved", "queue", "moved", "engine", "result"]
    assert own[0].what == "ran on w1 (w1-1), which stopped it to be moved: an image of 3.0 MiB"
    assert (own[0].at_ms, own[0].lasted_ms) == (T0 + 60, 40.0)
    assert own[1].what == "left the queue of w0 (w0-1); 72 ms of that time it ran elsewhere, or moved"
    assert own[2].what == "went on from its image on w0 (w0-1)"
    assert (own[2].at_ms, own[2].lasted_ms) == (T0 + 92, 32.0)
    assert told.attempts == 1
    assert (told.durations_ms["queue"], told.durations_ms["ran_elsewhere"], told.durations_ms["moving"]) == (8, 40, 32)
    assert "40.0 ms of it (40 %) in engines of other workers" in told.verdict
    refused = tell(story(replace(MOVED, refused="another version"), facts=(released,), decisions=(given,)))
    assert refused.attempts == 2
    assert any("did not take its image (another version): computed from the beginning" in s.what for s in refused.steps)


def test_each_move_names_where_it_went() -> None:
    second = Moved("w2", "w2-1", T0 + 65, T0 + 70, 1_000, T0 + 95)
    moved = [step.what for step in tell(story(replace(MOVED, at_ms=T0 + 66), second)).steps if step.stage == "moved"]
    assert [what.split(":")[0] for what in moved] == [
        "ran on w1 (w1-1), which stopped it to be moved",
        "went on from its image on w2 (w2-1)",
        "ran on w2 (w2-1), which stopped it to be moved",
        "went on from its image on w0 (w0-1)",
    ]


def test_a_retry_is_an_attempt_with_its_cause() -> None:
    told = tell(story(Retried(T0 + 70, "w0", "engine_died", 1)))
    assert told.attempts == 2
    [step] = [step for step in told.steps if step.stage == "retried"]
    assert step.what == "attempt 1 failed on w0 (engine_died); tried again"


def test_spans_have_them() -> None:
    spans = spans_json(tell(story(CAME, MOVED, Retried(T0 + 70, "w0", "poison", 1))), "0")
    root, *children = spans["resourceSpans"][0]["scopeSpans"][0]["spans"]
    names = [child["name"] for child in children]
    assert names == ["ingress", "ingress", "device", "moved", "moved", "queue", "engine"]
    device = children[2]
    assert int(device["endTimeUnixNano"]) - int(device["startTimeUnixNano"]) == 30_000_000
    assert "gave way" in device["attributes"][0]["value"]["stringValue"]
    assert "retried" in [event["name"] for event in root["events"]]
    assert len({child["spanId"] for child in children}) == len(children)


def test_slow_requests_share_the_wait_for_their_model() -> None:
    study = SlowStudy("m")
    for number in range(1_000):
        slow = number % 100 == 0
        timings = Timings(queue=400.0 if slow else 1.0, inference=2.0 + number / 1e4, total=410.0 if slow else 5.0)
        study.add(result(request_id=f"r{number}", timings_ms=timings), (CAME,) if slow else ())
    shared = {trait.trait: trait for trait in study.report().shared}
    waited = shared["waited for m@1 to come to w0/cpu:0 from host"]
    assert (waited.share, waited.share_of_all) == (1.0, 0.01)
    assert "waited for b@2 to give way on w0/cpu:0" in shared
