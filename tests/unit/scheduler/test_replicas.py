"""What the scheduler does about replicas that fail, wait for room, or follow a new version."""

from __future__ import annotations

from msgspec import Raw

from scheduler.limits import DELETE_LINGER_MS, LOAD_GRACE_MS, RETRIES_MAX
from sie_stream.control import (
    ApplyModel,
    DeleteModel,
    EnsureTopic,
    InstanceRow,
    RouteRow,
    TopicEnsured,
)
from tests.unit.scheduler.kit import INSTANCE, TWO, Cluster, decisions, fail, joined, kinds, running, spec_json

# ---------------------------------------------------------------- replicas


def test_a_failed_replica_is_retried_elsewhere_and_then_given_up() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    alive = (("w0", "a"), ("w1", "b"))
    cluster.apply(spec_json())
    tried: list[str] = []
    for attempt in range(RETRIES_MAX + 1):
        tried.append(cluster.model().replicas[0].worker)
        fail(cluster)
        assert cluster.model().replicas == [], "backoff"
        cluster.wait(1_000 * 2**attempt, alive)
    assert tried[:2] == ["w0", "w1"]
    assert len(tried) == 4
    cluster.wait(60_000, alive)
    assert cluster.model().replicas == []
    row = cluster.row("instances", INSTANCE, InstanceRow)
    assert row.status == "degraded"
    assert "weights_missing: no file." in row.message
    assert "Given up" in decisions(cluster.commands, "replica_failed")[-1].reason
    commands = cluster.append(ApplyModel(Raw(spec_json())))
    assert kinds(commands) == ["model_accepted", "replica_placed"]
    cluster.make_ready()
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "ready"


def test_a_replica_that_never_answers_has_failed() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json())
    cluster.wait(cluster.settings.load_timeout_ms + LOAD_GRACE_MS - 250, (("w0", "a"),))
    assert not decisions(cluster.commands, "replica_failed")
    cluster.wait(500, (("w0", "a"),))
    assert decisions(cluster.commands, "replica_failed")[0].chosen["code"] == "load_timeout"
    cluster.wait(2_000, (("w0", "a"),))
    assert len(cluster.model().replicas) == 1


def test_a_worker_that_gets_on_with_a_long_queue_of_loads_is_not_blamed() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    for name in ("first", "second", "third"):
        cluster.apply(spec_json(name))
    for name in ("first", "second", "third"):
        cluster.wait(cluster.settings.load_timeout_ms - 1_000, (("w0", "a"),))
        cluster.make_ready(name)
    assert not decisions(cluster.commands, "replica_failed")


def test_one_ready_replica_does_not_hide_why_the_others_are_missing() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    (unplaceable,) = decisions(cluster.commands, "replica_unplaceable")
    cluster.make_ready()
    row = cluster.row("instances", INSTANCE, InstanceRow)
    assert (row.status, row.message) == ("degraded", f"no device can hold it: {unplaceable.rejected[0]}")
    cluster.append(joined("w1", "b"))
    cluster.make_ready()
    row = cluster.row("instances", INSTANCE, InstanceRow)
    assert (row.status, row.message) == ("ready", "")


def test_a_replica_that_loads_does_not_stand_for_one_without_a_place() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    cluster.apply(spec_json(replicas={"min": 3, "max": 3}))
    seen: list[str] = []
    for worker in ("w0", "w1"):
        cluster.make_ready(only=worker)
        seen.append(cluster.row("instances", INSTANCE, InstanceRow).status)
    assert seen == ["degraded", "degraded"], "what `apply` waits for must not depend on which loads first"
    cluster.append(joined("w2", "c"))
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "ready"


def test_a_model_without_room_says_why_once_and_is_placed_when_there_is_some() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.apply(spec_json(memory_mb=5_000))
    cluster.append(joined("w0", "a"))
    unplaceable = decisions(cluster.commands, "replica_unplaceable")
    assert [d.rejected[0] for d in unplaceable] == [
        "no live worker offers a device.",
        "w0/cpu0: needs 5242880000 bytes, the whole device has 1048576000.",
    ]
    cluster.wait(10_000, (("w0", "a"),))
    assert len(decisions(cluster.commands, "replica_unplaceable")) == 2
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "pending"
    cluster.append(joined("w1", "b", memory_mb=6_000))
    assert [r.worker for r in cluster.placement().replicas] == ["w1"]


