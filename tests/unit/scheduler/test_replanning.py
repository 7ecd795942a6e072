"""Room is made by moving neighbours, new before old; a plan that the world overtakes is given up."""

from __future__ import annotations

import msgspec
import pytest

from scheduler.machine import SchedulerMachine
from scheduler.state import from_bytes, to_bytes
from sie_stream.control import CordonWorker, RecordDecision, UndoDecision, WorkerExited
from tests.unit.scheduler.kit import MIB, Cluster, decisions, fail, joined, kinds, spec_json

ALIVE = (("w0", "a"), ("w1", "b"))


def crowded() -> Cluster:
    """Two workers, each half full: 400 of 1,000 MiB; `big` needs 700."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    for name in ("left", "right"):
        cluster.apply(spec_json(name, memory_mb=400))
        cluster.make_ready(name)
    assert {cluster.model(name).replicas[0].worker for name in ("left", "right")} == {"w0", "w1"}
    return cluster


def waiting() -> tuple[Cluster, str, str]:
    """`big` waits for room: which of the two moves, and from which worker."""
    cluster = crowded()
    cluster.apply(spec_json("big", memory_mb=700))
    plan = cluster.machine.state.plan
    assert plan is not None
    (move,) = plan.moves
    return cluster, move.model, move.source[0]


def test_a_neighbour_moves_and_what_waited_is_placed() -> None:
    cluster, moved, source = waiting()
    assert kinds(cluster.commands)[-3:] != ["replica_unplaceable"]
    (started,) = decisions(cluster.commands, "plan_started")
    (moving,) = decisions(cluster.commands, "replica_moving")
    assert started.subject == "big"
    assert started.solver is not None
    assert started.solver.do_nothing is not None
    assert started.solver.objective < started.solver.do_nothing
    assert started.solver.bound <= started.solver.objective
    assert moving.solver == started.solver
    assert [(m.source.split("/")[0], m.what) for m in moving.moves] == [(source, "replica")]
    assert moving.memory[0].after_bytes - moving.memory[0].before_bytes == 400 * MIB
    assert set(cluster.owners(moved).values()) == {source}, "it serves until the new one is ready"
    assert not cluster.model("big").replicas
    cluster.make_ready(moved)
    assert cluster.release(moved) == 3
    assert set(cluster.owners(moved).values()) == {"w0", "w1"} - {source}
    assert [replica.worker for replica in cluster.model("big").replicas] == [source]
    assert cluster.machine.state.plan is None
    assert kinds(cluster.commands).count("plan_ended") == 1
    assert cluster.model("big").message == ""


def test_the_room_is_kept_for_whom_it_is_made() -> None:
    cluster, moved, source = waiting()
    cluster.apply(spec_json("late", memory_mb=300))
    assert not cluster.model("late").replicas, "300 MiB are free on one worker, which are part of what big needs"
    cluster.make_ready(moved)
    cluster.release(moved)
    assert [replica.worker for replica in cluster.model("big").replicas] == [source]
    assert [replica.worker for replica in cluster.model("late").replicas] == [source]


def test_a_plan_survives_a_snapshot() -> None:
    cluster, moved, source = waiting()
    loaded = from_bytes(to_bytes(cluster.machine.state))
    assert loaded is not None
    cluster.machine = SchedulerMachine(cluster.settings, loaded)
    cluster.make_ready(moved)
    cluster.release(moved)
    assert [replica.worker for replica in cluster.model("big").replicas] == [source]


def test_a_lost_worker_ends_the_plan() -> None:
    cluster, moved, source = waiting()
    other = "w1" if source == "w0" else "w0"
    commands = cluster.append(WorkerExited(other, dict(ALIVE)[other], -9, "up"))
    assert cluster.machine.state.plan is None
    (given_up,) = decisions(commands, "plan_given_up")
    assert other in given_up.reason
    assert "move_given_up" in kinds(commands)
    (replica,) = cluster.model(moved).replicas
    assert (replica.worker, replica.leaving, replica.planned) == (source, False, False)
    assert set(cluster.owners(moved).values()) == {source}


def test_a_failed_target_ends_the_plan_and_the_next_is_later() -> None:
    cluster, moved, source = waiting()
    fail(cluster, moved)
    assert cluster.machine.state.plan is None
    assert set(cluster.owners(moved).values()) == {source}
    assert kinds(cluster.commands).count("plan_given_up") == 1
    cluster.wait(4_000, ALIVE)
    assert kinds(cluster.commands).count("plan_started") == 1
    cluster.wait(8_000, ALIVE)
    assert kinds(cluster.commands).count("plan_started") == 2, "after the calm it is tried again"


@pytest.mark.parametrize("change", ["declaration", "cordon", "not wanted"])
def test_what_the_plan_counted_on_has_changed(change: str) -> None:
    cluster, moved, source = waiting()
    if change == "declaration":
        cluster.apply(spec_json(moved, version="2.0.0", memory_mb=400))
    elif change == "cordon":
        cluster.append(CordonWorker(source, "ann"))
    else:
        cluster.apply(spec_json("big", version="2.0.0", memory_mb=100))
    cluster.wait(250, ALIVE)
    assert cluster.machine.state.plan is None
    assert kinds(cluster.commands).count("plan_given_up") == 1
    assert cluster.owners(moved), "it goes on serving"


def test_a_move_can_be_undone_when_there_is_room() -> None:
    cluster, moved, source = waiting()
    (moving,) = decisions(cluster.commands, "replica_moving")
    cluster.make_ready(moved)
    cluster.release(moved)
    commands = cluster.append(UndoDecision(moving.decision, "ann"))
    assert kinds(commands) == ["undo_refused"], "big has the room now"
    assert [replica.worker for replica in cluster.model("big").replicas] == [source]


def test_nobody_is_moved_for_what_fits_nowhere() -> None:
    cluster = crowded()
    cluster.apply(spec_json("huge", memory_mb=5_000))
    assert cluster.machine.state.plan is None
    assert "plan_started" not in kinds(cluster.commands)
    assert kinds(cluster.commands).count("replica_unplaceable") == 1


def test_nothing_is_stopped_to_make_room() -> None:
    """Both workers are full: room could only be had by stopping something worth less."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    for name in ("left", "right"):
        cluster.apply(spec_json(name, memory_mb=900, tags=["batch-job"], priority_level="P2"))
        cluster.make_ready(name)
    cluster.apply(spec_json("vip", memory_mb=900, tags=["high-sla"], priority_level="P0"))
    assert cluster.machine.state.plan is None
    assert cluster.model("left").replicas
    assert cluster.model("right").replicas
    assert not cluster.model("vip").replicas


def test_the_same_log_gives_the_same_decisions() -> None:
    cluster, moved, _ = waiting()
    cluster.make_ready(moved)
    cluster.release(moved)
    machine = SchedulerMachine(cluster.settings)
    again = [command for entry in cluster.log for command in machine.step(*entry)]
    assert msgspec.json.encode([c for c in again if isinstance(c, RecordDecision)]) == msgspec.json.encode(
        [c for c in cluster.commands if isinstance(c, RecordDecision)]
    )
