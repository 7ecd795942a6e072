"""What a decision record says besides the decision: who asked, what moved, which memory changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import assert_never

from scheduler.actors import named
from scheduler.seats import devices_of, shown
from scheduler.state import ClusterState, ModelState, ReplicaState
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    CordonWorker,
    DeleteModel,
    DeviceBack,
    DeviceLost,
    DrainWorker,
    EngineLost,
    HoldTopic,
    PartitionReleased,
    ReleaseTopic,
    ReplicaAnswered,
    ReplicaFailed,
    ReplicaReady,
    RolloutOrder,
    RoutesHeld,
    SchedulerElected,
    StartRollout,
    Tick,
    TopicEnsured,
    TopicFailed,
    UncordonWorker,
    UndoDecision,
    VariantWindow,
    WorkerExited,
    WorkerFenced,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkWaiting,
)
from sie_stream.decisions import MemoryChange, Move


def asked_by(record: ClusterRecord) -> str:
    """The person, process or rule behind a record of sie.cluster."""
    match record:
        case (
            ApplyModel(actor=actor)
            | DeleteModel(actor=actor)
            | CordonWorker(actor=actor)
            | DrainWorker(actor=actor)
            | UncordonWorker(actor=actor)
            | UndoDecision(actor=actor)
            | StartRollout(actor=actor)
            | RolloutOrder(actor=actor)
            | HoldTopic(actor=actor)
            | ReleaseTopic(actor=actor)
        ):
            return named(actor)
        case VariantWindow():
            return record.reporter or "the statistics of results"
        case RoutesHeld():
            return record.ingress
        case WorkerExited():
            return record.reporter or f"the supervisor of {record.worker}"
        case WorkerFenced() | TopicEnsured() | TopicFailed():
            return "the scheduler: an outcome of what it started"
        case (
            WorkerJoined()
            | WorkerHeartbeat()
            | WorkerLoad()
            | WorkerLeft()
            | DeviceLost()
            | DeviceBack()
            | EngineLost()
            | ReplicaReady()
            | ReplicaAnswered()
            | ReplicaFailed()
            | PartitionReleased()
        ):
            return f"{record.worker}/{record.incarnation}"
        case WorkWaiting():
            return record.reporter or "an ingress"
        case SchedulerElected():
            return f"scheduler {record.scheduler}"
        case Tick():
            return "the passing of time"
        case _:
            assert_never(record)


def seat(replica: ReplicaState) -> str:
    return shown(replica.seat)


def came(model: str, replica: ReplicaState, source: str = "") -> Move:
    """The replica is listed now."""
    return Move(model, "replica", source, seat(replica))


def went(model: str, replica: ReplicaState) -> Move:
    """The replica is listed no more."""
    return Move(model, "replica", seat(replica), "")


def stopped(model: str, replica: ReplicaState) -> Move:
    """The replica is listed still, and does not answer for now."""
    return Move(model, "service", seat(replica), "")


def resumed(model: str, replica: ReplicaState) -> Move:
    """It answers again."""
    return Move(model, "service", "", seat(replica))


def partition_moves(model: str, by_worker: dict[str, list[str]], verb: str) -> tuple[Move, ...]:
    """{worker: its partitions} as moves: to the worker (`given`), or away from it (`taken`)."""
    return tuple(
        Move(
            model,
            f"partitions {', '.join(numbers)}",
            "" if verb == "given" else worker,
            worker if verb == "given" else "",
        )
        for worker, numbers in by_worker.items()
    )


def memory_changes(
    state: ClusterState, added: Iterable[ReplicaState] = (), removed: Iterable[ReplicaState] = ()
) -> tuple[MemoryChange, ...]:
    """Devices in the order they are met. Call it after the replicas were listed or unlisted: `after` is what is now."""
    change: dict[tuple[str, str], int] = {}
    for replica, sign in [*((r, 1) for r in added), *((r, -1) for r in removed)]:
        for place in devices_of(replica.seat):
            change[place] = change.get(place, 0) + sign * replica.memory_bytes
    workers = {worker for worker, _ in change}
    promised = promised_bytes(state.models.values(), workers)
    return tuple(
        MemoryChange(
            worker=worker,
            device=device,
            total_bytes=_total_bytes(state, worker, device),
            before_bytes=promised.get((worker, device), 0) - delta,
            after_bytes=promised.get((worker, device), 0),
        )
        for (worker, device), delta in change.items()
    )


def promised_bytes(models: Iterable[ModelState], workers: Collection[str]) -> dict[tuple[str, str], int]:
    """{(worker, device): bytes of the replicas listed there}, of these workers."""
    promised: dict[tuple[str, str], int] = {}
    for model in models:
        for replica in model.replicas:
            if replica.worker not in workers:
                continue
            for place in devices_of(replica.seat):
                promised[place] = promised.get(place, 0) + replica.memory_bytes
    return promised


def _total_bytes(state: ClusterState, worker: str, device: str) -> int:
    """0: the worker, or the device, is not known any more."""
    found = state.workers.get(worker)
    if found is None:
        return 0
    return next((known.memory_bytes for known in found.devices if known.device == device), 0)
