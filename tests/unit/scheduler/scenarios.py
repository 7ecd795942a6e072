"""The recorded histories, as code: `python -m tests.unit.scheduler.scenarios` writes them again.

A history is the log of one scenario and the decisions that were made about it. A test folds the log and demands the
same decisions, so every change of behaviour shows as a changed file, and is reviewed as one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from sie_stream.commands import RolloutOrder, StartRollout
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    Decision,
    DeleteModel,
    EngineLost,
    EnsureTopic,
    ReplicaFailed,
    TopicEnsured,
    WorkerExited,
)
from sie_stream.engine_facts import EngineModel
from sie_stream.rollout_records import VariantWindow
from tests.unit.scheduler.kit import Cluster, decisions, joined, spec_json
from tests.unit.scheduler.rolling import ALIVE, QUICK, UNIT, WINDOW_MS, Rolling, answered

FOLDER = Path(__file__).parent / "histories"
TWO = {"min": 1, "max": 2}


class Entry(Struct, frozen=True):
    offset: int
    at_ms: int
    record: ClusterRecord


class History(Struct, frozen=True):
    about: str
    log: tuple[Entry, ...]
    decisions: tuple[Decision, ...]


def two_workers() -> Cluster:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    return cluster


def apply() -> Cluster:
    """A model is applied, placed, loaded and served; a second one spreads to the other worker."""
    cluster = two_workers()
    cluster.apply(spec_json(replicas=TWO))
    cluster.wait(250, (("w0", "a"), ("w1", "b")))
    cluster.make_ready()
    cluster.apply(spec_json("risk", memory_mb=200))
    cluster.make_ready("risk")
    cluster.apply(spec_json("huge", memory_mb=5_000))
    return cluster


def worker_killed() -> Cluster:
    """One of two workers dies: fenced, its model loads elsewhere meanwhile, its partitions follow the fence."""
    cluster = two_workers()
    cluster.apply(spec_json(replicas=TWO))
    cluster.apply(spec_json("risk", replicas={"min": 2, "max": 2}))
    cluster.make_ready()
    cluster.make_ready("risk")
    cluster.wait(500, (("w0", "a"), ("w1", "b")))
    lost = cluster.append(WorkerExited("w0", "a", -9, "supervisor"))
    cluster.now_ms += 40
    cluster.make_ready()
    cluster.now_ms += 60
    cluster.fence(lost)
    cluster.wait(500, (("w1", "b"),))
    cluster.append(joined("w0", "c"))
    cluster.make_ready("risk")
    cluster.release("risk")
    return cluster


def engine_killed() -> Cluster:
    """An engine is killed for memory three times: its model is shown as loading meanwhile, and moves in the end."""
    cluster = two_workers()
    alive = (("w0", "a"), ("w1", "b"))
    cluster.apply(spec_json(replicas=TWO))
    cluster.make_ready()
    for number in range(3):
        cluster.wait(500, alive)
        (replica,) = cluster.model().replicas
        loaded = (EngineModel("churn", "1.0.0", replica.placement_epoch),)
        at = (replica.worker, replica.incarnation, replica.device)
        cluster.append(EngineLost(*at, "sklearn", "SIGKILL (out of memory)", loaded, 1, (f"r{number}",)))
        cluster.now_ms += 800
        cluster.make_ready()
    cluster.wait(1_000, alive)
    cluster.make_ready()
    cluster.release()
    return cluster


def worker_paused() -> Cluster:
    """A worker falls silent without a word: ticks notice, and it comes back as a new incarnation."""
    cluster = two_workers()
    cluster.apply(spec_json(replicas=TWO))
    cluster.make_ready()
    cluster.fence(cluster.wait(2_750, (("w1", "b"),)))
    cluster.make_ready()
    cluster.append(joined("w0", "c"))
    return cluster


def new_version() -> Cluster:
    """Version 2 is placed beside version 1, takes the partitions over by release, and version 1 is retired."""
    cluster = two_workers()
    cluster.apply(spec_json(replicas=TWO))
    cluster.make_ready()
    cluster.apply(spec_json(version="2.0.0", replicas=TWO))
    cluster.wait(250, (("w0", "a"), ("w1", "b")))
    cluster.make_ready()
    cluster.release(most=2)
    cluster.wait(250, (("w0", "a"), ("w1", "b")))
    cluster.release()
    return cluster


def new_version_without_room() -> Cluster:
    """Both versions do not fit: the old one is released first."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(memory_mb=700))
    cluster.make_ready()
    cluster.apply(spec_json(version="2.0.0", memory_mb=800))
    cluster.release()
    cluster.make_ready()
    return cluster


