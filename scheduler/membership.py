"""Workers come, speak, fall silent, are fenced and leave."""

from __future__ import annotations

from scheduler.counts import counted
from scheduler.evidence import memory_changes, went
from scheduler.fleet import WorkerEvent, may_commit, next_status, silence_ends_ms
from scheduler.limits import FORGET_WORKER_MS, RECONNECT_MS, REPLACE_AFTER_MS
from scheduler.partitions import owner_gone
from scheduler.places import device_places
from scheduler.state import NEVER_MS, ModelState, ReplicaState
from scheduler.step import Step
from scheduler.worker_state import LostAt, WorkerState
from sie_stream.control import WorkerExited, WorkerFenced, WorkerHeartbeat, WorkerJoined, WorkerLeft
from sie_stream.decisions import Move

DEVICE_BYTES_MAX = 1 << 50
PAST_MAX = 32
"""Replaced incarnations that are remembered per worker."""

Dropped = list[tuple[str, ReplicaState]]
"""(model, replica) pairs."""
Freed = dict[str, list[str]]
"""{model: its partitions, as text}."""


def worker_joined(step: Step, record: WorkerJoined) -> None:
    """A new incarnation. Taking the transactional id fenced its predecessor, whose partitions are free therefore."""
    known = step.state.workers.get(record.worker)
    if known is not None and (record.incarnation == known.incarnation or record.incarnation in known.past):
        step.ignore()
        return
    if _refused(step, record):
        return
    past: tuple[str, ...] = ()
    if known is not None:
        past = (*known.past, known.incarnation)[-PAST_MAX:]
        if may_commit(known.status):
            replicas, partitions = _forget_holdings(step, known)
            step.decide(
                "worker_replaced",
                record.worker,
                f"Incarnation {record.incarnation} joined after it took the transactional id of {known.incarnation}, "
                f"which fences that one.",
                chosen={
                    "fenced": known.incarnation,
                    "incarnation": record.incarnation,
                    **_counts(replicas, partitions),
                },
                do_nothing="Its partitions would wait for a process that cannot commit any more.",
                facts=(step.fact(known.lost_by.offset, known.lost_by.kind) if known.lost_by else None,),
                moves=_all_moves(known, replicas, partitions),
                memory=memory_changes(step.state, removed=_states(replicas)),
            )
    step.state.workers[record.worker] = WorkerState(
        worker=record.worker,
        incarnation=record.incarnation,
        host=record.host,
        pid=record.pid,
        devices=record.devices,
        backends=record.backends,
        versions=record.versions,
        joined_ms=step.now_ms,
        last_heard_ms=step.now_ms,
        labels=record.labels,
        taints=record.taints,
        tier=record.tier,
        topology=record.topology,
        places=device_places(record.topology),
        past=past,
        joined_offset=step.offset,
    )
    _say_joined(step, record)
    _watch(step, silence_ends_ms(step.now_ms, step.settings.worker_lost_after_ms))
    step.capacity_freed = True


def _say_joined(step: Step, record: WorkerJoined) -> None:
    step.decide(
        "worker_joined",
        record.worker,
        "It is up and has fenced its predecessor, if there was one.",
        chosen={
            "incarnation": record.incarnation,
            "host": record.host,
            "devices": len(record.devices),
            "memory_bytes": sum(device.memory_bytes for device in record.devices),
            "backends": ", ".join(record.backends),
        },
        do_nothing="It would stay without work.",
    )


def _refused(step: Step, record: WorkerJoined) -> bool:
    """A record that others wrote must not stop the fold: devices that make no sense are answered, not followed."""
    names = dict.fromkeys(device.device for device in record.devices)
    sizes = [device.memory_bytes for device in record.devices]
    named = bool(record.worker) and bool(record.incarnation)
    if named and len(names) == len(sizes) and all(0 < size <= DEVICE_BYTES_MAX for size in sizes):
        return False
    step.decide(
        "worker_refused",
        record.worker or "unnamed",
        f"It needs a name and an incarnation, and its devices names of their own, and sizes above 0 and up to "
        f"{DEVICE_BYTES_MAX} bytes.",
        chosen={"incarnation": record.incarnation, "devices": len(sizes)},
        do_nothing="Nothing could be placed on it.",
    )
    return True


def worker_heard(step: Step, record: WorkerHeartbeat) -> None:
    worker = step.state.workers.get(record.worker)
    if worker is None or worker.incarnation != record.incarnation or worker.status != "live":
        step.ignore()
        return
    worker.last_heard_ms = max(worker.last_heard_ms, step.now_ms)
    worker.heard_offset = step.offset


