"""Loads that workers report become replicas, within the bounds that are declared."""

from __future__ import annotations

from typing import Literal

from scheduler.busy import MOST
from scheduler.elastic import CRAMPED_MS, EVERY_MS, redeclare
from scheduler.offers import wish_of
from scheduler.state import NEVER_MS
from sie_stream.control import ReplicaReady, SchedulerElected, WorkerLoad
from sie_stream.loads import ModelLoad
from sie_stream.settings import Settings
from tests.unit.scheduler.kit import Cluster, decisions, joined, running, spec_json

ALIVE = (("w0", "a"), ("w1", "b"))


def load(cluster: Cluster, arrivals: int, waiting: int, busy_ms: int, p99_ms: int = 50, running: int = 1) -> None:
    """Two seconds of load, as every worker with a replica reports it."""
    for replica in [r for r in cluster.model().replicas if r.state == "ready"]:
        report = ModelLoad("churn", arrivals, arrivals, waiting, running, busy_ms, p99_ms)
        cluster.append(WorkerLoad(replica.worker, replica.incarnation, 2_000, (report,)))
    cluster.wait(2_000, ALIVE)


def overload(cluster: Cluster) -> None:
    for _ in range(20):
        load(cluster, arrivals=400, waiting=2_000, busy_ms=2_000)
        cluster.make_ready()
        cluster.release()


def test_an_overloaded_model_grows_to_what_is_declared_and_not_beyond() -> None:
    cluster = running()
    overload(cluster)
    scaled = decisions(cluster.commands, "replicas_scaled")
    assert [decision.chosen["wanted"] for decision in scaled] == [2]
    assert scaled[0].chosen["rule"] == "grow"
    assert sorted(replica.worker for replica in cluster.model().replicas) == ["w0", "w1"]
    assert set(cluster.owners().values()) == {"w0", "w1"}


def test_a_model_that_needs_more_than_it_may_have_asks_for_devices_of_its_own_for_a_while() -> None:
    cluster = Cluster(Settings(rebalance_policy="always"))
    for record in (SchedulerElected("s0"), joined("w0", "a"), joined("w1", "b")):
        cluster.append(record)
    cluster.apply(spec_json(replicas={"min": 1, "max": 2}))
    cluster.make_ready()
    assert wish_of(cluster.model()).load_percent < MOST
    overload(cluster)
    assert cluster.model().needed > 2
    assert wish_of(cluster.model()).load_percent == MOST
    cluster.wait(CRAMPED_MS // 2, ALIVE)
    assert wish_of(cluster.model()).load_percent == MOST, "a burst has more than one peak"
    cluster.wait(CRAMPED_MS, ALIVE)
    assert wish_of(cluster.model()).load_percent < MOST


def test_waiting_behind_other_loads_is_no_part_of_a_cold_start() -> None:
    cluster = Cluster()
    for record in (SchedulerElected("s0"), joined("w0", "a")):
        cluster.append(record)
    cluster.apply(spec_json(replicas={"min": 1, "max": 2}))
    (replica,) = cluster.model().replicas
    cluster.wait(60_000, (("w0", "a"),))
    took_ms = cluster.now_ms - replica.placed_ms
    ready = ReplicaReady("w0", "a", "churn", "1.0.0", replica.placement_epoch, 1, 8_000, 1_000, waited_ms=50_000)
    cluster.append(ready)
    assert cluster.model().cold_start_ms == took_ms - 50_000


def test_a_model_that_grew_shrinks_when_nothing_comes_any_more() -> None:
    cluster = running()
    overload(cluster)
    cluster.wait(15 * 60_000, ALIVE)
    cluster.release()
    assert [d.chosen["wanted"] for d in decisions(cluster.commands, "replicas_scaled")] == [2, 1]
    assert len(cluster.model().replicas) == 1
    assert len(set(cluster.owners().values())) == 1


def test_a_fixed_number_of_replicas_stays_whatever_the_load() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    cluster.apply(spec_json(replicas={"min": 1, "max": 1}))
    cluster.make_ready()
    overload(cluster)
    assert not decisions(cluster.commands, "replicas_scaled")


def test_a_new_version_starts_with_as_many_replicas_as_the_old_one_had_grown_to() -> None:
    cluster = running()
    overload(cluster)
    cluster.apply(spec_json(version="2.0.0", replicas={"min": 1, "max": 2}))
    assert cluster.model().replicas_wanted == 2
    cluster.apply(spec_json(version="3.0.0", replicas={"min": 1, "max": 1}))
    assert cluster.model().replicas_wanted == 1


def test_reports_of_workers_that_are_gone_and_of_unknown_models_change_nothing() -> None:
    cluster = running()
    before = cluster.model().load
    cluster.append(WorkerLoad("w0", "old", 2_000, (ModelLoad("churn", 9, 9, 9, 9, 9, 9),)))
    cluster.append(WorkerLoad("w0", "a", 2_000, (ModelLoad("nobody", 9, 9, 9, 9, 9, 9),)))
    assert cluster.model().load == before
    assert cluster.machine.state.scale_due_ms <= cluster.now_ms + EVERY_MS


def test_a_model_declared_with_a_fixed_number_asks_no_more_for_devices_of_its_own() -> None:
    cluster = running()
    overload(cluster)
    assert wish_of(cluster.model()).load_percent == MOST, "or this test shows nothing"
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    cluster.wait(CRAMPED_MS + EVERY_MS, ALIVE)
    assert wish_of(cluster.model()).load_percent < MOST


def looks_for_one_that_lacks(policy: Literal["never", "always"], running: int) -> bool:
    """Whether other places are looked for within ten seconds, though nothing else happens.

    The model may have one replica and needs more; 2,000 requests wait, and so many are worked on.
    """
    cluster = Cluster(Settings(rebalance_policy=policy))
    for record in (SchedulerElected("s0"), joined("w0", "a"), joined("w1", "b")):
        cluster.append(record)
    cluster.apply(spec_json(replicas={"min": 0, "max": 1}))
    cluster.make_ready()
    cluster.wait(30_000, ALIVE)
    state, began_ms = cluster.machine.state, cluster.now_ms
    state.rebalance_due_ms = NEVER_MS
    for _ in range(5):
        load(cluster, arrivals=400, waiting=2_000, busy_ms=2_000, running=running)
    return state.rebalanced_ms > began_ms


def test_places_are_looked_at_soon_for_a_model_with_a_queue_that_may_not_grow() -> None:
    assert looks_for_one_that_lacks("always", 100)
    assert not looks_for_one_that_lacks("always", 2_000), "no more wait than are worked on"
    assert not looks_for_one_that_lacks("never", 100)


def test_a_new_version_with_the_same_bounds_has_no_more_room_than_the_one_before() -> None:
    model = running().model()
    model.cramped_until_ms = 7
    bounds = model.scaling
    redeclare(model, bounds, 1)
    assert model.cramped_until_ms == 7
    redeclare(model, None, 1)
    assert model.cramped_until_ms == 0
