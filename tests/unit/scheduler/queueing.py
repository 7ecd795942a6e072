"""A small queueing model in virtual time, to close the loop around decisions: seeded arrivals, one queue, replicas that
take time to load. No clock; the same seed gives the same day.

A replica serves one request at a time, first come first served; service times are spread evenly between half and one
and a half times their mean. Replicas come and go at the ends of steps; one that leaves finishes its request.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise

from scheduler.autoscale import ScaleDecision, ScalePolicy, ScaleState, decide, first_state
from scheduler.demand import Load

Rate = Callable[[float], float]
"""Requests per second at a time in seconds."""
STEP_MS = 1_000
P99_STEPS = 10


@dataclass
class Station:
    """One model, its queue and its replicas."""

    rate: Rate
    service_ms: float
    cold_ms: int
    warm_ms: int | None = None
    """Cold start of a replica within `warm_for_ms` after one left; None: always cold."""
    warm_for_ms: int = 600_000
    declared_ms: float | None = None
    """What the declaration says of the service time; None: the truth."""
    seed: int = 1
    now_ms: int = 0
    next_in: float = 0.0
    """Unit exponentials until the next arrival."""
    free_at: list[float] = field(default_factory=list)
    """Of every ready replica, when it is free: a heap."""
    loading: list[int] = field(default_factory=list)
    """When each will be ready."""
    waiting: deque[float] = field(default_factory=deque)
    finishing: list[tuple[float, float]] = field(default_factory=list)
    """(end, latency) of the requests in service: a heap."""
    left_ms: int | None = None
    recent: deque[list[float]] = field(default_factory=lambda: deque(maxlen=P99_STEPS))
    latencies: list[list[float]] = field(default_factory=list)
    """In ms, of the requests completed in each second."""
    leaving_until: list[float] = field(default_factory=list)
    arrived: int = 0
    replica_ms: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.service_chance = random.Random(self.seed + 1_000)  # its own, so that arrivals do not depend on decisions
        self.next_in = self.chance.expovariate(1.0)

    @property
    def supply(self) -> int:
        return len(self.free_at) + len(self.loading)

    @property
    def cold_start_ms(self) -> int:
        warm = self.warm_ms is not None and self.left_ms is not None and self.now_ms - self.left_ms < self.warm_for_ms
        return self.warm_ms if warm and self.warm_ms is not None else self.cold_ms

    def resize(self, wanted: int) -> None:
        """Replicas are added (loading from now on) or leave, those that still load first."""
        cold_ms = self.cold_start_ms
        while self.supply < wanted:
            self.loading.append(self.now_ms + cold_ms)
        while self.supply > wanted:
            self.left_ms = self.now_ms
            if self.loading:
                self.loading.pop()
            else:
                self.leaving_until.append(heappop(self.free_at))

    def step(self) -> Load:
        """One second passes. Returns what was observed in it."""
        start, end = self.now_ms, self.now_ms + STEP_MS
        arrivals = self._arrive(start)
        busy_ms = sum(min(free, end) - start for free in self.free_at if free > start)
        busy_ms += self._serve(start, end)
        self.replica_ms += self.supply * STEP_MS
        ready = len(self.free_at)
        finished: list[float] = []
        while self.finishing and self.finishing[0][0] <= end:
            finished.append(heappop(self.finishing)[1])
        self.latencies.append(finished)
        self.recent.append(finished)
        self.now_ms = end
        for due in [due for due in self.loading if due <= end]:
            self.loading.remove(due)
            heappush(self.free_at, float(end))
        return Load(
            end,
            STEP_MS,
            arrivals,
            len(finished),
            len(self.waiting),
            len(self.finishing),
            len(self.free_at),
            len(self.loading),
            min(round(busy_ms * 10_000 / (ready * STEP_MS)), 10_000) if ready else 0,
            self._p99(),
            self.cold_start_ms,
            round(self.declared_ms or self.service_ms),
        )

    def _arrive(self, start: int) -> int:
        """Poisson arrivals of the rate at the beginning of the second: exponential gaps of unit rate, stretched."""
        rate_per_ms = self.rate(start / 1000) / 1000
        left, count = rate_per_ms * STEP_MS, 0
        while self.next_in < left:
            left -= self.next_in
            self.waiting.append(start + STEP_MS - left / rate_per_ms)
            self.next_in = self.chance.expovariate(1.0)
            count += 1
        self.next_in -= left
        self.arrived += count
        return count

    def _serve(self, start: int, end: int) -> float:
        """Starts what can start before `end`; returns how much of its service falls into this second, in ms."""
        busy_ms = 0.0
        while self.waiting and self.free_at:
            begin = max(self.waiting[0], self.free_at[0], start)
            if begin >= end:
                break
            arrived = self.waiting.popleft()
            done = begin + self.service_ms * (0.5 + self.service_chance.random())
            heapreplace(self.free_at, done)
            heappush(self.finishing, (done, done - arrived))
            busy_ms += min(done, end) - begin
        return busy_ms

    def _p99(self) -> int | None:
        seen = sorted(latency for step in self.recent for latency in step)
        return math.ceil(seen[math.ceil(len(seen) * 0.99) - 1]) if seen else None

    def lose(self, count: int) -> None:
        """Ready replicas are gone at once, with their devices. (What they had in service counts as answered.)"""
        for _ in range(count):
            self.free_at.pop()
        heapify(self.free_at)


@dataclass
class Run:
    """What came out of a closed loop."""

    station: Station
    policy: ScalePolicy
    state: ScaleState
    decisions: list[ScaleDecision] = field(default_factory=list)
    """Those that changed something."""
    wanted: list[int] = field(default_factory=list)
    """After each second."""

    def turns(self, since_s: int = 0) -> int:
        """How often growing turned into shrinking or the other way round."""
        signs = [d.wanted > d.before for d in self.decisions if d.at_ms >= since_s * 1000]
        return sum(a != b for a, b in pairwise(signs))

    def late(self, first_s: int = 0, last_s: int | None = None) -> tuple[int, int]:
        """(requests above the SLA, requests) completed between two seconds."""
        sla = self.policy.p99_ms
        assert sla is not None
        chosen = self.station.latencies[first_s:last_s]
        return sum(ms > sla for second in chosen for ms in second), sum(len(second) for second in chosen)

    def share_in_time(self, first_s: int = 0, last_s: int | None = None) -> float:
        late, requests = self.late(first_s, last_s)
        return 1 - late / requests

    def recovered_s(self, since_s: int) -> int:
        """Seconds from `since_s` to the end of the last ten in which more than 1 % were late; 0: there are none."""
        bad = [first for first in range(since_s, len(self.wanted), 10) if self._bad(first)]
        return max(bad) + 10 - since_s if bad else 0

    def _bad(self, first_s: int) -> bool:
        late, requests = self.late(first_s, first_s + 10)
        return late > 0.01 * requests


def closed_loop(
    policy: ScalePolicy, station: Station, seconds: int, start: int = 1, lost: Mapping[int, int] | None = None
) -> Run:
    """Observes, decides and resizes once a second. `start` replicas are ready at the beginning.

    lost: {second: replicas that are lost then}; they are placed again at once, and load.
    """
    run = Run(station, policy, first_state(policy, station.now_ms, start))
    station.free_at = [0.0] * run.state.wanted
    for second in range(seconds):
        station.lose((lost or {}).get(second, 0))
        load = station.step()
        run.state, decision = decide(policy, run.state, load)
        station.resize(decision.wanted)
        assert policy.floor <= decision.wanted <= policy.replicas_max
        if decision.changed:
            run.decisions.append(decision)
        run.wanted.append(decision.wanted)
    return run


# ---------------------------------------------------------------- loads, in requests per second


def step_load(low: float, high: float, at_s: float, until_s: float = math.inf) -> Rate:
    return lambda t: high if at_s <= t < until_s else low


def ramp(low: float, high: float, from_s: float, to_s: float) -> Rate:
    return lambda t: low + (high - low) * min(max((t - from_s) / (to_s - from_s), 0.0), 1.0)


def sine(mean: float, amplitude: float, period_s: float) -> Rate:
    return lambda t: mean + amplitude * math.sin(2 * math.pi * t / period_s)


def two_peaks(low: float, noon: float, evening: float, hour_s: float = 3_600) -> Rate:
    """A shopping day: bell-shaped peaks at noon and, higher, at eight in the evening, each about four hours wide."""

    def rate(t: float) -> float:
        hour = t / hour_s
        bells = noon * math.exp(-(((hour - 12) / 2) ** 2)) + evening * math.exp(-(((hour - 20) / 2) ** 2))
        return low + bells

    return rate
