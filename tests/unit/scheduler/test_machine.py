"""What the scheduler does about each kind of fact."""

from __future__ import annotations

from msgspec import Raw

from scheduler.limits import DELETE_GIVE_UP_MS, DELETE_LINGER_MS, LOAD_GRACE_MS, REPLACE_AFTER_MS, RETRIES_MAX
from scheduler.state import from_bytes, to_bytes
from sie_stream.control import (
    ApplyModel,
    DeleteModel,
    EnsureTopic,
    FenceWorker,
    InstanceRow,
    ModelRow,
    PartitionReleased,
    ReplicaFailed,
    ReplicaReady,
    RouteRow,
    SchedulerElected,
    Tick,
    TopicEnsured,
    TopicFailed,
    WorkerExited,
    WorkerFenced,
    WorkerHeartbeat,
    WorkerLeft,
)
from sie_stream.ids import instance_id
from tests.unit.scheduler.kit import Cluster, decisions, joined, kinds, spec_json

TWO = {"min": 1, "max": 2}
INSTANCE = instance_id("churn")


def running() -> Cluster:
    """Two workers and a ready model on w0."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    cluster.apply(spec_json(replicas=TWO))
    cluster.make_ready()
    return cluster


# ---------------------------------------------------------------- declarations


def test_apply_makes_the_topic_before_the_route_and_the_placement() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    commands = cluster.append(ApplyModel(Raw(spec_json(replicas=TWO)), actor="ann"))
    assert [c for c in commands if isinstance(c, EnsureTopic)] == [EnsureTopic("churn", "sie.work.churn", 6)]
    assert ("routes", "churn") not in cluster.tables
    assert cluster.row("models", "churn", ModelRow).status == "accepted"
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "pending"
    commands = cluster.append(TopicEnsured("churn", "sie.work.churn", 6))
    assert kinds(commands) == ["replica_placed", "route_published"]
    route = cluster.row("routes", "churn", RouteRow)
    assert (route.width, route.lanes, route.variants[0].version) == (2, 3, "1.0.0")
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "loading"
    assert cluster.placement().partitions == ()
    cluster.make_ready()
    row = cluster.row("instances", INSTANCE, InstanceRow)
    assert row.status == "ready"
    assert list(row.timings_ms) == ["applied", "placed", "loaded", "ready"]
    assert len(cluster.placement().partitions) == 6


def test_a_wrong_declaration_is_rejected_with_its_reason_and_nothing_else_changes() -> None:
    cluster = running()
    before = to_bytes(cluster.machine.state)
    commands = cluster.append(ApplyModel(Raw(spec_json(backend={"name": "sklearn"}, replicas={"min": 3, "max": 1}))))
    assert kinds(commands) == ["model_rejected"]
    assert "replicas" in decisions(commands)[0].reason
    assert decisions(commands)[0].subject == "churn"
    after = from_bytes(to_bytes(cluster.machine.state))
    assert after is not None
    after.next_offset -= 1
    assert to_bytes(after) == before
    commands = cluster.append(ApplyModel(Raw(b"[1]")))
    assert [(d.kind, d.subject) for d in decisions(commands)] == [("model_rejected", "unnamed")]


def test_a_name_that_kafka_confuses_with_another_is_rejected() -> None:
    cluster = running()
    cluster.apply(spec_json("risk.eu"))
    commands = cluster.apply(spec_json("risk_eu"))
    assert kinds(commands) == ["model_rejected"]
    assert "'risk.eu'" in decisions(commands)[0].reason


def test_the_same_declaration_again_changes_nothing() -> None:
    cluster = running()
    commands = cluster.append(ApplyModel(Raw(spec_json(replicas=TWO)), actor="bob"))
    assert kinds(commands) == ["model_unchanged"]
    assert len(commands) == 1


def test_an_unanswered_topic_is_asked_for_again_and_a_failed_one_later() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(ApplyModel(Raw(spec_json())))
    again = [c for c in cluster.wait(16_000) if isinstance(c, EnsureTopic)]
    assert len(again) == 1
    commands = cluster.append(TopicFailed("churn", "sie.work.churn", "policy says no."))
    assert kinds(commands) == ["topic_failed"]
    assert "policy says no" in cluster.row("instances", INSTANCE, InstanceRow).message
    assert not any(isinstance(c, EnsureTopic) for c in cluster.wait(750))
    assert any(isinstance(c, EnsureTopic) for c in cluster.wait(500))
    cluster.append(TopicEnsured("churn", "sie.work.churn", 3))
    assert ("routes", "churn") in cluster.tables


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


def test_a_deleted_model_that_no_device_can_hold_waits_for_one_but_not_for_ever() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(memory_mb=5_000))
    cluster.append(DeleteModel("churn"))
    cluster.wait(DELETE_GIVE_UP_MS, (("w0", "a"),))
    assert "churn" in cluster.machine.state.models
    cluster.wait(DELETE_LINGER_MS + 500, (("w0", "a"),))
    assert "churn" not in cluster.machine.state.models
    assert decisions(cluster.commands, "model_deleted")[0].chosen["partitions_left"] == "0, 1, 2"


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


# ---------------------------------------------------------------- workers


def test_a_silent_worker_is_fenced_before_its_partitions_move() -> None:
    cluster = running()
    cluster.apply(spec_json("risk", replicas=TWO))
    cluster.make_ready("risk")
    commands = cluster.wait(2_500, (("w1", "b"),))
    fences = [c for c in commands if isinstance(c, FenceWorker)]
    assert fences == [FenceWorker("w0", "a")]
    assert "worker_lost" in kinds(commands)
    assert set(cluster.owners().values()) == {"w0"}, "not before the fence"
    assert [r.worker for r in cluster.placement().replicas] == ["w1"], "the replacement loads meanwhile"
    cluster.make_ready(only="w1")
    assert set(cluster.owners().values()) == {"w0"}
    commands = cluster.append(WorkerFenced("w0", "a", 80))
    assert set(cluster.owners().values()) == {"w1"}
    assert kinds(commands) == ["worker_fenced", "partitions_assigned"]
    epochs = {p.placement_epoch for p in cluster.placement().partitions}
    assert epochs == {cluster.log[-1][0]}, "the epoch is the offset of the fence"


def test_an_exit_report_starts_the_fence_at_once() -> None:
    cluster = running()
    commands = cluster.append(WorkerExited("w0", "a", -9, "up"))
    assert [c for c in commands if isinstance(c, FenceWorker)] == [FenceWorker("w0", "a")]
    assert set(cluster.owners().values()) == {"w0"}
    assert cluster.append(WorkerExited("w0", "a", -9, "up")) == [], "a second report changes nothing"


def test_another_ready_replica_takes_over_on_the_fence_and_the_lost_one_is_awaited() -> None:
    cluster = Cluster()
    cluster.lead()
    for worker in ("w0", "w1", "w2"):
        cluster.append(joined(worker, "a"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    cluster.fence(cluster.append(WorkerExited("w0", "a", 1, "up")))
    assert set(cluster.owners().values()) == {"w1"}
    assert "replacement_deferred" in kinds(cluster.commands)
    assert [r.worker for r in cluster.placement().replicas] == ["w1"]
    cluster.append(joined("w0", "b"))
    assert [(r.worker, r.incarnation) for r in cluster.placement().replicas] == [("w1", "a"), ("w0", "b")]


def test_a_worker_that_does_not_come_back_is_replaced() -> None:
    cluster = Cluster()
    cluster.lead()
    for worker in ("w0", "w1", "w2"):
        cluster.append(joined(worker, "a"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    cluster.fence(cluster.append(WorkerExited("w0", "a", 1, "up")))
    cluster.wait(REPLACE_AFTER_MS + 500, (("w1", "a"), ("w2", "a")))
    assert [r.worker for r in cluster.placement().replicas] == ["w1", "w2"]


def test_a_new_incarnation_frees_what_the_old_one_had() -> None:
    cluster = running()
    commands = cluster.append(joined("w0", "a2"))
    assert kinds(commands)[:2] == ["worker_replaced", "worker_joined"]
    assert cluster.owners() == {}
    assert [(r.worker, r.incarnation) for r in cluster.placement().replicas] == [("w0", "a2")]
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w0"}
    assert not any(isinstance(c, FenceWorker) for c in commands)


def test_a_clean_stop_needs_no_fence() -> None:
    cluster = running()
    commands = cluster.append(WorkerLeft("w0", "a"))
    assert not any(isinstance(c, FenceWorker) for c in commands)
    assert [r.worker for r in cluster.placement().replicas] == ["w1"]
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w1"}


def test_a_worker_that_gives_back_unasked_gets_nothing_any_more() -> None:
    cluster = running()
    epoch = cluster.model().partitions[0].epoch
    commands = cluster.append(PartitionReleased("w0", "a", "churn", 0, epoch, 5))
    assert "worker_stopping" in kinds(commands)
    assert 0 not in cluster.owners()
    cluster.release()
    cluster.apply(spec_json("risk"))
    assert [r.worker for r in cluster.placement("risk").replicas] == ["w1"]
    cluster.append(WorkerLeft("w0", "a"))
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w1"}


def test_facts_of_the_past_are_counted_and_ignored() -> None:
    cluster = running()
    cluster.append(joined("w0", "a2"))
    state = cluster.machine.state
    before = state.facts_ignored
    epoch = cluster.placement().replicas[0].placement_epoch
    for fact in (
        WorkerHeartbeat("w0", "a"),
        WorkerHeartbeat("nobody", "x"),
        WorkerExited("w0", "a", 1, "up"),
        WorkerFenced("w0", "a", 10),
        WorkerLeft("w0", "a"),
        ReplicaReady("w0", "a", "churn", "1.0.0", epoch, 1, 1, 1),
        ReplicaFailed("w0", "a", "churn", "1.0.0", epoch, "x", "y"),
        ReplicaReady("w0", "a2", "churn", "1.0.0", epoch - 1, 1, 1, 1),
        PartitionReleased("w0", "a", "churn", 0, 1, 1),
        PartitionReleased("w0", "a2", "churn", 99, 1, 1),
        joined("w0", "a"),
        joined("w0", "a2"),
        TopicFailed("churn", "sie.work.churn", "late"),
        TopicEnsured("gone", "sie.work.gone", 3),
    ):
        assert cluster.append(fact) == [], fact
    assert state.facts_ignored == before + 14
    assert state.workers["w0"].status == "live"


def test_a_late_heartbeat_does_not_bring_a_lost_worker_back() -> None:
    cluster = running()
    cluster.append(WorkerExited("w0", "a", 1, "up"))
    cluster.append(WorkerHeartbeat("w0", "a"))
    assert cluster.machine.state.workers["w0"].status == "lost"


def test_an_unanswered_fence_is_asked_for_again() -> None:
    cluster = running()
    cluster.append(WorkerExited("w0", "a", 1, "up"))
    again = [c for c in cluster.wait(cluster.settings.fence_timeout_ms + 500) if isinstance(c, FenceWorker)]
    assert again.count(FenceWorker("w0", "a")) == 1


def test_a_new_leader_asks_again_on_its_first_tick_and_ticks_of_the_old_one_do_not_count() -> None:
    cluster = running()
    cluster.append(WorkerExited("w0", "a", 1, "up"))
    cluster.append(ApplyModel(Raw(spec_json("risk"))))
    cluster.append(SchedulerElected("s1"))
    assert cluster.append(Tick("s0")) == []
    commands = cluster.append(Tick("s1"))
    assert FenceWorker("w0", "a") in commands
    assert EnsureTopic("risk", "sie.work.risk", 3) in commands
    assert cluster.append(Tick("s1")) == []


def test_nobody_is_fenced_because_the_log_stood_still() -> None:
    cluster = running()
    alive = (("w0", "a"), ("w1", "b"))
    cluster.wait(2_000, alive)
    cluster.now_ms += 30_000  # no broker, so no ticks and no heartbeats
    assert cluster.append(Tick("s0")) == []
    cluster.wait(5_000)
    assert all(worker.status == "live" for worker in cluster.machine.state.workers.values()), "time to reconnect"
    cluster.wait(500, alive)
    cluster.wait(15_000)
    assert all(worker.status == "lost" for worker in cluster.machine.state.workers.values())


def test_a_leader_that_stalls_again_and_again_still_finds_the_dead() -> None:
    cluster = running()
    for _ in range(12):
        cluster.now_ms += 1_500
        cluster.append(WorkerHeartbeat("w1", "b"))
        cluster.append(Tick("s0"))
    assert cluster.machine.state.workers["w0"].status == "lost"
    assert cluster.machine.state.workers["w1"].status == "live"


# ---------------------------------------------------------------- replicas


def fail(cluster: Cluster, name: str = "churn") -> None:
    replica = next(replica for replica in cluster.model(name).replicas if replica.state == "loading")
    version = cluster.model(name).launches[replica.generation].version
    cluster.append(
        ReplicaFailed(
            replica.worker, replica.incarnation, name, version, replica.placement_epoch, "weights_missing", "no file."
        )
    )


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
