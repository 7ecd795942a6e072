"""Cordon, drain, uncordon: out of service and back, new before old."""

from __future__ import annotations

from scheduler.leaving import leaves_because
from scheduler.state import ReplicaState
from sie_stream.control import CordonWorker, DrainWorker, InstanceRow, UncordonWorker, WorkerExited, WorkerLeft
from tests.unit.scheduler.kit import INSTANCE, Cluster, decisions, joined, kinds, running, spec_json

ALIVE = (("w0", "a"), ("w1", "b"))


def replicas(cluster: Cluster) -> list[tuple[str, str]]:
    def place(replica: ReplicaState) -> tuple[str, str]:
        return replica.worker, replica.state

    return [place(replica) for replica in cluster.model().replicas]


def test_nothing_new_is_placed_on_a_cordoned_worker_and_what_runs_there_stays() -> None:
    cluster = running()
    commands = cluster.append(CordonWorker("w0", "ana"))
    assert kinds(commands) == ["worker_cordoned"]
    assert decisions(commands)[0].chosen == {"actor": "ana", "replicas": 1, "partitions": 6}
    for name in ("one", "two", "three"):
        cluster.apply(spec_json(name))
        assert [replica.worker for replica in cluster.model(name).replicas] == ["w1"]
    assert replicas(cluster) == [("w0", "ready")]


def test_a_drained_worker_serves_until_the_replacement_is_ready() -> None:
    cluster = running()
    commands = cluster.append(DrainWorker("w0", "ana"))
    assert kinds(commands) == ["worker_draining", "replica_placed"]
    assert replicas(cluster) == [("w0", "ready"), ("w1", "loading")]
    assert set(cluster.owners().values()) == {"w0"}
    cluster.make_ready()
    assert replicas(cluster) == [("w0", "draining"), ("w1", "ready")]
    cluster.release(most=5)
    assert not decisions(cluster.commands, "worker_drained")
    cluster.release()
    assert replicas(cluster) == [("w1", "ready")]
    assert set(cluster.owners().values()) == {"w1"}
    assert decisions(cluster.commands, "worker_drained")[0].subject == "w0"


def test_the_cordon_outlives_the_restart_it_was_made_for() -> None:
    cluster = running()
    cluster.append(DrainWorker("w0", "ana"))
    cluster.make_ready()
    cluster.release()
    cluster.append(WorkerLeft("w0", "a"))
    cluster.append(joined("w0", "a2"))
    cluster.apply(spec_json("one"))
    assert [replica.worker for replica in cluster.model("one").replicas] == ["w1"]
    assert kinds(cluster.append(UncordonWorker("w0", "ana"))) == ["worker_uncordoned"]
    cluster.apply(spec_json("two"))
    assert [replica.worker for replica in cluster.model("two").replicas] == ["w0"]


def test_without_room_elsewhere_a_lone_replica_stays_and_the_reason_is_said() -> None:
    cluster = running()
    cluster.append(CordonWorker("w1", "ana"))
    commands = cluster.append(DrainWorker("w0", "ana"))
    assert kinds(commands) == ["worker_draining", "replica_unplaceable"]
    cluster.wait(60_000, ALIVE)
    assert replicas(cluster) == [("w0", "ready")]
    assert set(cluster.owners().values()) == {"w0"}
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "degraded"
    assert kinds(cluster.append(UncordonWorker("w0", "ana")))[0] == "worker_uncordoned"
    assert replicas(cluster) == [("w0", "ready")]
    assert cluster.row("instances", INSTANCE, InstanceRow).status == "ready"
    assert cluster.row("instances", INSTANCE, InstanceRow).message == ""


def test_one_of_two_replicas_goes_when_there_is_no_third_worker() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    cluster.append(DrainWorker("w0", "ana"))
    cluster.release()
    assert replicas(cluster) == [("w1", "ready")]
    assert set(cluster.owners().values()) == {"w1"}
    assert decisions(cluster.commands, "worker_drained")


