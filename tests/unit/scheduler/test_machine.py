"""What the scheduler does about each kind of fact."""

from __future__ import annotations

from msgspec import Raw

from scheduler.life import STEPS
from scheduler.limits import REPLACE_AFTER_MS
from scheduler.state import from_bytes, to_bytes
from sie_stream.control import (
    ApplyModel,
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
from tests.unit.scheduler.kit import INSTANCE, TWO, Cluster, decisions, joined, kinds, running, spec_json

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
    assert set(row.timings_ms) == set(STEPS) - {"first_answer"}
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


def test_the_next_owner_of_a_partition_is_told_where_its_running_requests_are() -> None:
    cluster = running()
    epoch = cluster.model().partitions[0].epoch
    cluster.append(PartitionReleased("w0", "a", "churn", 0, epoch, 5, images_at="here:1#x"))
    cluster.append(WorkerLeft("w0", "a"))
    cluster.make_ready()
    told = {one.partition: (one.worker, one.images_at) for one in cluster.placement().partitions}
    assert told.pop(0) == ("w1", "here:1#x")
    assert set(told.values()) == {("w1", "")}


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
