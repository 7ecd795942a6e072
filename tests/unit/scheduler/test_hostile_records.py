"""Records that others wrote to sie.cluster: whatever they say, the fold goes on, or every scheduler would stop."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from scheduler.state import to_bytes
from sie_stream.control import EngineLost, TopicEnsured, UndoDecision, WorkerJoined, WorkerLoad
from sie_stream.decisions import place_of
from sie_stream.engine_facts import EngineModel
from sie_stream.ids import LANES
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


@pytest.mark.parametrize(
    "changes",
    [{"worker": "nobody"}, {"incarnation": "old"}, {"device": "cpu9"}, {"backend": "x" * 100_000}],
    ids=["worker", "incarnation", "device", "backend"],
)
def test_an_engine_that_nobody_can_have_lost_is_ignored(changes: dict[str, str]) -> None:
    cluster = running()
    fact = EngineLost("w0", "a", "cpu0", "sklearn", "SIGSEGV", (EngineModel("churn", "1.0.0", 3),))
    assert kinds(cluster.append(structs.replace(fact, **changes))) == []
    assert all(replica.down is None for replica in cluster.model().replicas)


def test_a_lost_engine_of_any_size_fits_into_the_decision_and_the_state() -> None:
    cluster = running()
    many = tuple(f"{number}" * 1_000 for number in range(5_000))
    named = tuple(EngineModel(name, "1.0.0", 10**30) for name in many)
    for requests in (10**30, -1, 5):
        commands = cluster.append(EngineLost("w0", "a", "cpu0", "sklearn", "x" * 100_000, named, requests, many, many))
        (lost,) = decisions(commands, "engine_lost")
        assert len(msgspec.json.encode(lost)) < 8_000
    assert len(to_bytes(cluster.machine.state)) < 300_000
    assert all(replica.down is None for replica in cluster.model().replicas)


@pytest.mark.parametrize("memory_mb", [0, -5, 10**15])
def test_a_worker_with_devices_that_make_no_sense_is_refused(memory_mb: int) -> None:
    cluster = running()
    assert kinds(cluster.append(joined("ghost", "g", memory_mb=memory_mb))) == ["worker_refused"]
    fact = joined("ghost", "g", devices=1)
    twins = WorkerJoined("ghost", "g", "host", 1, fact.devices * 2, fact.backends, {})
    assert kinds(cluster.append(twins)) == ["worker_refused"]
    cluster.apply(spec_json("one"))
    assert cluster.model("one").replicas


@pytest.mark.parametrize("partitions", [10**9, 10**30, 0, -6])
def test_a_topic_of_partitions_that_nobody_asked_for_is_ignored(partitions: int) -> None:
    cluster = running()
    before = len(cluster.model().partitions)
    cluster.append(TopicEnsured("churn", "sie.work.churn", partitions))
    cluster.append(TopicEnsured("later", "sie.work.later", partitions))
    assert len(cluster.model().partitions) == before
    assert cluster.machine.state.topic_widths == {"churn": before // LANES}


def test_a_worker_without_a_name_is_refused() -> None:
    cluster = running()
    assert kinds(cluster.append(joined("", ""))) == ["worker_refused"]
    assert "" not in cluster.machine.state.workers
