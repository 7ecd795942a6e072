"""One request told from records: every way to end, and every place to be open."""

from __future__ import annotations

from msgspec.structs import replace

from sie_stream.control import PartitionPlacement, PartitionReleased, Tick, WorkerFenced
from sie_stream.decisions import Decision, Move
from sie_stream.ids import TopicPartition
from sie_stream.records import CommittedOffset, DeadLetter, Provenance, Result, ResultError, Timings, Usage, WorkItem
from sie_stream.tracing.batches import batch_key, neighbours
from sie_stream.tracing.control_steps import STEPS_MAX
from sie_stream.tracing.evidence import ClusterFact, Evidence, Found, Source
from sie_stream.tracing.otlp import spans_json
from sie_stream.tracing.story import tell, telling, touches
from sie_stream.tracing.traceparent import parse_traceparent

T0 = 1_700_000_000_000
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REQUESTS, WORK, RESULTS = (
    TopicPartition("sie.requests", 2),
    TopicPartition("sie.work.m", 1),
    TopicPartition("sie.results", 2),
)


ORIGIN = Provenance(*REQUESTS, 7, WORK.topic, WORK.partition, 30, 5, 66, "w0", "w0-1", "cpu:0", "d", "e", None, 4, 0)
ANSWER = Result(
    *("r1", "ok", "mi-1", "m", "1", "stable", b"{}", None, Usage()),
    *(Timings(80.0, 1.0, 9.0, 0.0, 0.0, 100.0), ORIGIN, T0 + 100),
)


def result(**changes: object) -> Result:
    return replace(ANSWER, **changes)


WORKED = WorkItem(
    *("r1", "mi-1", "m", "1", "stable", 5, 1, b"{}", b"r1", REQUESTS.topic, REQUESTS.partition, 7),
    *(T0, T0 + 9, T0 + 10),
    deadline_at_ms=T0 + 150,
    traceparent=PARENT,
)
SOURCE = Source(Found(REQUESTS, 7, T0), 300, PARENT)
ASKED = Evidence(request_id="r1", now_ms=T0 + 5_000, sources=(SOURCE,))
ROUTED = Evidence(request_id="r1", now_ms=T0 + 5_000, sources=(SOURCE,), work=WORKED, work_at=Found(WORK, 30, T0 + 10))
PLACED = Decision(
    *("d-66-0", "replica_placed", "m", "1 wanted.", 66, T0 - 9_000, {}),
    moves=(Move("m", "replica", "", "w0/cpu:0"),),
)


def answered(**changes: object) -> Evidence:
    found = Found(RESULTS, 40, T0 + 103)
    return replace(ROUTED, **({"result": result(), "result_at": found, "placed": PLACED} | changes))


def test_the_steps_of_an_answer_in_causal_order_with_times() -> None:
    told = tell(answered())
    assert [step.stage for step in told.steps] == [
        *("placement", "client", "ingress", "ingress", "queue", "engine", "result"),
    ]
    assert [step.at_ms - T0 for step in told.steps] == [-9_000, 0, 9, 10, 90, 99, 100]
    assert [step.lasted_ms for step in told.steps[2:]] == [9.0, 1.0, 80.0, 9.0, 100.0]
    assert told.verdict == "ok after 100.0 ms; 80.0 ms of it (80 %) in the queue; 50 ms before its deadline"
    assert (told.state, told.attempts, told.worker, told.deadline_left_ms) == ("ok", 1, "w0", 50)
    assert told.durations_ms["waiting_for_ingress_and_commit"] == 10.0
    assert "waited 3 ms for its transaction" in told.steps[-1].what
    assert "d-66-0 replica_placed on w0/cpu:0: 1 wanted." in told.steps[0].what


def test_clocks_that_disagree_do_not_turn_the_chain_around() -> None:
    late_sender = Source(Found(REQUESTS, 7, T0 + 60), 300)
    told = tell(answered(sources=(late_sender,)))
    stages = [step.stage for step in told.steps if step.stage != "placement"]
    assert stages == ["client", "ingress", "ingress", "queue", "engine", "result"]


def test_a_pooled_answer_has_its_stage_2() -> None:
    told = tell(answered(result=result(timings_ms=Timings(80.0, 1.0, 9.0, 2.0, 30.0, 130.0), finished_at=T0 + 130)))
    assert [step.stage for step in told.steps][-2:] == ["egress", "result"]
    assert told.steps[-2].lasted_ms == 30.0