def test_a_drain_taken_back_keeps_the_old_replica_and_lets_the_new_one_go() -> None:
    cluster = running()
    cluster.append(DrainWorker("w0", "ana"))
    cluster.append(UncordonWorker("w0", "ana"))
    assert replicas(cluster) == [("w0", "ready")]
    cluster.make_ready()
    assert set(cluster.owners().values()) == {"w0"}


def test_wrong_names_and_repeated_orders_are_answered() -> None:
    cluster = running()
    unknown = decisions(cluster.append(CordonWorker("w9", "ana")))
    assert unknown[0].kind == "maintenance_ignored"
    assert "Known: w0, w1" in unknown[0].reason
    cluster.append(CordonWorker("w0", "ana"))
    assert kinds(cluster.append(CordonWorker("w0", "ana"))) == ["maintenance_ignored"]
    assert kinds(cluster.append(UncordonWorker("w1", "ana"))) == ["maintenance_ignored"]


def test_an_empty_worker_is_drained_at_once() -> None:
    cluster = running()
    assert kinds(cluster.append(DrainWorker("w1", "ana"))) == ["worker_draining", "worker_drained"]


def test_a_drain_may_be_asked_for_again_while_it_lasts_and_when_it_is_over() -> None:
    cluster = running()
    cluster.append(DrainWorker("w0", "ana"))
    assert kinds(cluster.append(DrainWorker("w0", "bob"))) == ["worker_draining"]
    cluster.make_ready()
    cluster.release()
    again = decisions(cluster.append(DrainWorker("w0", "bob")))
    assert [decision.kind for decision in again] == ["worker_drained"]
    assert "since ana asked for it" in again[0].reason


def test_only_a_drained_worker_is_given_as_the_reason_why_a_replica_leaves() -> None:
    cluster = running()
    state, model = cluster.machine.state, cluster.model()
    cluster.append(CordonWorker("w0", "ana"))
    assert leaves_because(state, model, model.replicas[0]) == "1 replica is wanted"
    cluster.append(DrainWorker("w0", "ana"))
    assert leaves_because(state, model, model.replicas[0]) == "w0 is being drained"


def two_of_three() -> Cluster:
    """Replicas on w0 and w1, and a free w2."""
    cluster = Cluster()
    cluster.lead()
    for worker in ("w0", "w1", "w2"):
        cluster.append(joined(worker, "a"))
    cluster.apply(spec_json(replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    return cluster


def test_a_lost_worker_that_is_cordoned_is_not_awaited() -> None:
    cluster = two_of_three()
    cluster.append(CordonWorker("w0", "ana"))
    cluster.fence(cluster.append(WorkerExited("w0", "a", 1, "up")))
    assert not decisions(cluster.commands, "replacement_deferred")
    assert replicas(cluster) == [("w1", "ready"), ("w2", "loading")]


def test_a_lost_worker_is_awaited_no_more_once_it_is_out_of_service() -> None:
    for order in (CordonWorker("w0", "ana"), DrainWorker("w0", "ana")):
        cluster = two_of_three()
        cluster.fence(cluster.append(WorkerExited("w0", "a", 1, "up")))
        assert decisions(cluster.commands, "replacement_deferred")
        assert replicas(cluster) == [("w1", "ready")]
        assert "replica_placed" in kinds(cluster.append(order))
        assert replicas(cluster) == [("w1", "ready"), ("w2", "loading")]


def test_a_drain_that_ends_with_the_loss_of_its_worker_says_so() -> None:
    cluster = running()
    cluster.append(DrainWorker("w0", "ana"))
    cluster.fence(cluster.append(WorkerExited("w0", "a", 1, "up")))
    [drained] = decisions(cluster.commands, "worker_drained")
    assert "taken from it, not handed over" in drained.reason
    assert "without anybody noticing" not in drained.reason
