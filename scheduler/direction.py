"""The Traffic Director in the fold: loads that workers report become the shares of a route's buckets.

`traffic.direct` says which part of a model's keys each worker should get. A worker holds whole buckets, and there are
only as many as the model may have replicas, so moving buckets could not move 30 %. Instead a bucket gets a share of the
keys (`RouteRow.shares`), and ingress takes only those keys from a bucket that it has to give away (`routing.spill_of`).

Models that decode take turns on a device, so the traffic of each is kept where the others rest (time_slices.py): where
it rests itself, buckets get no keys, and stay with their worker, which is in reserve.

Left alone are models with `ordering: key` (a key that changes its partition while older records of it are unfinished
would overtake them), models that one worker serves, and those whose buckets are just changing hands. Routes change
rarely: not before RELIEF_MS are over, and only for a relief or a worker that is off by more than the dead band.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

from msgspec import structs

from scheduler.busy import DECODING
from scheduler.seats import DeviceKey
from scheduler.shares import apportion
from scheduler.state import ClusterState, LoadTally, ModelState
from scheduler.step import Step
from scheduler.time_slices import Tenant, share_out
from scheduler.traffic import (
    DEAD_BAND,
    RELIEF_MS,
    SHARES,
    ReplicaReport,
    ReplicaTraffic,
    TrafficDecision,
    TrafficState,
    direct,
)
from sie_stream.control import RouteRow
from sie_stream.ids import base_of

REQUESTS_MIN = 20
"""Fewer in one round say more about chance than about workers."""
IDLE = 0.01
"""A model that keeps less of a device busy takes no turns that others would notice."""
LOAD_STALE_MS = 10_000
"""A worker that reported nothing for so long has nothing to do."""


def slice_devices(step: Step, tallies: Mapping[str, LoadTally]) -> Mapping[str, Collection[str]]:
    """{model: workers where it rests}, of the models that decode: part of a tick, before traffic is directed."""
    state = step.state
    tenants: list[Tenant] = []
    at: dict[str, dict[str, str]] = {}
    for model in state.models.values():
        if model.status != "accepted" or model.launch.backend not in DECODING:
            continue
        if model.rollouts or base_of(model.model) != model.model:
            continue  # versions are compared: neither may have a device to itself that the other has not
        ready = [replica for replica in model.replicas if replica.state == "ready" and replica.down is None]
        devices = {_slot((replica.worker, device)): replica.worker for replica in ready for device in replica.spans}
        tenant = _tenant(step, model, tallies.get(model.model, LoadTally()), devices)
        if devices and tenant.load >= IDLE:
            at[model.model] = devices
            tenants.append(tenant)
    slices = share_out(tenants, state.slices.owners, state.slices.resting)
    state.slices = slices
    return {model: {at[model][device] for device in away} for model, away in slices.resting.items()}


def shares_devices(state: ClusterState, model: ModelState) -> bool:
    """Whether others decode where it does."""
    slots = (_slot((replica.worker, device)) for replica in model.replicas for device in replica.spans)
    return any(slot in state.slices.owners for slot in slots)


def _tenant(step: Step, model: ModelState, tally: LoadTally, devices: Mapping[str, str]) -> Tenant:
    """`devices`: {device: its worker}, where it is ready."""
    settled = bool(_directed_buckets(model)) and all(len(replica.spans) == 1 for replica in model.replicas)
    each_us = model.rules.request_us or model.busy.request_us
    pressed = model.model in step.state.slices.pressed
    return Tenant(
        model=model.model,
        devices=tuple(sorted(devices)),
        keyless=() if settled else _keyless(model, devices),
        load=model.busy.per_s * each_us / 1_000_000,
        may_rest=settled and len(devices) > 1,
        queued=sum(tally.waiting.values()) > sum(tally.running.values()),
        pressed=pressed,
        # A queue wakes the reserve at once; what was woken stays so as long as any relief: keys do not go to and fro.
        woken=pressed and step.now_ms - model.directed_ms < RELIEF_MS,
    )


def _keyless(model: ModelState, devices: Mapping[str, str]) -> tuple[str, ...]:
    """Devices of workers that get no keys of it at present, by the shares of its buckets and by who has these now."""
    route, width = model.published_route, len(model.partitions) // model.route.lanes
    shares = route.shares if route is not None and len(route.shares) == width else (1,) * width
    owners = [partition.owner for partition in model.partitions if shares[partition.partition % width]]
    keyed = {owner.worker for owner in owners if owner is not None}
    return tuple(slot for slot in sorted(devices) if devices[slot] not in keyed)


def _slot(device: DeviceKey) -> str:
    return "/".join(device)


def direct_traffic(
    step: Step, model: ModelState, tally: LoadTally, every_ms: int, resting: Collection[str] = ()
) -> None:
    """Part of a tick, every `every_ms`: `tally` is what the model's workers reported since the last time.

    `resting`: workers that are to get no keys, because another model has the device (time_slices.py).
    """
    route = _directed_route(model)
    if route is None or len(model.replicas) < 2:
        return
    few = tally.arrivals + sum(tally.waiting.values()) < REQUESTS_MIN
    if few and not resting and all(route.shares):
        return  # nobody to rouse; most models, most of the time
    buckets = _buckets(model, route.width)
    if len(buckets) < 2:
        return
    awake = {worker: held for worker, held in buckets.items() if worker not in resting}
    now = _published(route.shares, route.width, buckets)
    roused = any(now[worker] for worker in resting if worker in now) or not all(now[worker] for worker in awake)
    if few and not roused:
        return
    devices: dict[str, tuple[str, ...]] = {}
    for replica in model.present():
        devices[replica.worker] = devices.get(replica.worker, ()) + replica.spans
    reports = [_report(step.state, tally, worker, devices[worker]) for worker in awake]
    before = _members(model.traffic, awake, step.now_ms - every_ms)
    model.traffic, decision = direct(before, reports)
    wanted = dict.fromkeys(buckets, 0) | decision.shares
    rested = step.now_ms - model.directed_ms >= RELIEF_MS
    if not roused and not (rested and _worth_it(model, now, wanted)):
        return
    shares = _bucket_shares(route.width, buckets, wanted)
    if shares == route.shares:
        return
    model.directed_ms = step.now_ms
    model.published_route = structs.replace(route, route_epoch=step.offset, shares=shares)
    _say(step, model, reports, now, decision, [worker for worker in buckets if worker in resting])
    step.touch("routes", model.model)


def _directed_buckets(model: ModelState) -> dict[str, list[int]]:
    """As `_buckets`; empty also for a model that is not directed at present."""
    route = _directed_route(model)
    return {} if route is None else _buckets(model, route.width)


def _directed_route(model: ModelState) -> RouteRow | None:
    """None for a model that is not directed at present; what was learnt about its workers is forgotten then."""
    route = model.published_route
    if route is None or model.routed_generation != model.generation or model.launch.ordering == "key":
        model.traffic = None
        return None
    return route


def _buckets(model: ModelState, width: int) -> dict[str, list[int]]:
    """{worker: its buckets}, in the order of names; empty while a bucket is nobody's or on its way."""
    found: dict[str, list[int]] = {}
    ready = {replica.key for replica in model.present() if replica.state == "ready"}
    holders = [partition.owner for partition in model.partitions[:width]]
    if not holders or not ready.issuperset(holders):
        return {}
    # Every round asks for all models, so lists are compared instead of their items.
    owners = [partition.owner for partition in model.partitions if partition.state == "assigned"]
    if len(owners) < len(model.partitions) or owners != (holders * -(-len(owners) // len(holders)))[: len(owners)]:
        return {}
    for bucket, holder in enumerate(holders):
        assert holder is not None, "None is no replica that is ready"
        found.setdefault(holder.worker, []).append(bucket)
    return dict(sorted(found.items()))


def _report(state: ClusterState, tally: LoadTally, worker: str, devices: Sequence[str]) -> ReplicaReport:
    """`devices`: of the model's replicas there."""
    found = state.workers[worker]
    fresh = state.now_ms - found.load_ms <= LOAD_STALE_MS
    return ReplicaReport(
        replica=worker,
        at_ms=state.now_ms,
        p99_ms=tally.p99_ms.get(worker, 0),
        queue=tally.waiting.get(worker, 0),
        utilisation_bp=max([found.busy_bp.get(device, 0) for device in devices], default=0) if fresh else 0,
    )


def _members(state: TrafficState | None, workers: Mapping[str, object], since_ms: int) -> TrafficState:
    """Whoever comes or goes, buckets were shared out anew: everybody starts at an even share."""
    known = {} if state is None else state.replicas
    if state is not None and list(known) == list(workers):
        return state
    even = apportion([1.0] * len(workers), SHARES)
    fresh = ReplicaTraffic(0, 0.0, 0.0)
    members = {
        name: structs.replace(known.get(name, fresh), share=share) for name, share in zip(workers, even, strict=True)
    }
    return TrafficState(since_ms, members)


def _published(shares: Sequence[int], width: int, buckets: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """What each worker gets by the route as it is."""
    of = shares if len(shares) == width else _even(width)
    return {worker: sum(of[bucket] for bucket in held) for worker, held in buckets.items()}


@cache
def _even(width: int) -> tuple[int, ...]:
    return apportion([1.0] * width, SHARES)


def _worth_it(model: ModelState, now: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    assert model.traffic is not None
    relieved_ms = max(replica.relieved_ms for replica in model.traffic.replicas.values())
    if relieved_ms > model.directed_ms:
        return True
    return max(abs(wanted[worker] - now[worker]) for worker in now) > SHARES / len(now) * DEAD_BAND


def _bucket_shares(width: int, buckets: Mapping[str, Sequence[int]], shares: Mapping[str, int]) -> tuple[int, ...]:
    """Of each bucket: an equal part of what its worker gets. Empty when they are all the same."""
    found = [0] * width
    for worker, held in buckets.items():
        for bucket, share in zip(held, apportion([1.0] * len(held), shares[worker]), strict=True):
            found[bucket] = share
    return () if max(found) - min(found) <= 1 else tuple(found)


def _say(
    step: Step,
    model: ModelState,
    reports: Sequence[ReplicaReport],
    now: Mapping[str, int],
    decision: TrafficDecision,
    resting: Sequence[str],
) -> None:
    words = "; ".join(
        f"{report.replica} p99 {report.p99_ms} ms, {report.queue} queued, device at {report.utilisation_bp / 100:.0f} %"
        for report in reports
    )
    step.decide(
        "traffic_directed",
        model.model,
        f"{decision.reason} Reported: {words}." + _rest_words(resting),
        chosen={worker: f"{now[worker]} -> {share} of {SHARES}" for worker, share in decision.shares.items()}
        | {"route_epoch": step.offset},
        do_nothing="Each would keep its part of the keys, and the slowest would decide the latency of the model.",
    )


def _rest_words(resting: Sequence[str]) -> str:
    if not resting:
        return ""
    return f" In reserve, because another model decodes on the device: {', '.join(resting)}."
