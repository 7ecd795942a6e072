"""Devices that fail and come back while their worker lives on: a GPU that fell off its bus, an uncorrectable error.

The worker is alive, so nothing is fenced: its replicas there are gone at once, the partitions they held are asked back
from it, and both go elsewhere. A new incarnation of the worker reports anew what it has.
"""

from __future__ import annotations

from scheduler.evidence import memory_changes, went
from scheduler.state import ModelState, ReplicaState
from scheduler.step import TEXT_CHARS_MAX, Step, shortened
from scheduler.worker_state import LostAt, LostDevice, WorkerState
from sie_stream.control import DeviceBack, DeviceLost


def device_lost(step: Step, record: DeviceLost) -> None:
    worker = _reporting(step, record)
    if worker is None or record.device in worker.lost_devices:
        step.ignore()
        return
    cause = shortened(record.cause or "no cause was given", TEXT_CHARS_MAX // 4)
    worker.lost_devices = {**worker.lost_devices, record.device: LostDevice(cause, step.now_ms, step.offset)}
    gone: list[tuple[str, ReplicaState]] = []
    held = 0
    for model in step.state.models.values():
        lost = _drop(step, model, worker, record.device)
        keys = [replica.key for replica in lost]
        held += sum(partition.owner in keys for partition in model.partitions)
        gone += [(model.model, replica) for replica in lost]
    step.decide(
        "device_lost",
        f"{record.worker}/{record.device}",
        f"{record.worker} reports it gone: {cause}. Its replicas go elsewhere, and their partitions are asked back.",
        chosen={
            "worker": record.worker,
            "incarnation": record.incarnation,
            "device": record.device,
            "replicas": len(gone),
            "partitions": held,
        },
        do_nothing="Its replicas would hold partitions that they cannot work off.",
        facts=(step.fact(worker.joined_offset, "WorkerJoined"),),
        moves=tuple(went(name, replica) for name, replica in gone),
        memory=memory_changes(step.state, removed=[replica for _, replica in gone]),
    )


def device_back(step: Step, record: DeviceBack) -> None:
    worker = _reporting(step, record)
    if worker is None or record.device not in worker.lost_devices:
        step.ignore()
        return
    lost = worker.lost_devices[record.device]
    worker.lost_devices = {name: found for name, found in worker.lost_devices.items() if name != record.device}
    step.capacity_freed = True
    step.decide(
        "device_back",
        f"{record.worker}/{record.device}",
        f"{record.worker} reports it in order again, {step.now_ms - lost.since_ms} ms after it was lost: {lost.cause}.",
        chosen={"worker": record.worker, "incarnation": record.incarnation, "device": record.device},
        do_nothing="Nothing would be placed there.",
        facts=(step.fact(lost.offset, "DeviceLost"),),
        took_ms=step.now_ms - lost.since_ms,
    )


def _reporting(step: Step, record: DeviceLost | DeviceBack) -> WorkerState | None:
    """The live incarnation that has such a device."""
    if not step.state.live(record.worker, record.incarnation):
        return None
    worker = step.state.workers[record.worker]
    return worker if any(device.device == record.device for device in worker.devices) else None


def _drop(step: Step, model: ModelState, worker: WorkerState, device: str) -> list[ReplicaState]:
    """Take the replicas there off the list; of one that spans several devices each is needed. The next decision has to
    be the one that says so."""
    gone = [
        r
        for r in model.replicas
        if (r.worker, r.incarnation) == (worker.worker, worker.incarnation) and device in r.spans
    ]
    if not gone:
        return []
    if any(replica in model.present() for replica in gone):
        step.remember(model)
        model.lost_at = LostAt(step.offset, "DeviceLost")
    model.replicas = [replica for replica in model.replicas if replica not in gone]
    step.touch("placements", model.model)
    step.touch("instances", model.model)
    step.look_at(model)
    return gone
