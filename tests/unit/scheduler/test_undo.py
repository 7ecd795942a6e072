"""Undo: replicas go back to where they were before a decision, new before old, or it says why not."""

from __future__ import annotations

import pytest
from msgspec import Raw

from scheduler.state import JOURNAL_MAX, to_bytes
from scheduler.undo import plan_undo
from sie_stream.control import (
    ApplyModel,
    CordonWorker,
    DeleteModel,
    SchedulerCommand,
    UndoDecision,
    WorkerExited,
)
from sie_stream.decisions import Decision
from tests.unit.scheduler.kit import TWO, Cluster, decisions, fail, joined, kinds, running, spec_json


def moved_away() -> tuple[Cluster, str]:
    """churn was on w0, which died and came back; it serves on w1. And the decision that took it off w0."""
    cluster = running()
    assert cluster.owners() == dict.fromkeys(range(6), "w0")
    commands = cluster.append(WorkerExited("w0", "a", -9, "up"))
    (lost,) = decisions(commands, "worker_lost")
    cluster.fence(commands)
    cluster.wait(500, (("w1", "b"),))
    cluster.make_ready()
    assert cluster.owners() == dict.fromkeys(range(6), "w1")
    cluster.append(joined("w0", "c"))
    return cluster, lost.decision


def undo(cluster: Cluster, decision: str) -> list[SchedulerCommand]:
    return cluster.append(UndoDecision(decision, "ann"))


def refusal(cluster: Cluster, decision: str) -> str:
    """Undo has to be refused, and to change nothing but the offset."""
    before = to_bytes(cluster.machine.state)
    planned = plan_undo(cluster.machine.state, decision)
    assert to_bytes(cluster.machine.state) == before
    commands = undo(cluster, decision)
    (refused,) = decisions(commands)
    assert len(commands) == 1
    assert (refused.kind, refused.undoes, refused.asked_by) == ("undo_refused", decision, "ann")
    assert refused.rejected == planned.refused
    return refused.reason


def places(cluster: Cluster, name: str = "churn") -> list[str]:
    return [replica.worker for replica in cluster.placement(name).replicas]


def test_a_replica_goes_back_new_before_old() -> None:
    cluster, lost = moved_away()
    (restored,) = decisions(undo(cluster, lost))
    assert (restored.kind, restored.undoes, restored.subject) == ("placement_restored", lost, "churn")
    assert [(m.what, m.source, m.target) for m in restored.moves] == [("replica", "w1/cpu0", "w0/cpu0")]
    assert restored.memory[0].before_bytes == 0
    assert restored.memory[0].after_bytes == cluster.model().launch.memory_bytes
    assert places(cluster) == ["w1", "w0"]
    assert cluster.owners() == dict.fromkeys(range(6), "w1"), "the one there serves until the other is ready"
    cluster.make_ready(only="w0")
    cluster.release()
    assert cluster.owners() == dict.fromkeys(range(6), "w0")
    assert places(cluster) == ["w0"]
    (retired,) = decisions(cluster.commands, "replica_retired")
    assert restored.decision in retired.reason


def test_an_undo_can_be_undone() -> None:
    cluster, lost = moved_away()
    (restored,) = decisions(undo(cluster, lost))
    cluster.make_ready(only="w0")
    cluster.release()
    assert kinds(undo(cluster, restored.decision)) == ["placement_restored"]
    cluster.make_ready(only="w1")
    cluster.release()
    assert places(cluster) == ["w1"]
    assert cluster.owners() == dict.fromkeys(range(6), "w1")


def test_one_that_fails_there_leaves_everything_where_it_is() -> None:
    cluster, lost = moved_away()
    undo(cluster, lost)
    fail(cluster)
    assert "undo_given_up" in kinds(cluster.commands)
    cluster.wait(20_000, (("w0", "c"), ("w1", "b")))
    assert places(cluster) == ["w1"]
    assert cluster.owners() == dict.fromkeys(range(6), "w1")
    assert not cluster.model().replicas[0].leaving


def test_what_keeps_its_place_after_all_keeps_it_on_a_cordoned_worker_too() -> None:
    cluster, lost = moved_away()
    undo(cluster, lost)
    cluster.append(CordonWorker("w1", "ann"))
    fail(cluster)
    assert "undo_given_up" in kinds(cluster.commands)
    cluster.wait(20_000, (("w0", "c"), ("w1", "b")))
    assert places(cluster) == ["w1"]
    assert not cluster.model().replicas[0].leaving, "nothing new is placed there, and what runs there stays"


def test_the_worker_that_dies_meanwhile_leaves_everything_where_it_is() -> None:
    cluster, lost = moved_away()
    undo(cluster, lost)
    cluster.fence(cluster.append(WorkerExited("w0", "c", -9, "up")))
    cluster.wait(20_000, (("w1", "b"),))
    assert places(cluster) == ["w1"]
    assert cluster.owners() == dict.fromkeys(range(6), "w1")


