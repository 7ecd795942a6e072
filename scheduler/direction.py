"""The Traffic Director in the fold: loads that workers report become the shares of a route's buckets.

`traffic.direct` says which part of a model's keys each worker should get. A worker holds whole buckets, and there are
only as many as the model may have replicas, so moving buckets could not move 30 %. Instead a bucket gets a share of the
keys (`RouteRow.shares`), and ingress takes only those keys from a bucket that it has to give away (`routing.spill_of`).

Left alone are models with `ordering: key` (a key that changes its partition while older records of it are unfinished
would overtake them), models that one worker serves, and those whose buckets are just changing hands. Routes change
rarely: not before RELIEF_MS are over, and only for a relief or a worker that is off by more than the dead band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from scheduler.shares import apportion
from scheduler.state import ClusterState, LoadTally, ModelState
from scheduler.step import Step
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

REQUESTS_MIN = 20
"""Fewer in one round say more about chance than about workers."""
LOAD_STALE_MS = 10_000
"""A worker that reported nothing for so long has nothing to do."""


def direct_traffic(step: Step, model: ModelState, tally: LoadTally, every_ms: int) -> None:
    """Part of a tick, every `every_ms`: `tally` is what the model's workers reported since the last time."""
    route = model.published_route
    if route is None or model.routed_generation != model.generation or model.launch.ordering == "key":
        model.traffic = None
        return
    buckets = _buckets(model, route.width)
    if len(buckets) < 2 or tally.arrivals + sum(tally.waiting.values()) < REQUESTS_MIN:
        return
    reports = [_report(step.state, model, tally, worker) for worker in buckets]
    before = _members(model.traffic, buckets, step.now_ms - every_ms)
    model.traffic, decision = direct(before, reports)
    now = _published(route.shares, route.width, buckets)
    if step.now_ms - model.directed_ms < RELIEF_MS or not _worth_it(model, now, decision.shares):
        return
    shares = _bucket_shares(route.width, buckets, decision.shares)
    if shares == route.shares:
        return
    model.directed_ms = step.now_ms
    model.published_route = structs.replace(route, route_epoch=step.offset, shares=shares)
    _say(step, model, reports, now, decision)
    step.touch("routes", model.model)


def _buckets(model: ModelState, width: int) -> dict[str, list[int]]:
    """{worker: its buckets}, in the order of names; empty while a bucket is nobody's or on its way."""
    found: dict[str, list[int]] = {}
    ready = {replica.key for replica in model.present() if replica.state == "ready"}
    for bucket, first in enumerate(model.partitions[:width]):
        holder = first.owner
        if holder is None or holder not in ready:
            return {}
        for partition in model.partitions[bucket::width]:
            if partition.state != "assigned" or partition.owner != holder:
                return {}
        found.setdefault(holder.worker, []).append(bucket)
    return dict(sorted(found.items()))


def _report(state: ClusterState, model: ModelState, tally: LoadTally, worker: str) -> ReplicaReport:
    found = state.workers[worker]
    fresh = state.now_ms - found.load_ms <= LOAD_STALE_MS
    devices = [device for replica in model.present() if replica.worker == worker for device in replica.spans]
    return ReplicaReport(
        replica=worker,
        at_ms=state.now_ms,
        p99_ms=tally.p99_ms.get(worker, 0),
        queue=tally.waiting.get(worker, 0),
        utilisation_bp=max((found.busy_bp.get(device, 0) for device in devices), default=0) if fresh else 0,
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
    of = shares if len(shares) == width else apportion([1.0] * width, SHARES)
    return {worker: sum(of[bucket] for bucket in held) for worker, held in buckets.items()}


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
    step: Step, model: ModelState, reports: Sequence[ReplicaReport], now: Mapping[str, int], decision: TrafficDecision
) -> None:
    words = "; ".join(
        f"{report.replica} p99 {report.p99_ms} ms, {report.queue} queued, device at {report.utilisation_bp / 100:.0f} %"
        for report in reports
    )
    step.decide(
        "traffic_directed",
        model.model,
        f"{decision.reason} Reported: {words}.",
        chosen={worker: f"{now[worker]} -> {share} of {SHARES}" for worker, share in decision.shares.items()}
        | {"route_epoch": step.offset},
        do_nothing="Each would keep its part of the keys, and the slowest would decide the latency of the model.",
    )
