"""The state as a placement problem: what devices offer, what runs on them, what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import structs

from scheduler.busy import MOST, MOST_OF_BATCH, load_percent
from scheduler.placement import DeviceOffer, Packing, PlacementProblem, ReplicaWish, Resident
from scheduler.places import NOWHERE
from scheduler.rules import BASE_PREFIX
from scheduler.seats import devices_of
from scheduler.state import ClusterState, ModelState, ReplicaState


def placement_problem(
    state: ClusterState, wishes: Sequence[ReplicaWish], packing: Packing, without: ReplicaState | None = None
) -> PlacementProblem:
    """`without` asks what if that replica were gone."""
    offered = {
        (worker.worker, device.device)
        for worker in state.workers.values()
        if _is_there(state, worker.worker)
        for device in worker.devices
        if device.device not in worker.lost_devices
    }
    kept = {} if state.plan is None else state.plan.kept()
    residents: list[Resident] = []
    others: list[ReplicaState] = []
    for model in state.models.values():
        moving = _is_moving(model)
        like: dict[int, ReplicaWish] = {}
        for replica in model.replicas:
            if replica is without:
                continue
            if model.stays(replica) and all(device in offered for device in devices_of(replica.seat)):
                settled = moving or not _may_move(state, replica)
                wish = like.get(replica.memory_bytes)
                if wish is None:
                    wish = like[replica.memory_bytes] = wish_of(model, replica.memory_bytes)
                residents.append(Resident(wish, replica.worker, replica.spans, settled))
            else:
                others.append(replica)
    offers = _keeping(_offers(state, others), residents, kept) if kept else _offers(state, others)
    trunks = _trunks(state)
    if trunks:
        wishes = [_exchanging(wish, trunks) for wish in wishes]
        residents = [structs.replace(one, wish=_exchanging(one.wish, trunks)) for one in residents]
    return PlacementProblem(offers, tuple(wishes), tuple(residents), packing)


def _trunks(state: ClusterState) -> dict[str, str]:
    """{model: its trunk}, of those that share one with another model."""
    found: dict[str, str] = {}
    for model in state.models.values():
        trunk = model.rules.trunk
        base = state.models.get(trunk.removeprefix(BASE_PREFIX)) if trunk.startswith(BASE_PREFIX) else None
        if trunk:
            found[model.model] = base.rules.trunk if base is not None and base.rules.trunk else trunk
    shared = Counter(found.values())
    return {model: trunk for model, trunk in found.items() if shared[trunk] > 1}


def _exchanging(wish: ReplicaWish, trunks: dict[str, str]) -> ReplicaWish:
    trunk = trunks.get(wish.model, "")
    return structs.replace(wish, kv_group=trunk) if trunk else wish


def _may_move(state: ClusterState, replica: ReplicaState) -> bool:
    return replica.state == "ready" and replica.worker not in state.cordons


def _is_moving(model: ModelState) -> bool:
    """Something of it is under way, so nothing else of it is moved."""
    missing = len(model.present()) < model.replicas_wanted
    return model.status == "deleting" or missing or any(not model.stays(replica) for replica in model.replicas)


def _keeping(
    offers: tuple[DeviceOffer, ...], residents: Sequence[Resident], kept: dict[tuple[str, str], int]
) -> tuple[DeviceOffer, ...]:
    """Memory that a plan under way counts on is reserved, as far as it is free already."""
    free = {(offer.worker, offer.device): offer.memory_bytes - offer.reserved_bytes for offer in offers}
    for resident in residents:
        for device in resident.devices:
            free[resident.worker, device] -= resident.wish.memory_bytes
    return tuple(
        structs.replace(offer, reserved_bytes=offer.reserved_bytes + min(kept.get(key, 0), max(0, free[key])))
        for offer in offers
        for key in ((offer.worker, offer.device),)
    )


def device_offers(state: ClusterState) -> tuple[DeviceOffer, ...]:
    """Devices of live workers, with all that is promised on them as reserved."""
    return _offers(state, [replica for model in state.models.values() for replica in model.replicas])


def wish_of(model: ModelState, memory_bytes: int | None = None) -> ReplicaWish:
    """A replica of the present generation."""
    return ReplicaWish(
        model=model.model,
        generation=model.generation,
        priority=model.launch.priority,
        backend=model.launch.backend,
        memory_bytes=model.launch.memory_bytes if memory_bytes is None else memory_bytes,
        hosts=tuple(replica.worker for replica in model.present()),
        failed_on=model.failed_on,
        prefer=model.lost_workers,
        missed_on=model.sla_missed,
        met_on=tuple(kind for kind, streak in sorted(model.sla_streak.items()) if streak < 0),
        rules=model.rules,
        tensor_parallel=model.launch.tensor_parallel,
        load_percent=_load_percent(model),
    )


def _load_percent(model: ModelState) -> int:
    """Of each replica. Those of a model that needs more than it may have should have devices to themselves."""
    if model.cramped_until_ms:
        return MOST
    percent = load_percent(model.busy, model.rules.request_us, model.launch.backend, model.replicas_wanted)
    return min(percent, MOST_OF_BATCH) if "batch-job" in model.rules.tags else percent


def _is_there(state: ClusterState, name: str) -> bool:
    worker = state.workers[name]
    return worker.status == "live" and not worker.stopping


def _service(state: ClusterState, name: str) -> Literal["in service", "cordoned", "draining"]:
    cordon = state.cordons.get(name)
    if cordon is None:
        return "in service"
    return "cordoned" if cordon.phase == "cordoned" else "draining"


def _offers(state: ClusterState, reserving: Sequence[ReplicaState]) -> tuple[DeviceOffer, ...]:
    reserved: dict[tuple[str, str], int] = {}
    for replica in reserving:
        for at in devices_of(replica.seat):
            reserved[at] = reserved.get(at, 0) + replica.memory_bytes
    offers: list[DeviceOffer] = []
    for worker in state.workers.values():
        if not _is_there(state, worker.worker):
            continue
        service = _service(state, worker.worker)
        for device in worker.devices:
            if device.device in worker.lost_devices:
                continue
            memory, place = reserved.get((worker.worker, device.device), 0), worker.places.get(device.device, NOWHERE)
            assert memory <= device.memory_bytes, f"{worker.worker}/{device.device} is promised above its memory"
            offers.append(
                DeviceOffer(
                    worker=worker.worker,
                    incarnation=worker.incarnation,
                    device=device.device,
                    kind=device.kind,
                    memory_bytes=device.memory_bytes,
                    reserved_bytes=memory,
                    backends=worker.backends,
                    host=worker.host,
                    labels=worker.labels,
                    taints=worker.taints,
                    tier=worker.tier,
                    versions=worker.versions,
                    service=service,
                    island=place.island,
                    numa_node=place.numa_node,
                    product=place.product,
                )
            )
    return tuple(offers)
