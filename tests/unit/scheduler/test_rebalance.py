"""Replicas move back when it pays, calmly; and between cheap and dear devices by whether the SLA is met there."""

from __future__ import annotations

from typing import Literal

import pytest

from scheduler.move_plans import plan_order
from scheduler.placement import DeviceOffer, PlacementProblem, ReplicaWish, Resident, place
from sie_stream.control import Device, UncordonWorker, WorkerExited, WorkerJoined
from sie_stream.loads import DeviceLoad, ModelLoad, WorkerLoad
from sie_stream.settings import Settings
from tests.unit.scheduler.kit import MIB, Cluster, decisions, joined, kinds, spec_json

Policy = Literal["never", "idle", "always"]
BOTH = (("w0", "a"), ("w1", "c"))
BUSY = (DeviceLoad("cpu0", 9_000),)


def returned(policy: Policy) -> Cluster:
    """w1 died and came back: all four models are on w0."""
    cluster = Cluster(Settings(rebalance_policy=policy))
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    for name in ("m0", "m1", "m2", "m3"):
        cluster.apply(spec_json(name))
        cluster.make_ready(name)
    cluster.fence(cluster.append(WorkerExited("w1", "b", -9, "up")))
    cluster.wait(1_000, (("w0", "a"),))
    for name in ("m0", "m1", "m2", "m3"):
        cluster.make_ready(name)
    cluster.append(joined("w1", "c"))
    return cluster


def settle(cluster: Cluster, names: tuple[str, ...]) -> None:
    for name in names:
        cluster.make_ready(name)
        cluster.release(name)


def on(cluster: Cluster, worker: str) -> int:
    models = cluster.machine.state.models.values()
    return sum(replica.worker == worker for model in models for replica in model.present())


@pytest.mark.parametrize("policy", ["never", "idle", "always"])
def test_replicas_go_back_once_and_calmly(policy: Policy) -> None:
    cluster = returned(policy)
    assert on(cluster, "w0") == 4
    assert "plan_started" not in kinds(cluster.wait(9_000, BOTH)), "a returning fleet returns worker by worker"
    commands = cluster.wait(2_000, BOTH)
    if policy == "never":
        assert kinds(commands) == []
        return
    (started,) = decisions(commands, "plan_started")
    assert started.chosen["purpose"] == "rebalance"
    assert started.solver is not None
    assert started.solver.do_nothing is not None
    assert started.solver.objective < started.solver.do_nothing
    for _ in range(4):
        settle(cluster, ("m0", "m1", "m2", "m3"))
    assert (on(cluster, "w0"), on(cluster, "w1")) == (2, 2)
    assert all(cluster.owners(name) for name in ("m0", "m1", "m2", "m3"))
    cluster.wait(200_000, BOTH)
    assert kinds(cluster.commands).count("plan_started") == 1, "nothing more has happened"


def test_idle_waits_until_the_pool_has_little_to_do() -> None:
    cluster = returned("idle")
    for _ in range(10):
        cluster.append(WorkerLoad("w0", "a", 2_000, (ModelLoad("m0", 100, 100, 0, 0, 1_800, 5),), BUSY))
        assert "plan_started" not in kinds(cluster.wait(2_000, BOTH))
    assert "plan_started" in kinds(cluster.wait(20_000, BOTH)), "its last report is too old to count"


def test_a_worker_back_in_service_is_a_reason_to_look() -> None:
    cluster = returned("always")
    cluster.wait(11_000, BOTH)
    for _ in range(4):
        settle(cluster, ("m0", "m1", "m2", "m3"))
    cluster.append(UncordonWorker("w1", "ann"))
    cluster.wait(100_000, BOTH)
    assert kinds(cluster.commands).count("plan_started") == 1, "the fleet is in order: nothing pays"


# ---------------------------------------------------------------- cpu and cuda


def mixed() -> Cluster:
    """One worker with a cpu, one with a GPU; the model may be on both."""
    cluster = Cluster(Settings(rebalance_policy="always"))
    cluster.lead()
    for worker, incarnation, kind in (("w0", "a", "cpu"), ("w1", "c", "cuda")):
        device = Device(f"{kind}:0", kind, 2_000 * MIB)
        cluster.append(WorkerJoined(worker, incarnation, worker, 1, (device,), ("sklearn", "torch"), {}))
    cluster.apply(spec_json(slas={"p99_latency_ms": 50}))
    cluster.make_ready()
    return cluster


def report(cluster: Cluster, worker: str, incarnation: str, p99_ms: int, times: int) -> None:
    for _ in range(times):
        cluster.append(WorkerLoad(worker, incarnation, 2_000, (ModelLoad("churn", 20, 20, 0, 0, 500, p99_ms),)))
        cluster.wait(1_000, BOTH)


def test_it_starts_on_the_cheap_device_and_moves_when_that_misses_the_sla() -> None:
    cluster = mixed()
    assert on(cluster, "w0") == 1
    report(cluster, "w0", "a", 40, 3)
    cluster.wait(80_000, BOTH)
    assert on(cluster, "w0") == 1
    report(cluster, "w0", "a", 90, 3)
    cluster.wait(80_000, BOTH)
    settle(cluster, ("churn",))
    assert on(cluster, "w1") == 1
    report(cluster, "w1", "c", 5, 20)
    cluster.wait(200_000, BOTH)
    assert on(cluster, "w1") == 1, "no way back as long as nothing has shown that the cheap one would do"
    assert kinds(cluster.commands).count("plan_started") == 1