def worker_exited(step: Step, record: WorkerExited) -> None:
    """The process ended. What it sent may still be on its way to the broker, so it is fenced all the same."""
    worker = _known(step, record.worker, record.incarnation)
    if worker is None:
        return
    if next_status(worker.status, WorkerEvent.EXITED) != worker.status:
        _lose(step, worker, f"{record.reporter or 'its supervisor'} saw the process end with code {record.exit_code}")


def worker_left(step: Step, record: WorkerLeft) -> None:
    worker = _known(step, record.worker, record.incarnation)
    if worker is None or not may_commit(worker.status):
        return
    worker.status = next_status(worker.status, WorkerEvent.LEFT)
    worker.ended_ms = step.now_ms
    worker.fence_due_ms = NEVER_MS
    replicas, partitions = _forget_holdings(step, worker)
    step.decide(
        "worker_left",
        worker.worker,
        "A clean stop: everything it finished is committed and it commits nothing any more, so no fence is needed.",
        chosen={"incarnation": worker.incarnation, **_counts(replicas, partitions)},
        do_nothing="Its partitions would be worked off by nobody.",
        facts=(step.fact(worker.joined_offset, "WorkerJoined"),),
        moves=_all_moves(worker, replicas, partitions),
        memory=memory_changes(step.state, removed=_states(replicas)),
    )


def worker_fenced(step: Step, record: WorkerFenced) -> None:
    """From here on its transactions fail, so its partitions are free."""
    worker = _known(step, record.worker, record.incarnation)
    if worker is None or not may_commit(worker.status):
        return
    lost_ms = step.now_ms - worker.ended_ms if worker.status == "lost" else 0
    worker.status = next_status(worker.status, WorkerEvent.FENCED)
    worker.ended_ms = step.now_ms
    worker.fence_due_ms = NEVER_MS
    replicas, partitions = _forget_holdings(step, worker)
    step.decide(
        "worker_fenced",
        worker.worker,
        f"Kafka refuses every commit of {worker.incarnation} from now on; its partitions are free.",
        chosen={
            "incarnation": worker.incarnation,
            "fence_ms": record.took_ms,
            "since_lost_ms": lost_ms,
            **_counts(replicas, partitions),
        },
        do_nothing="Its partitions would be worked off by nobody.",
        facts=(
            step.fact(worker.joined_offset, "WorkerJoined"),
            step.fact(worker.lost_by.offset, worker.lost_by.kind) if worker.lost_by else None,
        ),
        moves=_all_moves(worker, replicas, partitions),
        memory=memory_changes(step.state, removed=_states(replicas)),
        took_ms=lost_ms,
    )


def check_workers(step: Step) -> None:
    """Part of a tick: declare silent workers lost, ask again for fences without an outcome, forget the long gone."""
    if step.now_ms < step.state.workers_due_ms:
        return
    lost_after_ms = step.settings.worker_lost_after_ms
    for name in list(step.state.workers):
        worker = step.state.workers[name]
        if worker.status == "live" and step.now_ms >= silence_ends_ms(worker.last_heard_ms, lost_after_ms):
            silent_ms = step.now_ms - worker.last_heard_ms
            _lose(step, worker, f"no heartbeat for {silent_ms} ms, {lost_after_ms} ms are allowed")
        elif worker.status == "lost" and step.now_ms >= worker.fence_due_ms:
            _fence(step, worker)
        elif not may_commit(worker.status) and step.now_ms >= worker.ended_ms + FORGET_WORKER_MS:
            del step.state.workers[name]
    step.state.workers_due_ms = min((_due_ms(step, worker) for worker in step.state.workers.values()), default=NEVER_MS)


def _due_ms(step: Step, worker: WorkerState) -> int:
    if worker.status == "live":
        return silence_ends_ms(worker.last_heard_ms, step.settings.worker_lost_after_ms)
    if worker.status == "lost":
        return worker.fence_due_ms
    return worker.ended_ms + FORGET_WORKER_MS


def forgive_silence(step: Step, gap_ms: int) -> None:
    """The log stood still for `gap_ms` (no leader, or no broker), so nobody could be heard and nobody is to blame.

    A short stall is not counted as silence, except for one tick of it. After a long one everybody also gets as long as
    it lasted, at most RECONNECT_MS, to find the broker again; or an outage of the broker would fence the whole fleet.
    """
    for worker in step.state.workers.values():
        if worker.status != "live":
            continue
        if gap_ms > step.settings.worker_lost_after_ms:
            worker.last_heard_ms = step.now_ms + min(gap_ms, RECONNECT_MS)
        else:
            worker.last_heard_ms = min(step.now_ms, worker.last_heard_ms + gap_ms - step.settings.tick_ms)