def test_the_one_that_is_to_leave_may_die_as_well() -> None:
    cluster, lost = moved_away()
    undo(cluster, lost)
    cluster.fence(cluster.append(WorkerExited("w1", "b", -9, "up")))
    cluster.make_ready(only="w0")
    assert places(cluster) == ["w0"]
    assert cluster.owners() == dict.fromkeys(range(6), "w0")


def test_a_decision_about_several_models_is_undone_for_all_of_them_or_none() -> None:
    cluster = running()
    cluster.append(joined("w2", "z"))
    cluster.append(WorkerExited("w2", "z", 1, "up"))
    cluster.append(WorkerExited("w1", "b", 1, "up"))
    cluster.apply(spec_json("risk", replicas=TWO))
    cluster.make_ready("risk")
    commands = cluster.append(WorkerExited("w0", "a", -9, "up"))
    (lost,) = decisions(commands, "worker_lost")
    assert sorted(move.model for move in lost.moves) == ["churn", "risk"]
    cluster.fence(commands)
    cluster.append(joined("w1", "c"))
    for name in ("churn", "risk"):
        cluster.make_ready(name)
    cluster.append(joined("w0", "d", memory_mb=150))
    assert "risk was on w0/cpu0: needs" in refusal(cluster, lost.decision)
    cluster.append(joined("w0", "e"))
    (restored,) = decisions(undo(cluster, lost.decision))
    assert restored.subject == "churn, risk"
    for name in ("churn", "risk"):
        cluster.make_ready(name)
        cluster.release(name)
        assert places(cluster, name) == ["w0"]


def first(cluster: Cluster, kind: str) -> Decision:
    return decisions(cluster.commands, kind)[0]


@pytest.mark.parametrize("bad", ["", "120", "d-1", "d-1-x", "d--1-0", "x-1-0", "d-1-0-0", "d-²-0"])
def test_what_is_no_id_is_refused(bad: str) -> None:
    assert "allowed is d-OFFSET-N" in refusal(running(), bad)


def test_a_decision_that_moved_nothing_that_is_declared_is_refused() -> None:
    cluster, lost = moved_away()
    assert "sie.cluster ends before" in refusal(cluster, "d-100000-0")
    assert "No model that is declared now was moved" in refusal(cluster, first(cluster, "model_accepted").decision)
    cluster.append(DeleteModel("churn"))
    assert "being deleted" in refusal(cluster, lost)


def test_the_first_placement_is_no_move() -> None:
    cluster = running()
    assert "had 0 replicas before it and 1 replica is wanted now (1 to 2, by its load)" in refusal(
        cluster, first(cluster, "replica_placed").decision
    )


def test_who_has_a_fixed_number_is_told_to_change_the_declaration() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    why = refusal(cluster, decisions(cluster.commands, "replica_placed")[1].decision)
    assert "had 1 replica before it and 2 replicas are wanted now, so" in why
    assert "Change the declaration instead." in why


def test_what_is_where_it_was_is_not_undone() -> None:
    cluster, lost = moved_away()
    undo(cluster, lost)
    cluster.make_ready(only="w0")
    cluster.release()
    assert "nothing to undo" in refusal(cluster, lost)


def test_without_the_worker_or_the_room_it_is_refused() -> None:
    cluster, lost = moved_away()
    cluster.append(joined("w0", "d", memory_mb=50))
    assert "w0/cpu0: needs" in refusal(cluster, lost)
    cluster.append(WorkerExited("w0", "d", 1, "up"))
    assert "no live worker offers that device" in refusal(cluster, lost)


def test_it_waits_for_no_other_move() -> None:
    cluster, lost = moved_away()
    undo(cluster, lost)
    assert "moving already" in refusal(cluster, lost)
    cluster, lost = moved_away()
    cluster.append(ApplyModel(Raw(spec_json(version="2.0.0", replicas=TWO))))
    assert "is changing to version 2.0.0" in refusal(cluster, lost)


def test_a_new_version_in_the_middle_of_an_undo_takes_over() -> None:
    cluster, lost = moved_away()
    undo(cluster, lost)
    cluster.apply(spec_json(version="2.0.0", replicas=TWO))
    for _ in range(3):
        cluster.make_ready()
        cluster.release()
    assert [replica.launch.version for replica in cluster.placement().replicas] == ["2.0.0"]
    assert len(set(cluster.owners().values())) == 1


def test_the_journal_is_short() -> None:
    cluster, lost = moved_away()
    for number in range(JOURNAL_MAX + 2):
        cluster.append(joined("w1", f"b{number}"))
        cluster.make_ready()
    assert len(cluster.model().journal) == JOURNAL_MAX
    assert f"newest {JOURNAL_MAX} changes" in refusal(cluster, lost)
