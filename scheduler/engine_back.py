"""Replicas whose engine had ended (see engines.py) serve again, and with the last of them the engine is back."""

from __future__ import annotations

from scheduler.evidence import resumed, seat
from scheduler.state import ClusterState, ModelState, ReplicaState
from scheduler.step import Step
from sie_stream.control import ModelLaunch, ReplicaReady


def engine_key(device: str, backend: str, domain: str) -> str:
    return f"{device}/{backend}/{domain}" if domain else f"{device}/{backend}"


def words(backend: str, domain: str) -> str:
    return f"{backend} engine for versions on trial" if domain else f"{backend} engine"


def in_engine(launch: ModelLaunch, backend: str, domain: str) -> bool:
    """Of the device where it is placed."""
    return launch.backend == backend and launch.domain == domain


def back_again(step: Step, model: ModelState, replica: ReplicaState, record: ReplicaReady) -> None:
    """Nothing is new but that it answers: it kept its place and its partitions."""
    assert replica.down is not None, replica
    down, replica.down, replica.back_ms = replica.down, None, step.now_ms
    took_ms = step.now_ms - down.since_ms
    step.decide(
        "replica_ready",
        model.model,
        f"Serves again {took_ms} ms after its engine ended ({down.cause}): {record.waited_ms} ms until its turn, "
        f"{record.engine_start_ms} ms until the engine was up, {record.load_ms} ms to load, {record.warmup_ms} ms to "
        f"warm up.",
        chosen={
            "worker": replica.worker,
            "device": replica.device,
            "version": record.version,
            "placement_epoch": replica.placement_epoch,
        },
        facts=(step.fact(down.offset, "EngineLost"),),
        moves=(resumed(model.model, replica),),
        took_ms=took_ms,
    )
    _say_engine_back(step, model, replica)
    step.touch("instances", model.model)
    step.look_at(model)


def _say_engine_back(step: Step, model: ModelState, replica: ReplicaState) -> None:
    launch = model.launches[replica.generation]
    key = engine_key(replica.device, launch.backend, launch.domain)
    engine = step.state.workers[replica.worker].engines.get(key)
    if engine is None or _anything_down(step.state, replica, launch):
        return
    took_ms = step.now_ms - engine.down_since_ms
    step.decide(
        "engine_back",
        seat(replica),
        f"All that the {words(launch.backend, launch.domain)} had loaded serves again, {took_ms} ms after it ended.",
        chosen={
            "worker": replica.worker,
            "device": replica.device,
            "backend": launch.backend,
            "last": model.model,
        },
        facts=(step.fact(engine.down_offset, "EngineLost"),),
        took_ms=took_ms,
    )


def _anything_down(state: ClusterState, like: ReplicaState, launch: ModelLaunch) -> bool:
    """Whether a replica of the same engine is still down."""
    at = (like.worker, like.incarnation, like.device)
    return any(
        one.down is not None
        and (one.worker, one.incarnation, one.device) == at
        and in_engine(model.launches[one.generation], launch.backend, launch.domain)
        for model in state.models.values()
        for one in model.replicas
    )
