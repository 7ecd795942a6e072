"""Room is made by moving neighbours, new before old; a plan that the world overtakes is given up."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scheduler.limits import PLAN_MS_MAX
from scheduler.machine import SchedulerMachine
from scheduler.plans import PlannedMove, PlanUnderWay
from scheduler.state import from_bytes, to_bytes
from sie_stream.control import CordonWorker, RecordDecision, UndoDecision, WorkerExited
from sie_stream.decisions import SolverRun
from tests.unit.scheduler.kit import MIB, Cluster, decisions, fail, joined, kinds, spec_json
from tests.waiting import PATIENCE_S

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


def test_waves_wait_for_each_other() -> None:
    """m1 leaves w1 first, and only then m0 goes there."""
    cluster = Cluster()
    cluster.lead()
    for worker in ("w0", "w1"):
        cluster.append(joined(worker, worker))
    for name in ("m0", "m1"):
        cluster.apply(spec_json(name, memory_mb=600))
        cluster.make_ready(name)
    cluster.append(joined("w2", "w2"))
    at = {name: cluster.model(name).replicas[0].worker for name in ("m0", "m1")}
    size = 600 * MIB
    first = PlannedMove("m1", 1, (at["m1"], "cpu0"), ("w2", "cpu0"), size, wave=0)
    second = PlannedMove("m0", 1, (at["m0"], "cpu0"), (at["m1"], "cpu0"), size, wave=1)
    cluster.machine.state.plan = PlanUnderWay(
        decision="d-0-0",
        offset=0,
        kind="Tick",
        purpose="rebalance",
        moves=(first, second),
        starts=(),
        workers={worker: worker for worker in ("w0", "w1", "w2")},
        solver=SolverRun("by hand", "feasible", 1, {}, 1, 2),
        started_ms=cluster.now_ms,
    )
    alive = tuple((worker, worker) for worker in ("w0", "w1", "w2"))
    assert kinds(cluster.wait(250, alive)) == ["replica_moving"]
    assert kinds(cluster.wait(1_000, alive)) == []
    cluster.make_ready("m1")
    assert len(cluster.model("m0").replicas) == 1
    cluster.release("m1")
    assert [replica.worker for replica in cluster.model("m1").replicas] == ["w2"]
    assert sorted(replica.worker for replica in cluster.model("m0").replicas) == ["w0", "w1"]
    cluster.make_ready("m0")
    cluster.release("m0")
    assert [replica.worker for replica in cluster.model("m0").replicas] == [at["m1"]]
    assert kinds(cluster.commands)[-1] == "plan_ended"


def test_a_plan_that_takes_too_long_is_given_up() -> None:
    cluster, moved, source = waiting()
    cluster.machine.state.plan.started_ms -= PLAN_MS_MAX  # type: ignore[union-attr]  # there is one: see waiting()
    (given_up,) = decisions(cluster.wait(250, ALIVE), "plan_given_up")
    assert str(PLAN_MS_MAX) in given_up.reason
    assert set(cluster.owners(moved).values()) == {source}


def test_a_replica_moves_between_devices_of_one_worker() -> None:
    """left and right on the two devices of the only worker; big needs one for itself."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a", devices=2))
    for name in ("left", "right"):
        cluster.apply(spec_json(name, memory_mb=400))
        cluster.make_ready(name)
    cluster.apply(spec_json("big", memory_mb=700))
    plan = cluster.machine.state.plan
    assert plan is not None
    (move,) = plan.moves
    cluster.make_ready(move.model)
    cluster.release(move.model)
    assert [replica.device for replica in cluster.model("big").replicas] == [move.source[1]]
    assert set(cluster.owners(move.model).values()) == {"w0"}


def test_the_same_plan_in_a_process_of_another_hash_seed() -> None:
    program = (
        "import hashlib, msgspec; from tests.unit.scheduler.test_replanning import waiting; "
        "print(hashlib.sha256(msgspec.json.encode(waiting()[0].commands)).hexdigest())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "4711" else "4711"},
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ran.stdout.strip() == hashlib.sha256(msgspec.json.encode(waiting()[0].commands)).hexdigest()
