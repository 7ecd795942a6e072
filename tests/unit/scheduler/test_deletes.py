"""What the scheduler does about models that are deleted, and taken back."""

from __future__ import annotations

import pytest
from msgspec import Raw

from scheduler.limits import DELETE_GIVE_UP_MS, DELETE_LINGER_MS, RETRIES_MAX
from sie_stream.control import (
    ApplyModel,
    DeleteModel,
    EnsureTopic,
    InstanceRow,
    PartitionReleased,
    RouteRow,
    WorkerExited,
)
from tests.unit.scheduler.kit import INSTANCE, TWO, Cluster, decisions, fail, joined, kinds, running, spec_json


def test_delete_takes_the_route_at_once_and_the_rest_when_the_topic_is_worked_off() -> None:
    cluster = running()
    alive = (("w0", "a"), ("w1", "b"))
    cluster.append(DeleteModel("churn", actor="ann"))
    assert ("routes", "churn") not in cluster.tables
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "deleting"
    cluster.wait(DELETE_LINGER_MS - 500, alive)
    assert {p.state for p in cluster.placement().partitions} == {"assigned"}, "what is in the topic is worked off"
    before = {p.partition: (p.worker, p.placement_epoch) for p in cluster.placement().partitions}
    assert kinds(cluster.wait(1_000, alive)) == ["model_draining"]
    assert {p.state for p in cluster.placement().partitions} == {"draining"}
    assert {p.partition: (p.worker, p.placement_epoch) for p in cluster.placement().partitions} == before
    cluster.wait(60_000, alive)
    assert cluster.placement().replicas, "it takes as long as it takes"
    assert cluster.drain(most=len(before) - 1)
    assert len(cluster.placement().partitions) == 1, "what is worked off is given to nobody"
    cluster.drain()
    assert cluster.tables == {}
    assert "churn" not in cluster.machine.state.models
    deleted = decisions(cluster.commands, "model_deleted")[0]
    assert deleted.chosen["partitions_left"] == "none"


def test_a_deleted_model_is_worked_off_elsewhere_when_its_worker_is_lost() -> None:
    cluster = running()
    only_w1 = (("w1", "b"),)
    cluster.append(DeleteModel("churn"))
    cluster.wait(DELETE_LINGER_MS + 500, (("w0", "a"), *only_w1))
    assert cluster.drain(most=1) == 1
    cluster.fence(cluster.append(WorkerExited("w0", "a", 137, "up")))
    cluster.wait(500, only_w1)
    assert [r.worker for r in cluster.placement().replicas] == ["w1"]
    cluster.make_ready()
    left = cluster.placement().partitions
    assert {(p.worker, p.state) for p in left} == {("w1", "draining")}
    assert len(left) == len(cluster.model().partitions) - 1
    cluster.drain()
    assert "churn" not in cluster.machine.state.models


def test_a_worker_that_stops_gives_back_a_partition_that_is_not_worked_off() -> None:
    cluster = running()
    cluster.append(DeleteModel("churn"))
    cluster.wait(DELETE_LINGER_MS + 500, (("w0", "a"), ("w1", "b")))
    partition = cluster.model().partitions[0]
    commands = cluster.append(PartitionReleased("w0", "a", "churn", 0, partition.epoch, 5))
    assert "worker_stopping" in kinds(commands)
    assert (partition.state, partition.drained) == ("free", False)


def test_a_deletion_is_taken_back_while_the_topic_is_worked_off() -> None:
    cluster = running()
    alive = (("w0", "a"), ("w1", "b"))
    cluster.append(DeleteModel("churn"))
    cluster.wait(DELETE_LINGER_MS + 500, alive)
    cluster.drain(most=1)
    first, second = cluster.model().partitions[:2]
    before = (first.epoch, second.epoch)
    cluster.append(ApplyModel(Raw(spec_json(replicas=TWO))))
    assert {p.state for p in cluster.placement().partitions} == {"assigned"}
    assert first.epoch > before[0], "the drained one is assigned anew"
    assert second.epoch == before[1], "the other one never left its owner"
    commands = cluster.append(PartitionReleased("w0", "a", "churn", 1, second.epoch, 5, drained=True))
    assert kinds(commands) == ["partitions_assigned"], "the report crossed the deletion's end: nobody is stopping"
    cluster.wait(DELETE_LINGER_MS * 2, alive)
    assert len(cluster.placement().partitions) == len(cluster.model().partitions)


def test_a_deleted_model_that_never_loads_is_dropped_and_says_what_is_left() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    alive = (("w0", "a"),)
    cluster.apply(spec_json())
    cluster.append(DeleteModel("churn"))
    cluster.wait(DELETE_LINGER_MS + 500, alive)
    for attempt in range(RETRIES_MAX + 1):
        assert "churn" in cluster.machine.state.models
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, alive)
    assert "churn" not in cluster.machine.state.models
    deleted = decisions(cluster.commands, "model_deleted")[0]
    assert deleted.chosen["partitions_left"] == "0, 1, 2"
    assert "given up" in deleted.reason
    assert cluster.tables == {}


