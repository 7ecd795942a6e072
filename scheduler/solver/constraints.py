"""What forbids one demand on one device, whatever else is placed: one constraint, one sentence.

`forbids` is for a replica that would start there, `forbids_staying` for one that runs there already: a cordon and a
NoSchedule taint keep new ones away and leave old ones alone. What depends on the neighbours (free memory,
anti-affinity, exclusive devices, KV groups) is in `ledger`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from scheduler.solver.model import TIER_OF_P0, Demand, Device, PrecisionOption, Taint, Toleration
from scheduler.solver.versions import satisfies


class Refusal(Struct, frozen=True):
    """`constraint` is a stable name, `sentence` is for people and does not repeat the device's name."""

    constraint: str
    sentence: str


def tier_conflict(demand: Demand) -> str | None:
    """What no fleet can mend: tier-0 takes P0 only. Worded as the answer to an apply."""
    if demand.tier != TIER_OF_P0 or demand.priority == "P0":
        return None
    return (
        f"409 Conflict: tier {TIER_OF_P0!r} takes P0 models only, and model {demand.model!r} is {demand.priority}; "
        f"set priority_level to P0 or leave {TIER_OF_P0}."
    )


def forbids(demand: Demand, option: PrecisionOption, device: Device) -> Refusal | None:
    """Why the replica may not start on this device in this precision; None when it may."""
    if device.draining or device.cordoned:
        return forbids_starting(demand, device)
    return forbids_staying(demand, option, device) or forbids_starting(demand, device)


def forbids_starting(demand: Demand, device: Device) -> Refusal | None:
    """What keeps a replica away from this device, in any precision, that could stay if it ran there."""
    if device.draining:
        return Refusal("drain", "the device is being drained.")
    if device.cordoned:
        return Refusal("cordon", "the device is cordoned: it takes nothing new.")
    return _untolerated(demand, device, ("NoSchedule",))


def forbids_staying(demand: Demand, option: PrecisionOption, device: Device) -> Refusal | None:
    """Why a replica that runs on this device has to leave it; None when it may stay."""
    if device.draining:
        return Refusal("drain", "the device is being drained.")
    return (
        _wrong_tier(demand, device)
        or _wrong_engine(demand, device)
        or _wrong_hardware(demand, option, device)
        or _wrong_labels(demand, device)
        or _untolerated(demand, device, ("NoExecute",))
    )


def prefers_others(demand: Demand, device: Device) -> bool:
    """An untolerated PreferNoSchedule: allowed, at a price."""
    return _untolerated(demand, device, ("PreferNoSchedule",)) is not None


def _wrong_tier(demand: Demand, device: Device) -> Refusal | None:
    if conflict := tier_conflict(demand):
        return Refusal("tier", conflict)
    if demand.tier == device.tier:
        return None
    if device.tier == TIER_OF_P0 and demand.priority != "P0":
        return Refusal(
            "tier",
            f"409 Conflict: the device is of tier {TIER_OF_P0!r}, which takes P0 models only, and model "
            f"{demand.model!r} is {demand.priority}.",
        )
    return Refusal(
        "tier", f"the device is of {_tier(device.tier)}, model {demand.model!r} asks for {_tier(demand.tier)}."
    )


def _tier(tier: str | None) -> str:
    return "no tier" if tier is None else f"tier {tier!r}"


def _wrong_engine(demand: Demand, device: Device) -> Refusal | None:
    if demand.backend not in device.backends:
        return Refusal("backend", f"backend {demand.backend!r} is not offered ({_listed(device.backends)}).")
    for name in sorted(demand.requires):
        wanted, found = demand.requires[name], device.versions.get(name)
        if found is None:
            return Refusal("version", f"needs {name} {wanted}, the worker reports none.")
        if not satisfies(found, wanted):
            return Refusal("version", f"needs {name} {wanted}, the worker has {found}.")
    return None


def _wrong_hardware(demand: Demand, option: PrecisionOption, device: Device) -> Refusal | None:
    if demand.product and demand.product != device.product:
        return Refusal("product", f"needs product {demand.product!r}, this is {device.product or device.kind!r}.")
    if option.precision is not None and option.precision not in device.precisions:
        return Refusal("precision", f"cannot compute in {option.precision} ({_listed(device.precisions)}).")
    usable = device.memory_bytes - device.reserved_bytes
    if option.memory_bytes > usable:
        if option.memory_bytes > device.memory_bytes:
            return Refusal("memory", f"needs {option.memory_bytes} bytes, the whole device has {device.memory_bytes}.")
        return Refusal(
            "memory", f"needs {option.memory_bytes} bytes, {usable} of {device.memory_bytes} are not reserved."
        )
    if demand.tensor_parallel_size > 1 and device.kind != "cpu":
        size = demand.tensor_parallel_size
        if demand.span == "nvlink" and device.island is None:
            return Refusal("tensor_parallel", f"needs {size} devices over NVLink, this has none.")
        if demand.span == "numa" and device.island is None and device.numa_node is None:
            return Refusal("tensor_parallel", f"needs {size} devices of one NUMA node, and that of this is not known.")
    if device.spot and not demand.spot_tolerant:
        return Refusal("spot", "the device is spot capacity, which the model does not tolerate.")
    return None


def _wrong_labels(demand: Demand, device: Device) -> Refusal | None:
    for name in sorted(demand.node_selector):
        wanted, found = demand.node_selector[name], device.labels.get(name)
        if found != wanted:
            has = "has no such label" if found is None else f"has {found!r}"
            return Refusal("node_selector", f"needs label {name}={wanted!r}, the server {has}.")
    return None


def _untolerated(demand: Demand, device: Device, effects: Sequence[str]) -> Refusal | None:
    for taint in device.taints:
        if taint.effect in effects and not any(_tolerates(toleration, taint) for toleration in demand.tolerations):
            value = f"={taint.value}" if taint.value else ""
            return Refusal("taint", f"taint {taint.key}{value}:{taint.effect} is not tolerated.")
    return None


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    """As Kubernetes does; see its documentation, "Taints and Tolerations"."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", taint.key)
    return toleration.key == taint.key and toleration.value == taint.value


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