def test_two_replicas_of_one_model_move_together() -> None:
    cluster = Cluster(Settings(rebalance_policy="always"))
    cluster.lead()
    for worker in ("w0", "w1"):
        cluster.append(joined(worker, "a", memory_mb=4_000))
    for name, memory_mb in (("light", 100), ("heavy", 1_500)):
        cluster.apply(spec_json(name, memory_mb=memory_mb, replicas={"min": 2, "max": 2}))
        cluster.make_ready(name)
    for worker in ("w2", "w3"):
        cluster.append(joined(worker, "a", memory_mb=4_000))
    alive = tuple((f"w{number}", "a") for number in range(4))
    cluster.wait(12_000, alive)
    assert len(decisions(cluster.commands, "replica_moving")) == 2
    for _ in range(3):
        settle(cluster, ("light", "heavy"))
    cluster.wait(2_000, alive)
    assert "plan_given_up" not in kinds(cluster.commands)
    assert "plan_ended" in kinds(cluster.commands)
    assert sorted(replica.worker for replica in cluster.model("light").present()) == ["w2", "w3"]
    assert set(cluster.owners("light").values()) == {"w2", "w3"}


def test_a_model_that_shrinks_while_it_moves_does_not_end_the_plan_of_the_others() -> None:
    cluster = Cluster(Settings(rebalance_policy="always"))
    cluster.lead()
    for worker in ("w0", "w1"):
        cluster.append(joined(worker, "a", memory_mb=4_000))
    for name, memory_mb in (("light", 100), ("other", 100), ("heavy", 1_500)):
        cluster.apply(spec_json(name, memory_mb=memory_mb, replicas={"min": 2, "max": 2}))
        cluster.make_ready(name)
    for worker in ("w2", "w3"):
        cluster.append(joined(worker, "a", memory_mb=4_000))
    alive = tuple((f"w{number}", "a") for number in range(4))
    cluster.wait(12_000, alive)
    moving = {decision.subject for decision in decisions(cluster.commands, "replica_moving")}
    assert moving >= {"light"}, "or this test shows nothing"
    cluster.model("light").replicas_wanted = 1  # as the elastic law says it
    for _ in range(3):
        settle(cluster, ("light", "other", "heavy"))
    cluster.wait(2_000, alive)
    assert "plan_given_up" not in kinds(cluster.commands)
    assert "plan_ended" in kinds(cluster.commands)
    assert len(cluster.model("light").replicas) == 1


def test_an_sla_that_is_missed_on_every_kind_there_is_makes_no_place_dearer() -> None:
    wish = ReplicaWish("churn", 1, 1, "sklearn", MIB, missed_on=("cpu",))
    cheap = DeviceOffer("w0", "a", "cpu0", "cpu", 10 * MIB, 0, ("sklearn",))
    dear = DeviceOffer("w1", "a", "cuda:0", "cuda", 10 * MIB, 0, ("sklearn",))
    alone, both = (place(PlacementProblem(offers, (wish,))) for offers in ((cheap,), (cheap, dear)))
    assert "sla_risk" not in alone.solver.terms
    assert both.chosen[0].worker == "w1", "where there is another kind, it counts"


def test_a_heavy_backend_does_not_start_on_a_cpu() -> None:
    cluster = mixed()
    cluster.apply(spec_json("llm", backend={"name": "torch"}))
    assert cluster.model("llm").replicas[0].worker == "w1"


def test_a_new_version_is_tried_on_the_cheap_device_again() -> None:
    cluster = mixed()
    report(cluster, "w0", "a", 90, 3)
    assert cluster.model().sla_missed == ("cpu",)
    cluster.apply(spec_json(version="2.0.0", slas={"p99_latency_ms": 50}))
    assert cluster.model().sla_missed == ()


@pytest.mark.parametrize("window_ms", [0, -5, 10**30])
def test_a_window_that_makes_no_sense_is_left_out(window_ms: int) -> None:
    cluster = mixed()
    cluster.append(WorkerLoad("w0", "a", window_ms, (ModelLoad("churn", 20, 20, 0, 0, 10**40, 10**40),)))
    assert cluster.model().sla_missed == ()
    assert cluster.model().sla_streak == {}


def test_one_device_of_a_large_fleet_is_emptied() -> None:
    """What all the others cost says nothing about whether the move pays."""
    gib = 1 << 30
    offers = tuple(
        DeviceOffer(f"w{n:03d}", "a", "cuda:0", "cuda", 80 * gib, 0, ("torch",), host=f"h{n}") for n in range(220)
    )
    half = {3, 140}
    residents = tuple(
        Resident(ReplicaWish(f"m{n}", 1, 1, "torch", (30 if n in half else 70) * gib), f"w{n:03d}", ("cuda:0",))
        for n in range(220)
    )
    found = plan_order(PlacementProblem(offers, (), residents, "binpack"))
    assert [move.model in ("m3", "m140") for move in found.moves] == [True], found.why_not