def test_a_deleted_model_that_lost_its_only_worker_waits_for_one_but_not_for_ever() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json())
    cluster.make_ready()
    cluster.fence(cluster.append(WorkerExited("w0", "a", 137, "up")))
    cluster.append(DeleteModel("churn"))
    cluster.wait(DELETE_GIVE_UP_MS)
    assert "churn" in cluster.machine.state.models
    cluster.wait(DELETE_LINGER_MS + 500)
    assert "churn" not in cluster.machine.state.models
    assert decisions(cluster.commands, "model_deleted")[0].chosen["partitions_left"] == "0, 1, 2"


def test_a_deleted_model_whose_worker_starts_again_while_it_loads_is_worked_off_as_promised() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json())
    [asked] = decisions(cluster.append(DeleteModel("churn")), "model_deleting")
    assert asked.chosen["worked_off"] == "yes"
    cluster.fence(cluster.append(WorkerExited("w0", "a", 137, "up")))
    cluster.wait(DELETE_LINGER_MS + 1_000)
    cluster.append(joined("w0", "b"))
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w0"}
    cluster.drain()
    assert cluster.tables == {}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_deleted_model_that_no_device_ever_held_is_gone_after_the_linger(workers: int) -> None:
    cluster = Cluster()
    cluster.lead()
    alive = tuple((f"w{number}", "a") for number in range(workers))
    for worker, incarnation in alive:
        cluster.append(joined(worker, incarnation))
    cluster.apply(spec_json(memory_mb=5_000))
    [asked] = decisions(cluster.append(DeleteModel("churn")), "model_deleting")
    assert "have no result until it is applied again" in asked.reason, "what nobody can do is not promised"
    assert "no worker ever held" in cluster.row("instances", INSTANCE, InstanceRow).message
    cluster.wait(DELETE_LINGER_MS - 500, alive)
    assert "churn" in cluster.machine.state.models, "a worker may join while it lingers"
    cluster.wait(1_000, alive)
    assert cluster.tables == {}
    [deleted] = decisions(cluster.commands, "model_deleted")
    assert deleted.chosen["partitions_left"] == "0, 1, 2"
    assert "no result until it is applied again" in deleted.reason


def test_a_deleted_model_whose_replicas_were_given_up_promises_nothing() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json())
    for attempt in range(RETRIES_MAX + 1):
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, (("w0", "a"),))
    [asked] = decisions(cluster.append(DeleteModel("churn")), "model_deleting")
    assert "given up" in asked.reason
    assert "is worked off" not in asked.reason
    assert asked.chosen["worked_off"] == "no"


def test_the_version_that_serves_works_off_the_topic_when_the_newer_one_was_given_up() -> None:
    cluster = running()
    alive = (("w0", "a"), ("w1", "b"))
    cluster.apply(spec_json(version="2.0.0", replicas=TWO))
    for attempt in range(RETRIES_MAX + 1):
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, alive)
    [asked] = decisions(cluster.append(DeleteModel("churn")), "model_deleting")
    assert asked.chosen["worked_off"] == "yes"
    cluster.wait(DELETE_LINGER_MS + 500, alive)
    assert {p.state for p in cluster.placement().partitions} == {"draining"}
    cluster.drain()
    assert cluster.tables == {}


def test_applying_a_deleted_model_again_takes_the_deletion_back() -> None:
    cluster = running()
    cluster.append(DeleteModel("churn"))
    commands = cluster.append(ApplyModel(Raw(spec_json(replicas=TWO))))
    assert kinds(commands) == ["model_accepted", "route_published"]
    cluster.wait(DELETE_LINGER_MS * 2, (("w0", "a"), ("w1", "b")))
    assert {p.state for p in cluster.placement().partitions} == {"assigned"}


def test_a_topic_never_shrinks_even_when_the_model_returns_narrower() -> None:
    cluster = running()
    cluster.append(DeleteModel("churn"))
    cluster.wait(DELETE_LINGER_MS + 500, (("w0", "a"), ("w1", "b")))
    cluster.drain()
    commands = cluster.apply(spec_json(replicas={"min": 1, "max": 1}))
    assert EnsureTopic("churn", "sie.work.churn", 6) in commands
    assert cluster.row("routes", "churn", RouteRow).width == 2


def test_deleting_the_unknown_is_answered_with_the_nearest_name() -> None:
    cluster = running()
    commands = cluster.append(DeleteModel("chrun"))
    assert kinds(commands) == ["delete_ignored"]
    assert "'churn'" in decisions(commands)[0].reason