def rejected() -> Cluster:
    """Wrong declarations: each is refused with its reason, and the model that serves goes on."""
    cluster = two_workers()
    cluster.apply(spec_json())
    cluster.make_ready()
    cluster.append(ApplyModel(Raw(spec_json(replicas={"min": 3, "max": 1})), actor="ann"))
    cluster.append(ApplyModel(Raw(spec_json(service_type="scorring")), actor="ann"))
    cluster.append(ApplyModel(Raw(b'{"name": "empty"}'), actor="ann"))
    cluster.append(ApplyModel(Raw(spec_json()), actor="ann"))
    return cluster


def failing_replica() -> Cluster:
    """A replica fails on each device, is retried with growing pauses, and is given up."""
    cluster = two_workers()
    alive = (("w0", "a"), ("w1", "b"))
    cluster.apply(spec_json())
    for attempt in range(4):
        (replica,) = cluster.model().replicas
        cluster.append(
            ReplicaFailed(
                replica.worker,
                replica.incarnation,
                "churn",
                "1.0.0",
                replica.placement_epoch,
                "weights_missing",
                "no weights at /models/churn.",
            )
        )
        cluster.wait(1_000 * 2**attempt, alive)
    return cluster


def deleted() -> Cluster:
    """A model is deleted: its route at once, the rest after its topic was worked off."""
    cluster = two_workers()
    cluster.apply(spec_json(replicas=TWO))
    cluster.make_ready()
    cluster.append(DeleteModel("churn", actor="ann"))
    cluster.wait(5_250, (("w0", "a"), ("w1", "b")))
    cluster.drain()
    return cluster


def rollout_completed() -> Cluster:
    """A good version goes through all its steps, and the model takes it over."""
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    while cluster.model().rollouts and cluster.model().rollouts["canary"].phase == "serving":
        cluster.windows()
        cluster.make_ready(UNIT)
    cluster.make_ready()
    cluster.release()
    cluster.wait(250, ALIVE)
    return cluster


def rollout_rolled_back() -> Cluster:
    """A version whose scores drift loses its keys in the step of the verdict."""
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.windows()
    cluster.windows(new=answered(200, score=0.7))
    return cluster


def rollout_refused() -> Cluster:
    """A breaking schema starts nothing; wrong golden answers end it before any traffic."""
    cluster = Rolling()
    schema = {"type": "object", "properties": {"age": {"type": "integer"}, "x": {"type": "number"}}, "required": ["x"]}
    cluster.roll(input_schema=schema)
    cluster.roll()
    [replica] = cluster.model(UNIT).replicas
    told = "golden[0]: score: 0.4 instead of 0.2"
    epoch = replica.placement_epoch
    cluster.append(ReplicaFailed(replica.worker, "i0", UNIT, "2.0.0", epoch, "golden_mismatch", told))
    return cluster


def rollout_without_statistics() -> Cluster:
    """The statistics stop: it holds, and goes on when they come again."""
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.wait(13_000, ALIVE)
    cluster.windows(2)
    return cluster


def rollout_ordered() -> Cluster:
    """People pause, resume, promote and take back."""
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    for order in ("pause", "resume", "promote"):
        cluster.append(RolloutOrder("churn", order, actor="ada"))
    cluster.make_ready()
    cluster.release()
    cluster.append(RolloutOrder("churn", "undo", actor="ada"))
    cluster.make_ready()
    cluster.release()
    cluster.roll("3.0.0")
    cluster.append(RolloutOrder("churn", "abort", actor="ada"))
    return cluster


