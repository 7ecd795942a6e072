"""The double-peak shopping day once more, but decided by the scheduler itself: SchedulerMachine folds a log of what
workers report, and what it wants comes true in the queueing model.

Every worker has one device with room for one replica. Loads take the cold start of the model, releases a second, and a
replica that leaves finishes its request. What waits while a model sleeps is told as an ingress tells it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from msgspec import structs

from scheduler.state import ReplicaState
from sie_stream.control import ReplicaReady, Tick, WorkerHeartbeat, WorkerLoad, WorkWaiting
from sie_stream.loads import DeviceLoad, ModelLoad
from sie_stream.settings import settings_from
from sie_stream.spec.model import Tag
from tests.unit.scheduler.kit import Cluster, joined, spec_json
from tests.unit.scheduler.queueing import Station, step_load, two_peaks

PREMIUM, CHEAP = "premium", "cheap"
SLOWER = 2.0
"""A request on the cheap devices takes so many times as long."""
BEAT_S, REPORT_S = 5, 2
NO_SLA_MS = 1 << 40


@dataclass
class Member:
    name: str
    station: Station
    sla_ms: int
    service_ms: float
    arrivals: int = 0
    """Since the last report, as the next two."""
    completions: int = 0
    busy_ms: float = 0.0
    p99_ms: int | None = None

    def in_time(self) -> tuple[int, int]:
        """(requests inside the SLA, requests), of all that were completed."""
        every = [ms for second in self.station.latencies for ms in second]
        return sum(ms <= self.sla_ms for ms in every), len(every)


@dataclass
class FoldedDay:
    cluster: Cluster
    members: list[Member] = field(default_factory=list)
    second: int = 0
    asleep_s: dict[str, int] = field(default_factory=dict)

    def live(self, seconds: int) -> FoldedDay:
        for _ in range(seconds):
            self._second()
        return self

    def _second(self) -> None:
        cluster = self.cluster
        self.second += 1
        cluster.now_ms += 1_000
        for member in self.members:
            self._resize(member)
            self._serve(member)
        for worker in cluster.machine.state.workers.values():
            if self.second % BEAT_S == 0:
                cluster.append(WorkerHeartbeat(worker.worker, worker.incarnation))
        cluster.append(Tick("s0"))
        for member in self.members:
            self._obey(member)

    def _obey(self, member: Member) -> None:
        """Workers carry out what they are told."""
        cluster, model = self.cluster, self.cluster.model(member.name)
        for replica in list(model.replicas):
            if replica.state == "loading" and cluster.now_ms - replica.placed_ms >= member.station.cold_ms:
                args = (member.name, model.launches[replica.generation].version, replica.placement_epoch)
                cluster.append(ReplicaReady(replica.worker, replica.incarnation, *args, replica.memory_bytes, 1_000, 0))
        cluster.release(member.name)
        route = model.published_route
        if route is not None and route.asleep:
            self.asleep_s[member.name] = self.asleep_s.get(member.name, 0) + 1
            if member.station.waiting:
                cluster.append(WorkWaiting(member.name, route.route_epoch, len(member.station.waiting)))

    def _serving(self, member: Member) -> list[ReplicaState]:
        return [replica for replica in self.cluster.model(member.name).replicas if replica.state == "ready"]

    def _resize(self, member: Member) -> None:
        serving, station = self._serving(member), member.station
        while len(station.free_at) < len(serving):
            heappush(station.free_at, float(station.now_ms))
        while len(station.free_at) > len(serving):
            heappop(station.free_at)
        cheap = sum(replica.worker.startswith(CHEAP) for replica in serving)
        station.service_ms = member.service_ms * (SLOWER if 2 * cheap > len(serving) else 1.0)

    def _serve(self, member: Member) -> None:
        load = member.station.step()
        member.arrivals += load.arrivals
        member.completions += load.completions
        member.busy_ms += load.utilisation_bp * load.ready / 10
        member.p99_ms = load.p99_ms
        serving = self._serving(member)
        if self.second % REPORT_S or not serving:
            return
        for place, replica in enumerate(serving):
            self._report(member, replica, place, len(serving), load.waiting, load.running)
        member.arrivals = member.completions = 0
        member.busy_ms = 0.0

    def _report(self, member: Member, replica: ReplicaState, place: int, of: int, waiting: int, running: int) -> None:
        """Its even part of what all replicas had."""

        def part(whole: int) -> int:
            return whole // of + (place < whole % of)

        busy_ms = part(round(member.busy_ms))
        load = ModelLoad(
            member.name,
            part(member.arrivals),
            part(member.completions),
            part(waiting),
            part(running),
            busy_ms,
            member.p99_ms,
        )
        devices = (DeviceLoad("cpu0", min(busy_ms * 10 // REPORT_S, 10_000)),)
        self.cluster.append(WorkerLoad(replica.worker, replica.incarnation, REPORT_S * 1_000, (load,), devices))


def folded_day(hour_s: float, premium: int = 28, cheap: int = 12, tags: bool = True) -> FoldedDay:
    """The cluster at midnight, all models on the premium devices; without `tags` nobody has to give way."""
    cluster = Cluster(settings_from({"worker_lost_after_ms": 12_000}))
    cluster.lead()
    day = FoldedDay(cluster)
    _join(cluster, PREMIUM, premium, "900")
    at_first: Sequence[tuple[str, Station, int, int, int, Tag]] = (
        ("chat", Station(two_peaks(6, 30, 50, hour_s), 200, 20_000, seed=11), 1_000, 2, 20, "high-sla"),
        ("rank", Station(two_peaks(5, 20, 30, hour_s), 100, 5_000, seed=12), 500, 1, 8, "high-sla"),
        ("embed", Station(step_load(5, 5, 0), 300, 10_000, seed=13), 3_000, 1, 6, "cost-sensitive"),
        ("report", Station(step_load(0.85, 0.85, 0), 10_000, 20_000, seed=14), NO_SLA_MS, 0, 12, "batch-job"),
    )
    for name, station, sla_ms, least, most, tag in at_first:
        spec: dict[str, Any] = {
            "replicas": {"min": least, "max": most},
            "tags": [tag] if tags or tag == "high-sla" else [],
            "slas": {} if sla_ms == NO_SLA_MS else {"p99_latency_ms": sla_ms},
            "node_selector": {} if tag == "cost-sensitive" else {"pool": PREMIUM},
        }
        cluster.apply(spec_json(name, memory_mb=1_000, **spec))
        cluster.make_ready(name)
        day.members.append(Member(name, station, sla_ms, station.service_ms))
    _join(cluster, CHEAP, cheap, "70")
    return day


def _join(cluster: Cluster, pool: str, count: int, cost: str) -> None:
    for number in range(count):
        worker = joined(f"{pool}{number}", f"i-{pool}{number}")
        cluster.append(structs.replace(worker, labels={"pool": pool, "cost": cost}))