def test_a_worker_that_was_killed_leaves_an_attempt_and_its_fence() -> None:
    fenced = ClusterFact(90, T0 + 50, WorkerFenced("w1", "w1-1", 60))
    given = Decision(
        *("d-90-1", "partitions_assigned", "m", "They were free.", 90, T0 + 50, {}),
        moves=(Move("m", "partitions 0, 1", "", "w0"),),
    )
    told = tell(answered(facts=(fenced,), decisions=(given,)))
    assert told.attempts == 2
    control = [step for step in told.steps if step.stage == "control"]
    assert "w1 (w1-1) fenced after 60 ms" in control[0].what
    assert "its own partition" in control[1].what
    stages = [step.stage for step in told.steps]
    assert stages.index("control") > stages.index("ingress")
    assert stages.index("control") < stages.index("queue")


def test_a_partition_of_its_variant_that_moved_is_an_attempt() -> None:
    released = ClusterFact(90, T0 + 50, PartitionReleased("w1", "w1-1", "m.CANARY", 1, 9, 100))
    given = Decision(
        *("d-90-1", "partitions_assigned", "m.CANARY", "They were free.", 90, T0 + 50, {}),
        moves=(Move("m.CANARY", "partitions 0, 1", "", "w0"),),
    )
    found = answered(result=result(variant="canary"), work=replace(WORKED, variant="canary"))
    assert tell(replace(found, facts=(released,), decisions=(given,))).attempts == 2
    assert tell(answered(facts=(released,), decisions=(given,))).attempts == 1, "of the stable version nothing moved"


def test_a_partition_of_others_that_moved_is_no_attempt() -> None:
    released = ClusterFact(90, T0 + 50, PartitionReleased("w1", "w1-1", "m", 3, 9, 100))
    given = Decision(
        *("d-90-1", "partitions_assigned", "m", "They were free.", 90, T0 + 50, {}),
        moves=(Move("m", "partitions 3, 11", "", "w0"),),
    )
    assert tell(answered(facts=(released,), decisions=(given,))).attempts == 1


def test_a_poisoned_request_shows_its_letter_and_the_counted_attempts() -> None:
    letter = DeadLetter("r1", "engine_died", "gave up", WORK.topic, 1, 30, b"", 120, "", "", 3, T0 + 100, "worker")
    failed = result(status="failed", outputs=None, error=ResultError("engine_died", "gave up after 3 attempts"))
    told = tell(answered(result=failed, letter=letter, letter_at=Found(TopicPartition("sie.deadletter", 0), 4, T0)))
    assert (told.state, told.attempts) == ("failed", 3)
    assert [step.stage for step in told.steps][-2:] == ["deadletter", "result"]
    assert "engine_died" in told.verdict


def test_a_request_refused_at_ingress_has_no_worker() -> None:
    refused = result(
        status="rejected",
        error=ResultError("wrong_type", "no number", "inputs.a"),
        provenance=Provenance(*REQUESTS, 7),
        timings_ms=Timings(total=9.0),
        outputs=None,
        finished_at=T0 + 9,
    )
    told = tell(answered(work=None, work_at=None, result=refused, placed=None))
    assert [step.stage for step in told.steps] == ["client", "result"]
    assert told.attempts == 0
    assert "(field inputs.a)" in told.steps[-1].what


def test_expired_in_the_queue_says_that_no_engine_ran() -> None:
    origin = Provenance(*REQUESTS, 7, *WORK, 30, 5, 66, "w0", "w0-1")
    gone = result(
        status="expired",
        error=ResultError("deadline_exceeded", "too late"),
        provenance=origin,
        timings_ms=Timings(queue=290.0, total=300.0),
        finished_at=T0 + 300,
        outputs=None,
    )
    told = tell(answered(result=gone))
    assert "no engine ran it" in told.steps[-2].what
    assert told.deadline_left_ms == -150
    assert "150 ms after its deadline" in told.verdict


def test_open_requests_say_where_they_are() -> None:
    assert tell(Evidence(request_id="r1", now_ms=T0)).state == "unknown"
    waiting = tell(Evidence(request_id="r1", now_ms=T0 + 5, sources=(SOURCE,), ingress_committed=4))
    assert (waiting.state, waiting.attempts) == ("open", 0)
    assert "waits for ingress, at most 3 records before it" in waiting.verdict
    assert tell(Evidence(request_id="r1", now_ms=T0, sources=(SOURCE,), ingress_committed=8)).state == "repeat"
    held = PartitionPlacement(1, "w0", "w0-1", 70, "assigned")
    working = tell(replace(ROUTED, owner=held, work_committed=CommittedOffset(28)))
    assert "with w0 (w0-1) or waiting for it: assigned, at most 2 records before it" in working.verdict
    assert working.attempts == 1
    orphan = tell(ROUTED)
    assert "no worker works the partition off" in orphan.verdict
    assert orphan.attempts == 0
    assert "Stage 2" in tell(replace(ROUTED, work_finished=True)).verdict