def test_freed_memory_goes_to_whoever_waits() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json("big", memory_mb=900))
    cluster.make_ready("big")
    cluster.apply(spec_json("late", memory_mb=900))
    assert cluster.model("late").replicas == []
    cluster.append(DeleteModel("big"))
    cluster.wait(DELETE_LINGER_MS + 500, (("w0", "a"),))
    cluster.drain("big")
    assert [r.worker for r in cluster.placement("late").replicas] == ["w0"]


# ---------------------------------------------------------------- new versions


def test_a_new_version_takes_over_by_release_new_before_old() -> None:
    cluster = running()
    old_epoch = cluster.model().partitions[0].epoch
    cluster.apply(spec_json(version="2.0.0", replicas=TWO))
    assert [r.launch.version for r in cluster.placement().replicas] == ["1.0.0", "2.0.0"]
    assert cluster.row("routes", "churn", RouteRow).variants[0].version == "1.0.0", "the old one is still in charge"
    assert set(cluster.owners().values()) == {"w0"}
    cluster.make_ready()
    assert cluster.row("routes", "churn", RouteRow).variants[0].version == "2.0.0"
    assert {p.state for p in cluster.placement().partitions} == {"releasing"}
    assert [r.state for r in cluster.row("instances", INSTANCE, InstanceRow).replicas] == ["draining", "ready"]
    assert cluster.release(most=3) == 3
    assert sorted(set(cluster.owners().values())) == ["w0", "w1"]
    cluster.release()
    assert [r.launch.version for r in cluster.placement().replicas] == ["2.0.0"], "the old one is unlisted"
    assert all(p.placement_epoch > old_epoch for p in cluster.placement().partitions)
    assert list(cluster.model().launches) == [2]


def test_a_new_version_that_fails_leaves_the_old_one_in_charge() -> None:
    cluster = running()
    cluster.apply(spec_json(version="2.0.0", replicas=TWO))
    for attempt in range(RETRIES_MAX + 1):
        fail(cluster)
        cluster.wait(1_000 * 2**attempt, (("w0", "a"), ("w1", "b")))
    assert cluster.row("routes", "churn", RouteRow).variants[0].version == "1.0.0"
    assert {p.state for p in cluster.placement().partitions} == {"assigned"}
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "degraded"


def test_without_room_for_both_the_old_version_is_released_first() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(memory_mb=700))
    cluster.make_ready()
    commands = cluster.apply(spec_json(version="2.0.0", memory_mb=800))
    assert "replica_draining" in kinds(commands)
    assert "does not fit beside" in decisions(commands, "replica_draining")[0].reason
    assert {p.state for p in cluster.placement().partitions} == {"releasing"}
    cluster.release()
    assert [r.launch.version for r in cluster.placement().replicas] == ["2.0.0"]
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w0"}


def test_a_new_version_that_can_never_fit_does_not_cost_the_old_one() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(memory_mb=700))
    cluster.make_ready()
    commands = cluster.apply(spec_json(version="2.0.0", memory_mb=1_800))
    assert "replica_unplaceable" in kinds(commands)
    assert {p.state for p in cluster.placement().partitions} == {"assigned"}


def test_a_wider_version_gets_its_partitions_before_its_route() -> None:
    cluster = running()
    commands = cluster.append(ApplyModel(Raw(spec_json(version="2.0.0", replicas={"min": 2, "max": 4}))))
    assert EnsureTopic("churn", "sie.work.churn", 12) in commands
    cluster.append(TopicEnsured("churn", "sie.work.churn", 12))
    cluster.make_ready()
    cluster.release()
    assert cluster.row("routes", "churn", RouteRow).width == 4
    assert len(cluster.owners()) == 12
    counts = sorted(list(cluster.owners().values()).count(worker) for worker in ("w0", "w1"))
    assert counts == [6, 6]


def test_a_second_replica_takes_half_by_release() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    assert len(cluster.owners()) == 6
    cluster.append(joined("w1", "b"))
    cluster.make_ready()
    assert cluster.release() == 3
    assert sorted(cluster.owners().values()) == ["w0"] * 3 + ["w1"] * 3
