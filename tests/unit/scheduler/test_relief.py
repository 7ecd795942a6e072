"""Yielding in the fold: who has less, and who moves, while a pool is full, and that they get it back."""

from __future__ import annotations

from msgspec import structs

from sie_stream.control import InstanceRow, WorkerJoined, WorkerLoad
from sie_stream.ids import instance_id
from sie_stream.loads import ModelLoad
from tests.unit.scheduler.kit import Cluster, decisions, joined, kinds, spec_json

PREMIUM = {"pool": "premium", "cost": "900"}
CHEAP = {"pool": "cheap", "cost": "70"}


def worker(name: str, labels: dict[str, str]) -> WorkerJoined:
    """With room for one replica of 900 MB."""
    return structs.replace(joined(name, f"i-{name}"), labels=labels)


def alive(cluster: Cluster) -> tuple[tuple[str, str], ...]:
    return tuple((one.worker, one.incarnation) for one in cluster.machine.state.workers.values())


def fleet(premium: int, cheap: int = 0) -> Cluster:
    cluster = Cluster()
    cluster.lead()
    for number in range(premium):
        cluster.append(worker(f"p{number}", PREMIUM))
    for number in range(cheap):
        cluster.append(worker(f"c{number}", CHEAP))
    return cluster


def declare(cluster: Cluster, name: str, least: int, most: int, *tags: str) -> None:
    cluster.apply(spec_json(name, memory_mb=900, replicas={"min": least, "max": most}, tags=list(tags)))
    cluster.make_ready(name)


def settle(cluster: Cluster) -> None:
    """Workers do what they are told."""
    for name in list(cluster.machine.state.models):
        cluster.make_ready(name)
        cluster.release(name)


def busy(cluster: Cluster, name: str, seconds: int, waiting: int = 2_000) -> None:
    """Every replica of the model is overloaded for a while."""
    for _ in range(seconds // 2):
        for replica in [r for r in cluster.model(name).replicas if r.state == "ready"]:
            load = ModelLoad(name, 400, 400, waiting, 1, 2_000, 50)
            cluster.append(WorkerLoad(replica.worker, replica.incarnation, 2_000, (load,)))
        cluster.wait(2_000, alive(cluster))
        settle(cluster)


def quiet(cluster: Cluster, seconds: int) -> None:
    for _ in range(seconds // 10):
        cluster.wait(10_000, alive(cluster))
        settle(cluster)


def at(cluster: Cluster, name: str) -> list[str]:
    return sorted(replica.worker for replica in cluster.model(name).replicas)


def test_a_batch_job_gives_up_what_a_high_sla_model_needs_and_gets_it_back() -> None:
    cluster = fleet(5)
    declare(cluster, "report", 1, 3, "batch-job")
    busy(cluster, "report", 120)
    assert len(at(cluster, "report")) == 3
    declare(cluster, "chat", 1, 3, "high-sla")
    busy(cluster, "chat", 40)
    assert len(at(cluster, "chat")) == 3
    assert len(at(cluster, "report")) == 1
    yielded = decisions(cluster.commands, "model_yielded")
    assert yielded
    assert {decision.subject for decision in yielded} == {"report"}
    assert all("above 85 %" in decision.reason or "high-sla models lack" in decision.reason for decision in yielded)
    quiet(cluster, 1_200)
    assert len(at(cluster, "chat")) == 1
    assert "model_restored" in kinds(cluster.commands)
    assert not cluster.machine.state.yielded.caps
    busy(cluster, "report", 120)
    assert len(at(cluster, "report")) == 3


def test_a_batch_job_that_may_sleep_gives_everything() -> None:
    cluster = fleet(2)
    declare(cluster, "report", 0, 1, "batch-job")
    declare(cluster, "chat", 1, 2, "high-sla")
    busy(cluster, "chat", 30)
    assert len(at(cluster, "chat")) == 2
    assert not at(cluster, "report")
    assert cluster.row("instances", instance_id("report"), InstanceRow).status == "asleep"


def test_a_model_that_moved_serves_all_the_time_and_comes_back_when_there_is_room() -> None:
    cluster = fleet(3)
    declare(cluster, "embed", 1, 1, "cost-sensitive")
    declare(cluster, "chat", 1, 2, "high-sla")
    cluster.append(worker("c0", CHEAP))
    cluster.append(worker("c1", CHEAP))
    busy(cluster, "chat", 20)
    moved = [d for d in decisions(cluster.commands, "model_yielded") if d.chosen["step"] == "move"]
    assert [decision.subject for decision in moved] == ["embed"]
    assert "costs 70 instead of 900" in moved[0].reason
    assert [name[0] for name in at(cluster, "embed")] == ["c"]
    quiet(cluster, 1_500)
    back = [d for d in decisions(cluster.commands, "model_restored") if d.chosen["step"] == "return"]
    assert [decision.subject for decision in back] == ["embed"]
    assert [name[0] for name in at(cluster, "embed")] == ["p"]
    quiet(cluster, 60)
    assert not cluster.model("embed").pool, "what is declared is all that holds it again"
    assert "pool" not in cluster.model("embed").rules.node_selector


def test_without_a_label_there_is_no_cheaper_pool() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(worker("p0", {}))
    cluster.append(worker("p1", {"cost": "1"}))
    declare(cluster, "embed", 1, 1, "cost-sensitive")
    declare(cluster, "chat", 1, 1, "high-sla")
    quiet(cluster, 30)
    assert not decisions(cluster.commands, "model_yielded")


def test_that_nobody_can_give_way_is_said_once() -> None:
    cluster = fleet(1)
    declare(cluster, "report", 1, 2, "batch-job")
    declare(cluster, "chat", 1, 1, "high-sla")
    quiet(cluster, 120)
    assert kinds(cluster.commands).count("relief_unmet") == 1
    assert at(cluster, "report") == ["p0"]


def test_a_cost_that_is_no_number_counts_as_that_of_its_kind() -> None:
    cluster = fleet(1)
    cluster.append(worker("x", {"pool": "odd", "cost": "9" * 5_000}))
    cluster.append(worker("y", {"pool": "odder", "cost": "-1"}))
    declare(cluster, "report", 1, 2, "batch-job")
    quiet(cluster, 30)
    assert cluster.model("report").replicas
