"""Replicas whose engine had ended (see engines.py) serve again, and with the last of them the engine is back."""

from __future__ import annotations

from scheduler.evidence import resumed, seat
from scheduler.state import ClusterState, ModelState, ReplicaState
from scheduler.step import Step
from sie_stream.control import ReplicaReady


def engine_key(device: str, backend: str) -> str:
    return f"{device}/{backend}"


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
    backend = model.launches[replica.generation].backend
    engine = step.state.workers[replica.worker].engines.get(engine_key(replica.device, backend))
    if engine is None or _anything_down(step.state, replica, backend):
        return
    took_ms = step.now_ms - engine.down_since_ms
    step.decide(
        "engine_back",
        seat(replica),
        f"All that the {backend} engine had loaded serves again, {took_ms} ms after it ended.",
        chosen={"worker": replica.worker, "device": replica.device, "backend": backend, "last": model.model},
        facts=(step.fact(engine.down_offset, "EngineLost"),),
        took_ms=took_ms,
    )


def _anything_down(state: ClusterState, like: ReplicaState, backend: str) -> bool:
    """Whether a replica of the same engine is still down."""
    at = (like.worker, like.incarnation, like.device)
    return any(
        one.down is not None
        and (one.worker, one.incarnation, one.device) == at
        and model.launches[one.generation].backend == backend
        for model in state.models.values()
        for one in model.replicas
    )