def test_what_is_gone_or_more_than_once_is_noted() -> None:
    told = tell(answered(sources=(), other_results=(Found(RESULTS, 50, T0),), placed=None, notes=("read less",)))
    assert told.steps[0].what == "request record (gone by retention)"
    notes = " ".join(told.notes)
    assert "2 terminal records" in notes
    assert "record 66 of sie.cluster" in notes
    assert "3 others of its batch were not found" in notes
    assert told.notes[0] == "read less"


def test_many_control_steps_are_cut_to_a_screen() -> None:
    facts = tuple(ClusterFact(n, T0 + n, WorkerFenced(f"w{n}", "i", 1)) for n in range(20))
    told = tell(answered(facts=facts))
    control = [step for step in told.steps if step.stage == "control"]
    assert len(control) == STEPS_MAX + 1
    assert control[-1].what.startswith("and 8 more")


def test_a_repeat_stands_at_its_time() -> None:
    again = Source(Found(REQUESTS, 9, T0 + 3_000), 300)
    told = tell(answered(sources=(SOURCE, again)))
    assert told.steps[-1].stage == "repeat"
    assert "drops a repeat" in told.steps[-1].what


def test_neighbours_are_of_the_same_batch_of_the_same_engine_run() -> None:
    mine = result()
    others = [
        result(request_id="b"),
        result(request_id="a", finished_at=T0 + 101),
        result(request_id="later", finished_at=T0 + 900),
        result(request_id="other-run", timings_ms=Timings(80.0, 1.0, 9.1, 0.0, 0.0, 100.0)),
        result(request_id="r1"),
        result(request_id="pooled", finished_at=T0 + 140, timings_ms=Timings(80.0, 1.0, 9.0, 0.0, 40.0, 140.0)),
    ]
    assert [one.request_id for one in neighbours(mine, others)] == ["a", "b", "pooled"]
    assert batch_key(result(provenance=Provenance(*REQUESTS, 7))) is None


def test_spans_follow_the_callers_trace() -> None:
    spans = spans_json(tell(answered()), "0.1")["resourceSpans"][0]["scopeSpans"][0]["spans"]
    root, *children = spans
    assert (root["traceId"], root["parentSpanId"]) == (PARENT[3:35], PARENT[36:52])
    assert [child["name"] for child in children] == ["ingress", "ingress", "queue", "engine"]
    assert all(child["parentSpanId"] == root["spanId"] and child["traceId"] == root["traceId"] for child in children)
    assert root["startTimeUnixNano"] == str(T0 * 1_000_000)
    assert int(children[2]["endTimeUnixNano"]) - int(children[2]["startTimeUnixNano"]) == 80_000_000
    assert root["status"] == {"code": 1}
    assert len({span["spanId"] for span in spans}) == len(spans)
    without = spans_json(tell(answered(sources=(), work=None)), "0.1")["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert "parentSpanId" not in without
    assert len(without["traceId"]) == 32


def test_traceparent_by_the_specification() -> None:
    found = parse_traceparent(PARENT)
    assert found is not None
    assert found.sampled
    for bad in (
        "",
        "x",
        PARENT.upper(),
        "ff" + PARENT[2:],
        PARENT + "-more",
        PARENT.replace("b7ad6b7169203331", "0" * 16),
    ):
        assert parse_traceparent(bad) is None, bad
    assert parse_traceparent("01" + PARENT[2:] + "-more") is not None


def test_what_touches_a_request() -> None:
    assert touches(PLACED, "m", "")
    assert touches(PLACED, "m.CANARY", ""), "what is decided about the model changes what its variants get"
    canary = Decision("d-67-0", "replica_placed", "m.CANARY", "", 67, T0, {})
    assert [touches(canary, unit, "") for unit in ("m.CANARY", "m", "m.B")] == [True, False, False]
    assert touches(PLACED, "other", "w0")
    assert not touches(PLACED, "other", "w1")
    assert not telling(ClusterFact(1, T0, Tick("s")))