def rollout_shadowed() -> Cluster:
    """A version gets copies first, and answers once they passed."""
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, "shadow": True})
    cluster.make_ready(UNIT)
    cluster.windows(2)
    return cluster


def rollout_of_several_variants() -> Cluster:
    """Two versions are compared at fixed shares beside the stable one; a breach ends one of them."""
    cluster = Rolling()
    for version, variant, share in (("1.1.0", "b", 3_000), ("1.2.0", "c", 1_000)):
        for command in cluster.append(StartRollout(Raw(spec_json(version=version)), variant, share, "ada")):
            if isinstance(command, EnsureTopic):
                cluster.append(TopicEnsured(command.model, command.topic, command.partitions))
        cluster.make_ready(f"churn.{variant.upper()}")
    cluster.windows(new=answered(80, failed=20))
    return cluster


def rollout_taken_back_while_adopting() -> Cluster:
    """All keys go to it and the model takes it over; then it fails, and the old replicas still serve."""
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, "steps": [100]})
    cluster.make_ready(UNIT)
    cluster.windows()
    cluster.windows(new=answered(80, failed=20))
    cluster.make_ready()
    cluster.wait(250, ALIVE)
    return cluster


def rollout_given_up() -> Cluster:
    """Its replicas die more often than they are tried again; the stable version works its topic off."""
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    for _ in range(5):
        for replica in list(cluster.model(UNIT).replicas):
            epoch = replica.placement_epoch
            cluster.append(ReplicaFailed(replica.worker, "i0", UNIT, "2.0.0", epoch, "engine_died", "SIGSEGV"))
        cluster.wait(10_000, ALIVE)
    cluster.make_ready(UNIT)
    cluster.wait(6_000, ALIVE)
    cluster.drain_unit(UNIT)
    return cluster


def rollout_silent() -> Cluster:
    """A version hangs while the stable one answers: it holds, and goes on with its next answers."""
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, "hold_ms": 16_000})
    cluster.make_ready(UNIT)
    cluster.windows(new=answered(150))
    for _ in range(8):
        start_ms = cluster.now_ms
        cluster.wait(WINDOW_MS, ALIVE)
        cluster.append(VariantWindow("churn", "stable", "1.0.0", start_ms, cluster.now_ms, True, answered(400)))
    cluster.windows()
    return cluster


def rollout_bypassed() -> Cluster:
    """The worker of a version's only replica dies: the stable version answers its keys until it is back."""
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    [replica] = cluster.model(UNIT).replicas
    cluster.append(WorkerExited(replica.worker, replica.incarnation, -9, "supervisor"))
    cluster.fence(cluster.commands)
    cluster.wait(500, tuple(one for one in ALIVE if one[0] != replica.worker))
    cluster.make_ready(UNIT)
    return cluster


SCENARIOS: dict[str, Callable[[], Cluster]] = {
    made.__name__: made
    for made in (
        apply,
        worker_killed,
        engine_killed,
        worker_paused,
        new_version,
        new_version_without_room,
        rejected,
        failing_replica,
        deleted,
        rollout_completed,
        rollout_rolled_back,
        rollout_refused,
        rollout_without_statistics,
        rollout_ordered,
        rollout_shadowed,
        rollout_of_several_variants,
        rollout_taken_back_while_adopting,
        rollout_given_up,
        rollout_silent,
        rollout_bypassed,
    )
}


def recorded(name: str) -> History:
    cluster = SCENARIOS[name]()
    return History(
        about=SCENARIOS[name].__doc__ or "",
        log=tuple(Entry(offset, at_ms, record) for offset, at_ms, record in cluster.log),
        decisions=tuple(decisions(cluster.commands)),
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in SCENARIOS:
        text = msgspec.json.format(msgspec.json.encode(recorded(name)), indent=1)
        (FOLDER / f"{name}.json").write_bytes(text + b"\n")


if __name__ == "__main__":
    main()
