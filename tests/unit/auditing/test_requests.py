"""The verifier on records: every violation is found and named, and nothing else is one."""

from __future__ import annotations

import pytest
from msgspec import structs

from sie_stream.auditing.deeds import Deeds, deeds_of
from sie_stream.auditing.requests import Commits, RequestAudit, RequestVerifier, Stream, Stretch, is_finished
from sie_stream.decisions import Decision, Move
from sie_stream.ids import TopicPartition, derived_request_id, variant_unit
from sie_stream.offsets import OffsetLedger
from sie_stream.records import CommittedOffset, Provenance, Result, Timings, Usage

REQUESTS, WORK = TopicPartition("sie.requests", 0), TopicPartition("sie.work.m", 0)
STREAM = Stream(REQUESTS)
T0 = 1_000_000
DONE = Commits({STREAM: 1_000}, {WORK: CommittedOffset(1_000)})


def decisions() -> Deeds:
    return deeds_of(
        [
            Decision("d-5-0", "worker_joined", "w0", "", 5, T0 - 500, {"incarnation": "w0-1"}),
            Decision("d-5-1", "worker_joined", "w1", "", 5, T0 - 500, {"incarnation": "w1-1"}),
            Decision(
                *("d-6-0", "replica_placed", "m", "", 6, T0 - 400, {}), moves=(Move("m", "replica", "", "w0/cpu:0"),)
            ),
        ]
    )


def verifier(count: int = 4, deeds: Deeds | None = None, audited: int = 0) -> RequestVerifier:
    """`count` requests, each with a work item at the same offset."""
    made = RequestVerifier({STREAM: Stretch(0, audited, count)}, {WORK: Stretch(0, 0, count)}, deeds or decisions())
    for offset in range(count):
        made.request(STREAM, offset, T0 + offset, f"r{offset}")
        made.work(WORK, offset, f"r{offset}")
    return made


def result(number: int, **changes: object) -> Result:
    origin: dict[str, object] = {
        "source_topic": REQUESTS.topic,
        "source_partition": 0,
        "source_offset": number,
        "work_topic": WORK.topic,
        "work_partition": 0,
        "work_offset": number,
        "placement_epoch": 6,
        "worker": "w0",
        "incarnation": "w0-1",
        "batch_size": 1,
    }
    name = str(changes.pop("request_id", f"r{number}"))
    status = changes.pop("status", "ok")
    postprocess = float(str(changes.pop("postprocess", 0.0)))
    provenance = Provenance(**(origin | changes))  # type: ignore[arg-type]
    return Result(
        *(name, status, "mi", "m", "1", "stable", b"{}", None, Usage()),  # type: ignore[arg-type]
        *(Timings(postprocess=postprocess), provenance, T0 + 10),
    )


def kinds(report: RequestAudit) -> dict[str, int]:
    assert sum(report.by_kind.values()) == report.violations
    assert report.proven == (not report.violations)
    return report.by_kind


def test_a_good_range_is_proven() -> None:
    found = verifier()
    for number in range(4):
        found.result(f"sie.results/0@{number}", T0 + 12, result(number))
    report = found.close(DONE, 0)
    assert kinds(report) == {}
    assert (report.requests, report.answered, report.by_status, report.open_) == (4, 4, {"ok": 4}, 0)


VIOLATIONS = {
    "two_results": [result(0), result(0)],
    "request_missing": [result(4, work_topic="")],
    "request_is_another": [result(0, request_id="r1", work_topic="")],
    "work_missing": [result(0, work_offset=4)],
    "work_is_another": [result(0, work_offset=1)],
    "placement_unresolved": [result(0, placement_epoch=7)],
    "placed_elsewhere": [result(0, worker="w1", incarnation="w1-1")],
    "unknown_incarnation": [result(0, incarnation="w0-9")],
}


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_each_violation_is_named_with_its_place(kind: str) -> None:
    found = RequestVerifier({STREAM: Stretch(0, 0, 5)}, {WORK: Stretch(0, 0, 5)}, decisions())
    for offset in range(2):
        found.request(STREAM, offset, T0, f"r{offset}")
        found.work(WORK, offset, f"r{offset}")
    for number, one in enumerate(VIOLATIONS[kind]):
        found.result(f"sie.results/0@{number}", T0 + 12, one)
    report = found.close(Commits({}, {}), 0)
    assert kinds(report) == {kind: 1}
    assert report.first[0].kind == kind
    assert report.first[0].where == f"sie.results/0@{len(VIOLATIONS[kind]) - 1}"


def test_the_answer_of_a_variant_is_held_against_the_placement_of_that_variant() -> None:
    unit = variant_unit("m", "canary")
    placed = Decision("d-7-0", "replica_placed", unit, "", 7, T0 - 300, {}, moves=(Move(unit, "replica", "", "w1/a"),))
    deeds = decisions()
    deeds.placed |= deeds_of([placed]).placed
    for epoch, worker, violations in (
        (7, "w1", {}),
        (7, "w0", {"placed_elsewhere": 1}),
        (6, "w0", {"placement_unresolved": 1}),
    ):
        found = verifier(deeds=deeds)
        one = result(0, placement_epoch=epoch, worker=worker, incarnation=f"{worker}-1")
        found.result("sie.results/0@0", T0 + 12, structs.replace(one, variant="canary"))
        assert kinds(found.close(Commits({}, {}), 0)) == violations


