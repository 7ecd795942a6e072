"""A double-peak shopping day on one cluster in virtual time: two high-sla models, a cost-sensitive one, a batch job.

Decisions are those of scheduler/autoscale.py and scheduler/yielding.py; placement is counting devices. A replica takes
one device; one that leaves keeps it until its request is done. A model that moves to a cheaper pool loads there first,
and is slower there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from scheduler.autoscale import ScaleDecision, ScalePolicy, ScaleState, decide, first_state
from scheduler.yielding import Pool, Step, Tenant, YieldState, relieve
from tests.unit.scheduler.queueing import Station, step_load, two_peaks

PREMIUM, CHEAP = "h100", "l4"
SLOWER = 2.0
"""A request on the cheap devices takes so many times as long."""


@dataclass
class Member:
    """A model of the cluster."""

    policy: ScalePolicy
    station: Station
    state: ScaleState
    pool: str = PREMIUM
    moving: Station | None = None
    """Loads in the other pool and takes over when it is ready."""
    wanted: int = 0
    """Without a cap."""
    decisions: list[ScaleDecision] = field(default_factory=list)

    @property
    def lacking(self) -> int:
        return max(self.state.wanted - self.station.supply, 0)

    def devices(self) -> int:
        now = self.station.now_ms
        return self.station.supply + sum(until > now for until in self.station.leaving_until)


@dataclass
class Cluster:
    premium: int
    cheap: int
    members: dict[str, Member]
    yields: bool = True
    state: YieldState = field(default_factory=YieldState)
    steps: list[Step] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)
    fullest: int = 0

    def used(self, pool: str) -> int:
        there = sum(member.devices() for member in self.members.values() if member.pool == pool)
        coming = [m.moving for m in self.members.values() if m.moving is not None and m.pool != pool]
        return there + sum(station.supply for station in coming)

    def free(self, pool: str) -> int:
        return (self.premium if pool == PREMIUM else self.cheap) - self.used(pool)

    def second(self) -> None:
        for name, member in self.members.items():
            cap = self.state.caps.get(name, member.policy.replicas_max)
            policy = structs.replace(member.policy, replicas_max=min(cap, member.policy.replicas_max))
            member.state, decision = decide(policy, member.state, member.station.step())
            assert member.policy.replicas_min <= decision.wanted <= member.policy.replicas_max
            member.wanted = min(decision.need, member.policy.replicas_max)
            member.decisions += [decision] if decision.changed else []
            member.station.leaving_until = [t for t in member.station.leaving_until if t > member.station.now_ms]
            if member.station.supply > decision.wanted:
                member.station.resize(decision.wanted)
        self._place()
        if self.yields:
            self._yield()
        self._take_over()
        self.fullest = max(self.fullest, self.used(PREMIUM))
        assert self.used(PREMIUM) <= self.premium
        assert self.used(CHEAP) <= self.cheap

    def _place(self) -> None:
        """First whom the tags favour, as far as there is room."""
        for member in sorted(self.members.values(), key=lambda member: "batch-job" in member.policy.tags):
            room = min(member.lacking, max(self.free(member.pool), 0))
            if room:
                member.station.resize(member.station.supply + room)

    def _yield(self) -> None:
        pools = [
            Pool(PREMIUM, self.premium, self.used(PREMIUM), 900),
            Pool(CHEAP, self.cheap, self.used(CHEAP), 70),
        ]
        now_ms = max(member.station.now_ms for member in self.members.values())
        self.state, relief = relieve(self.state, now_ms, pools, [self._tenant(*item) for item in self.members.items()])
        self.steps += relief.steps
        self.unmet += relief.unmet
        for step in relief.steps:
            if step.kind in ("move", "return"):
                self._start_move(self.members[step.model])

    def _tenant(self, name: str, member: Member) -> Tenant:
        policy = member.policy
        cheaper = (CHEAP,) if "cost-sensitive" in policy.tags else ()
        return Tenant(
            name,
            policy.tags,
            member.pool,
            member.devices(),
            policy.replicas_min,
            1,
            member.wanted,
            member.lacking if "high-sla" in policy.tags else 0,
            cheaper,
        )

    def _start_move(self, member: Member) -> None:
        old = member.station
        factor = SLOWER if member.pool == PREMIUM else 1 / SLOWER
        member.moving = Station(old.rate, old.service_ms * factor, old.cold_ms, seed=old.seed + 1, now_ms=old.now_ms)
        member.moving.resize(old.supply)

    def _take_over(self) -> None:
        """New before old: what waits goes along, what is in service is finished where it is."""
        for member in self.members.values():
            new, old = member.moving, member.station
            if new is None:
                continue
            new.now_ms = old.now_ms
            if max(new.loading, default=0) <= new.now_ms:
                new.free_at = [float(new.now_ms)] * len(new.loading)
                new.loading.clear()
                new.waiting, new.finishing, new.latencies = old.waiting, old.finishing, old.latencies
                new.arrived, new.replica_ms, new.recent = old.arrived, old.replica_ms, old.recent
                member.station, member.moving = new, None
                member.pool = CHEAP if member.pool == PREMIUM else PREMIUM


def shopping_day(hour_s: float, premium: int = 28, cheap: int = 12, yields: bool = True) -> Cluster:
    """The cluster at midnight. In the evening high-sla models need 22 of the 28 devices, and the batch job wants 10."""

    def member(policy: ScalePolicy, station: Station, start: int) -> Member:
        station.free_at = [0.0] * start
        return Member(policy, station, first_state(policy, 0, start))

    chat = Station(two_peaks(6, 30, 50, hour_s), 200, 20_000, seed=11)
    rank = Station(two_peaks(5, 20, 30, hour_s), 100, 5_000, seed=12)
    embed = Station(step_load(5, 5, 0), 300, 10_000, seed=13)
    report = Station(step_load(0.85, 0.85, 0), 10_000, 20_000, seed=14)
    members = {
        "chat": member(ScalePolicy("chat", 2, 20, 1_000, None, ("high-sla",)), chat, 4),
        "rank": member(ScalePolicy("rank", 1, 8, 500, None, ("high-sla",)), rank, 2),
        "embed": member(ScalePolicy("embed", 1, 6, 3_000, None, ("cost-sensitive",)), embed, 2),
        "report": member(ScalePolicy("report", 0, 12, None, None, ("batch-job",)), report, 10),
    }
    return Cluster(premium, cheap, members, yields)


def lived(cluster: Cluster, seconds: int) -> Cluster:
    for _ in range(seconds):
        cluster.second()
    return cluster


def in_time(member: Member) -> tuple[int, int]:
    """(requests inside the p99 of the SLA, requests), of all that were completed."""
    sla = member.policy.p99_ms
    assert sla is not None
    every = [ms for second in member.station.latencies for ms in second]
    return sum(ms <= sla for ms in every), len(every)
