"""The check for two owners on records: each violation is found, and a lawful handover is none."""

from __future__ import annotations

import pytest
from msgspec import structs

from sie_stream.auditing.owners import Owners, owners_of
from sie_stream.control import (
    ClusterRecord,
    PartitionPlacement,
    PartitionReleased,
    PlacementRow,
    WorkerFenced,
    WorkerJoined,
    WorkerLeft,
)
from sie_stream.records import Provenance, Result, Timings, Usage

T0 = 1_000
JOINED = WorkerJoined("w0", "a", "host", 1, (), (), {})
FENCED = WorkerFenced("w0", "a", 5)
RELEASED = PartitionReleased("w0", "a", "m", 0, 10, offset=3)


def row(worker: str, incarnation: str, epoch: int, *more: PartitionPlacement) -> PlacementRow:
    return PlacementRow("m", "sie.work.m", (), (PartitionPlacement(0, worker, incarnation, epoch, "assigned"), *more))


def result(worker: str, incarnation: str, offset: int, finished_at: int = T0) -> Result:
    origin = Provenance("r", 0, offset, "sie.work.m", 0, offset, worker=worker, incarnation=incarnation)
    return Result(*(f"r{offset}", "ok", "mi", "m", "1", "s", b"{}", None, Usage(), Timings(), origin, finished_at))


def handover(end: ClusterRecord | None, at: int, epoch: int = 30, *results: Result) -> Owners:
    facts: list[tuple[int, int, ClusterRecord]] = [(1, T0, JOINED)]
    if end is not None:
        facts.append((at, T0 + at, end))
    return owners_of(facts, [row("w0", "a", 10), row("w1", "b", epoch)], results)


@pytest.mark.parametrize(
    "end",
    [FENCED, RELEASED, WorkerLeft("w0", "a"), structs.replace(JOINED, incarnation="next")],
    ids=["fenced", "released", "left", "replaced"],
)
def test_a_handover_after_an_end_is_lawful_and_before_it_is_not(end: ClusterRecord) -> None:
    lawful = handover(end, 20)
    assert (lawful.violations, lawful.assignments) == ([], 2)
    assert handover(end, 30).violations == [], "by the very record"
    (said,) = handover(end, 31).violations
    assert "partition 0 of m was given to w1/b (epoch 30) while w0/a (epoch 10) had neither" in said


def test_a_handover_without_any_end_is_found() -> None:
    assert len(handover(None, 0).violations) == 1


@pytest.mark.parametrize(
    "other",
    [
        structs.replace(RELEASED, partition=1),
        structs.replace(RELEASED, placement_epoch=9),
        structs.replace(RELEASED, incarnation="b"),
        structs.replace(FENCED, incarnation="b"),
        structs.replace(FENCED, worker="w1"),
        JOINED,
    ],
)
def test_the_end_of_something_else_frees_nothing(other: ClusterRecord) -> None:
    assert len(handover(other, 20).violations) == 1


def test_an_epoch_that_does_not_grow_is_found() -> None:
    assert "epochs must grow" in handover(FENCED, 5, 10).violations[0]


def test_a_partition_twice_in_one_row_is_found() -> None:
    twice = row("w0", "a", 10, PartitionPlacement(0, "w0", "a", 10, "assigned"))
    assert owners_of([], [twice], []).violations == ["partition 0 of m is listed twice in one row"]


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([result("w2", "c", 1)], "never owned"),
        ([result("w0", "b", 1)], "never owned"),
        ([result("w0", "a", 1, T0 + 25)], "5 ms after it was fenced"),
        ([result("w0", "a", 1), structs.replace(result("w1", "b", 1), request_id="r1")], "answered as r1 and as r1"),
    ],
)
def test_results_of_strangers_of_the_fenced_and_doubled_ones_are_found(results: list[Result], words: str) -> None:
    found = handover(FENCED, 20, 30, *results)
    assert found.results == len(results)
    assert words in found.violations[0]


def test_results_of_owners_are_right_and_those_of_ingress_are_passed_over() -> None:
    mine = [result("w0", "a", 1, T0 + 20), result("w1", "b", 2, T0 + 90)]
    by_egress = structs.replace(result("w0", "a", 3, T0 + 900), timings_ms=Timings(postprocess=885.5))
    refused = structs.replace(mine[0], provenance=Provenance("r", 0, 7))
    found = handover(FENCED, 20, 30, *mine, by_egress, refused)
    assert (found.violations, found.results) == ([], 3)


def test_a_variant_has_partitions_of_its_own() -> None:
    """Its topic is another one, so partition 0 of it is not partition 0 of its model."""
    origin = Provenance("r", 0, 5, "sie.work.m.CANARY", 0, 5, worker="w1", incarnation="b")
    said = structs.replace(result("w1", "b", 5), variant="canary", provenance=origin)
    of_canary = PlacementRow("m.CANARY", "sie.work.m.CANARY", (), (PartitionPlacement(0, "w1", "b", 10, "assigned"),))
    assert owners_of([(1, T0, JOINED)], [row("w0", "a", 10), of_canary], [said]).violations == []
    assert len(owners_of([(1, T0, JOINED)], [row("w0", "a", 10)], [said]).violations) == 1
