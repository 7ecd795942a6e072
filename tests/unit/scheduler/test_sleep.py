"""Idle models fall asleep, and wake for work, for a declaration, and for their end."""

from __future__ import annotations

from typing import Any

import pytest

from sie_stream.control import DeleteModel, InstanceRow, RouteRow
from sie_stream.loads import ModelLoad, WorkerLoad, WorkWaiting
from tests.unit.scheduler.kit import INSTANCE, Cluster, decisions, joined, kinds, spec_json

ALIVE = (("w0", "a"), ("w1", "b"))
SLEEPY = {"min": 0, "max": 2}


def idle(**fields: Any) -> Cluster:
    """A model that may have no replica, and nothing to do for a while."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    cluster.apply(spec_json(replicas=SLEEPY, **fields))
    cluster.make_ready()
    cluster.wait(90_000, ALIVE)
    return cluster


def route(cluster: Cluster) -> RouteRow:
    return cluster.row("routes", "churn", RouteRow)


def asleep() -> Cluster:
    cluster = idle()
    cluster.release()
    assert route(cluster).asleep
    assert not cluster.model().replicas
    assert not cluster.owners()
    return cluster


def wake(cluster: Cluster, waiting: int = 1) -> None:
    cluster.append(WorkWaiting("churn", route(cluster).route_epoch, waiting))


def test_an_idle_model_hands_everything_back_and_is_unloaded() -> None:
    cluster = idle()
    assert route(cluster).asleep, "ingress looks after it from now on"
    assert cluster.model().replicas, "until it has released its partitions"
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "asleep"
    cluster.release()
    assert not cluster.model().replicas
    assert not cluster.placement().replicas
    scaled = decisions(cluster.commands, "replicas_scaled")
    assert [(one.chosen["rule"], one.chosen["wanted"]) for one in scaled] == [("to_zero", 0)]


def test_work_wakes_it_where_it_was() -> None:
    cluster = asleep()
    cluster.wait(600_000, ALIVE)
    wake(cluster)
    assert not route(cluster).asleep
    (replica,) = cluster.model().replicas
    assert replica.worker == "w0"
    placed = decisions(cluster.commands, "replica_placed")[-1]
    assert "it held the model before" in placed.reason
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w0"}
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "ready"


def test_it_comes_back_elsewhere_when_its_worker_is_gone() -> None:
    cluster = asleep()
    cluster.fence(cluster.wait(30_000, ALIVE[1:]))
    wake(cluster)
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w1"}


def test_work_that_is_told_twice_or_late_or_of_nobody_changes_nothing() -> None:
    cluster = asleep()
    epoch = route(cluster).route_epoch
    wake(cluster)
    wanted = cluster.model().replicas_wanted
    for record in (WorkWaiting("churn", epoch, 1), WorkWaiting("churn", -1, 1), WorkWaiting("nobody", epoch, 1)):
        assert not kinds(cluster.append(record))
    assert cluster.model().replicas_wanted == wanted


@pytest.mark.parametrize("waiting", [0, -1, 10**30])
def test_counts_that_nobody_can_have_are_ignored(waiting: int) -> None:
    cluster = asleep()
    wake(cluster, waiting)
    assert route(cluster).asleep


def test_work_that_comes_while_it_hands_back_wakes_it_again() -> None:
    cluster = idle()
    wake(cluster)
    cluster.release()
    cluster.make_ready()
    assert not route(cluster).asleep
    assert len(cluster.owners()) == len(cluster.model().partitions)


def test_a_model_that_has_work_or_is_not_all_there_does_not_sleep() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(replicas=SLEEPY))
    cluster.make_ready()
    for _ in range(60):
        cluster.append(WorkerLoad("w0", "a", 2_000, (ModelLoad("churn", 1, 1, 0, 0, 1, 1),)))
        cluster.wait(2_000, ALIVE[:1])
    assert not route(cluster).asleep
    cluster.fence(cluster.wait(30_000))
    cluster.wait(900_000)
    assert not route(cluster).asleep, "nobody can say whether it has work"


def test_a_model_of_the_tag_high_sla_never_sleeps() -> None:
    assert not route(idle(tags=["high-sla"])).asleep


def test_a_new_version_wakes_it() -> None:
    cluster = asleep()
    cluster.apply(spec_json(version="2.0.0", replicas=SLEEPY))
    assert not route(cluster).asleep
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w0"}


def test_a_model_deleted_in_its_sleep_works_off_what_nobody_has_seen() -> None:
    cluster = asleep()
    cluster.append(DeleteModel("churn", "test"))
    cluster.make_ready()
    assert len(cluster.owners()) == len(cluster.model().partitions)
    cluster.wait(10_000, ALIVE)
    cluster.drain()
    assert "churn" not in cluster.machine.state.models