def fence_lost_again(step: Step) -> None:
    """A new leader cannot know whether the old one got to it."""
    for worker in step.state.workers.values():
        if worker.status == "lost":
            _fence(step, worker)


def _known(step: Step, name: str, incarnation: str) -> WorkerState | None:
    worker = step.state.workers.get(name)
    if worker is None or worker.incarnation != incarnation:
        step.ignore()
        return None
    return worker


def _lose(step: Step, worker: WorkerState, because: str) -> None:
    """LIVE -> LOST: fence it, unlist its replicas. Its partitions stay its own until the fence holds."""
    assert worker.status == "live", worker
    worker.status = "lost"
    worker.ended_ms = step.now_ms
    worker.lost_by = LostAt(step.offset, type(step.record).__name__)
    replicas: Dropped = []
    for model in step.state.models.values():
        replicas += _drop_replicas(step, model, worker)
    held = sum(
        partition.owner is not None and partition.owner.worker == worker.worker
        for model in step.state.models.values()
        for partition in model.partitions
    )
    partitions = counted(held, "partition", "partitions")
    step.decide(
        "worker_lost",
        worker.worker,
        f"{because[0].upper()}{because[1:]}.",
        chosen={"fence": worker.incarnation, "replicas": len(replicas), "partitions": held},
        do_nothing=f"{partitions} would stay with a process that may be dead, or wake up and commit.",
        facts=(
            step.fact(worker.joined_offset, "WorkerJoined"),
            step.fact(worker.heard_offset, "WorkerHeartbeat"),
        ),
        moves=_all_moves(worker, replicas, {}),
        memory=memory_changes(step.state, removed=_states(replicas)),
    )
    _fence(step, worker)


def _fence(step: Step, worker: WorkerState) -> None:
    worker.fence_due_ms = step.now_ms + step.settings.fence_timeout_ms
    _watch(step, worker.fence_due_ms)
    step.fence(worker.worker, worker.incarnation)


def _watch(step: Step, due_ms: int) -> None:
    step.state.workers_due_ms = min(step.state.workers_due_ms, due_ms)


def _drop_replicas(step: Step, model: ModelState, worker: WorkerState) -> Dropped:
    """Take the worker's replicas off the model's list; a model that lost a serving one prefers the worker's return.

    The next decision has to be the one that says so.
    """
    gone = [r for r in model.replicas if (r.worker, r.incarnation) == (worker.worker, worker.incarnation)]
    if not gone:
        return []
    if any(replica in model.present() for replica in gone):
        step.remember(model)
    model.replicas = [replica for replica in model.replicas if replica not in gone]
    if worker.worker not in model.lost_workers:
        model.lost_workers = (*model.lost_workers, worker.worker)
    if model.lost_at is None or model.lost_at.offset != step.offset:
        model.lost_at = LostAt(step.offset, type(step.record).__name__)
    model.wait_until_ms = step.now_ms + REPLACE_AFTER_MS
    step.touch("placements", model.model)
    step.touch("instances", model.model)
    step.look_at(model)
    return [(model.model, replica) for replica in gone]


def _forget_holdings(step: Step, worker: WorkerState) -> tuple[Dropped, Freed]:
    """This incarnation can never commit again: no replica and no partition is its own any more. Returns which were.

    The next decision has to be the one that says so.
    """
    replicas: Dropped = []
    freed: Freed = {}
    for model in step.state.models.values():
        replicas += _drop_replicas(step, model, worker)
        who = (worker.worker, worker.incarnation)
        mine = [str(p.partition) for p in model.partitions if owner_gone(p, *who, step.offset)]
        if mine:
            freed[model.model] = mine
            step.touch("placements", model.model)
            step.look_at(model)
    return replicas, freed


def _states(replicas: Dropped) -> list[ReplicaState]:
    return [replica for _, replica in replicas]


def _counts(replicas: Dropped, partitions: Freed) -> dict[str, int]:
    return {"replicas": len(replicas), "partitions": sum(len(numbers) for numbers in partitions.values())}


def _all_moves(worker: WorkerState, replicas: Dropped, partitions: Freed) -> tuple[Move, ...]:
    """Everything goes from the worker to nowhere."""
    freed = [
        Move(model, f"partitions {', '.join(numbers)}", worker.worker, "") for model, numbers in partitions.items()
    ]
    return (*(went(model, replica) for model, replica in replicas), *freed)
