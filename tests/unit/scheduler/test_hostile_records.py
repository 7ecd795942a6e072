"""Records that others wrote to sie.cluster: whatever they say, the fold goes on, or every scheduler would stop."""

from __future__ import annotations

import pytest

from sie_stream.control import UndoDecision, WorkerJoined, WorkerLoad
from sie_stream.decisions import place_of
from sie_stream.loads import DeviceLoad, ModelLoad
from tests.unit.scheduler.kit import Cluster, decisions, joined, kinds, running, spec_json

ALIVE = (("w0", "a"), ("w1", "b"))
DIGITS = "9" * 5_000


@pytest.mark.parametrize(
    "decision", [f"d-1-{DIGITS}", f"d-{DIGITS}-0", "d--1", "d-1-2-3", "", "nonsense", "d-\u0661-1"]
)
def test_an_undo_of_no_decision_is_refused(decision: str) -> None:
    assert place_of(decision) is None
    assert kinds(running().append(UndoDecision(decision, "mallory"))) == ["undo_refused"]


@pytest.mark.parametrize("wanted", [f">={DIGITS}", f"~=1.{DIGITS}"])
def test_a_version_range_of_thousands_of_digits_is_rejected(wanted: str) -> None:
    commands = running().apply(spec_json("odd", requires={"pytorch": wanted}))
    assert kinds(commands) == ["model_rejected"]


def test_a_reported_version_of_thousands_of_digits_lies_in_no_range() -> None:
    cluster = Cluster()
    cluster.lead()
    fact = joined("w0", "a")
    cluster.append(WorkerJoined("w0", "a", "host", 1, fact.devices, fact.backends, versions={"torch": DIGITS}))
    cluster.apply(spec_json("odd", requires={"pytorch": ">=2.6"}))
    assert decisions(cluster.commands, "replica_unplaceable")[0].subject == "odd"


@pytest.mark.parametrize("count", [-1, 10**30])
def test_a_load_that_nobody_can_have_is_ignored(count: int) -> None:
    cluster = running()
    cluster.append(WorkerLoad("w0", "a", 2_000, (ModelLoad("churn", count, 1, 1, 1, 1, 1),)))
    cluster.append(WorkerLoad("w0", "a", 2_000, (ModelLoad("churn", 1, 1, 1, 1, 1, count),)))
    cluster.wait(10_000, ALIVE)
    assert cluster.model().load.arrivals == 0


@pytest.mark.parametrize("busy_bp", [-1, 10_001, 10**30])
def test_a_device_cannot_be_busier_than_always_nor_be_one_that_is_not_there(busy_bp: int) -> None:
    cluster = running()
    load = (ModelLoad("churn", 1, 1, 1, 1, 1, 1),)
    cluster.append(WorkerLoad("w0", "a", 2_000, load, (DeviceLoad("cpu0", busy_bp),)))
    assert cluster.model().load.arrivals == 0
    cluster.append(WorkerLoad("w0", "a", 2_000, load, (DeviceLoad("cpu0", 9), DeviceLoad("x" * 9_999, 9))))
    assert cluster.machine.state.workers["w0"].busy_bp == {"cpu0": 9}


@pytest.mark.parametrize("memory_mb", [0, -5, 10**15])
def test_a_worker_with_devices_that_make_no_sense_is_refused(memory_mb: int) -> None:
    cluster = running()
    assert kinds(cluster.append(joined("ghost", "g", memory_mb=memory_mb))) == ["worker_refused"]
    fact = joined("ghost", "g", devices=1)
    twins = WorkerJoined("ghost", "g", "host", 1, fact.devices * 2, fact.backends, {})
    assert kinds(cluster.append(twins)) == ["worker_refused"]
    cluster.apply(spec_json("one"))
    assert cluster.model("one").replicas