@pytest.mark.parametrize("kind", ["worker_fenced", "worker_left", "worker_replaced"])
def test_nobody_answers_after_the_end_of_its_incarnation(kind: str) -> None:
    deeds = decisions()
    chosen: dict[str, str | int] = {"fenced" if kind == "worker_replaced" else "incarnation": "w0-1"}
    more = deeds_of([Decision("d-9-0", kind, "w0", "", 9, T0 + 3_000, chosen)])
    deeds.ended_ms = more.ended_ms
    for written_ms, postprocess, violations in ((3_900, 0.0, 0), (4_100, 0.0, 1), (9_000, 5_000.0, 0)):
        found = verifier(deeds=deeds)
        found.result("sie.results/0@0", T0 + written_ms, result(0, postprocess=postprocess))
        report = found.close(Commits({}, {}), 0)
        assert kinds(report) == ({"answered_after_fence": 1} if violations else {}), written_ms


def test_what_is_done_without_a_result_is_lost() -> None:
    found = verifier()
    found.result("sie.results/0@0", T0, result(0))
    assert found.lost(DONE, 0) == 3
    report = found.close(DONE, 0)
    assert kinds(report) == {"no_result": 3}
    assert report.first[0].where == "sie.requests/0@1"


def test_what_is_under_way_is_open_and_says_where() -> None:
    ledger = OffsetLedger(0)
    for offset in range(3):
        assert ledger.start(offset)
    ledger.finish(1)
    commits = Commits({STREAM: 3}, {WORK: ledger.to_commit()})
    found = verifier()
    found.raw_output("r1")
    report = found.close(commits, 0)
    assert kinds(report) == {}
    assert (report.open_, report.open_at) == (4, {"worker": 2, "stage 2": 1, "ingress": 1})
    assert is_finished(ledger.to_commit(), 1)
    assert not is_finished(ledger.to_commit(), 0)


def test_a_repeat_is_no_loss_even_of_a_request_before_the_range() -> None:
    found = RequestVerifier({STREAM: Stretch(0, 1, 3)}, {}, decisions())
    for offset, name in enumerate(("a", "a", "a")):
        found.request(STREAM, offset, T0, name)
    found.result("sie.results/0@0", T0, result(0, request_id="a", work_topic="", worker=""))
    report = found.close(DONE, 0)
    assert kinds(report) == {}
    assert (report.requests, report.repeats, report.outside) == (2, 2, 1)


def test_results_that_retention_took_make_a_request_unprovable() -> None:
    report = verifier().close(DONE, T0 + 2)
    assert report.unprovable == 2
    assert kinds(report) == {"no_result": 2}


def test_ids_that_ingress_made_are_believed() -> None:
    found = RequestVerifier({STREAM: Stretch(0, 0, 1)}, {}, decisions())
    found.request(STREAM, 0, T0, "unreadable")
    made = derived_request_id(REQUESTS.topic, 0, 0)
    found.result("x", T0, result(0, request_id=made, work_topic="", worker="", status="rejected"))
    assert kinds(found.close(DONE, 0)) == {}


def test_a_bound_topic_is_answered_once_for_each_model() -> None:
    place = TopicPartition("orders", 0)
    streams = {Stream(place, name): Stretch(0, 0, 1) for name in ("mi", "mi-2")}
    found = RequestVerifier(streams, {}, decisions())
    for stream in streams:
        found.request(stream, 0, T0, f"src:orders:0:0:{stream.instance}")
    one = result(0, source_topic="orders", request_id="src:orders:0:0:mi", work_topic="", worker="")
    found.result("x", T0, one)
    report = found.close(Commits(dict.fromkeys(streams, 1), {}), 0)
    assert kinds(report) == {"no_result": 1}
    assert report.answered == 1


def test_old_decisions_that_are_gone_are_unchecked_not_wrong() -> None:
    found = verifier()
    found.result("x", T0, result(0, placement_epoch=2, incarnation="w0-0"))
    report = found.close(Commits({}, {}), 0)
    assert kinds(report) == {}
    assert report.unchecked_placements == 1


def test_markers_and_aborted_records_are_counted_as_invisible() -> None:
    found = RequestVerifier({STREAM: Stretch(0, 0, 10)}, {WORK: Stretch(0, 0, 4)}, decisions())
    found.request(STREAM, 3, T0, "r3")
    found.request(STREAM, 12, T0, "outside")
    report = found.close(Commits({}, {}), 0)
    assert report.invisible == {"sie.requests": 9, "sie.work.m": 4}


def test_what_cannot_be_read_is_a_violation() -> None:
    found = verifier()
    found.unreadable("sie.results/0@9", "bad_avro")
    assert kinds(found.close(Commits({}, {}), 0)) == {"unreadable_result": 1}
