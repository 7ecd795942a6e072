"""A rollout on a machine with noise: windows as they come from two versions under load, folded by the real rollout.

Latencies are lognormal. Stalls come at random: of the whole machine, or of the worker of one variant; who is answered
during one waits for its end. Every variant draws its scores from its own distribution.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

from msgspec import Raw, Struct

from scheduler.rollout import Plan, RolloutState, advance
from scheduler.rollout_seen import Seen
from scheduler.rollout_windows import add_window
from scheduler.verdicts import GateLimits
from sie_stream.rollout_records import VariantStats, VariantWindow
from sie_stream.sketch import bucket_of

WINDOW_MS = 2_000
WINDOWS_BEFORE = 4
"""The reader starts so far back, where only the stable version answered."""
WINDOWS_MAX = 120
POOL = 50_000


class Noise(Struct, frozen=True):
    rate: int = 200
    """Requests per second of both variants together."""
    stalls_shared: float = 0.0
    """Per second, of the whole machine."""
    stalls_own: float = 0.0
    """Per second and variant."""
    stall_ms: tuple[int, int] = (100, 1_500)
    failing: float = 0.0
    """Share of the answers that fail, of both versions."""


class Version(Struct, frozen=True):
    slower: float = 1.0
    slow_share: float = 0.0
    """Of the answers, that take `slow_ms` more."""
    slow_ms: float = 100.0
    failing: float = 0.0
    score_mean: float = 0.4
    """With a deviation of 0.1."""


Stalls = list[tuple[float, float]]


def run(seed: int, noise: Noise, version: Version | None = None, limits: GateLimits | None = None) -> RolloutState:
    """Until it ends, is adopted, or WINDOWS_MAX windows were counted."""
    chance = random.Random(seed)
    plan = Plan(hold_ms=8_000, samples_min=200, limits=limits or GateLimits(p99_sla_ms=100))
    state = RolloutState("r-1", "canary", "2", "1", Raw(b"{}"), Raw(b"{}"), plan, 0)
    seen = Seen(ready=1, wanted=1, given_up=False)
    state, _ = advance(state, seen, WINDOWS_BEFORE * WINDOW_MS)
    for number in range(WINDOWS_MAX):
        start_ms = number * WINDOW_MS
        shared = _stalls(chance, noise.stalls_shared, noise)
        share = state.share / 10_000 if number >= WINDOWS_BEFORE else 0.0
        for variant, part, one in (("stable", 1 - share, Version()), ("canary", share, version or Version())):
            stalls = [*shared, *_stalls(chance, noise.stalls_own, noise)]
            count = round(noise.rate * part * WINDOW_MS / 1_000 * chance.uniform(0.8, 1.2))
            if count:
                stats = _stats(chance, count, one, noise, stalls)
                name = "1" if variant == "stable" else "2"
                window = VariantWindow("m", variant, name, start_ms, start_ms + WINDOW_MS, True, stats)
                state = add_window(state, window, start_ms + WINDOW_MS)
        state, _ = advance(state, seen, max(start_ms + WINDOW_MS, state.since_ms))
        if state.phase in ("adopting", "ended"):
            break
    return state


def _stalls(chance: random.Random, per_s: float, noise: Noise) -> Stalls:
    found: Stalls = []
    at_ms = chance.expovariate(per_s / 1_000) if per_s else float(WINDOW_MS)
    while at_ms < WINDOW_MS:
        found.append((at_ms, at_ms + chance.uniform(*noise.stall_ms)))
        at_ms += chance.expovariate(per_s / 1_000)
    return found


def _stats(chance: random.Random, count: int, version: Version, noise: Noise, stalls: Stalls) -> VariantStats:
    failing = noise.failing + version.failing
    failed = sum(chance.random() < failing for _ in range(count)) if failing else 0
    ok = count - failed
    if not ok:
        return VariantStats(failed=failed)
    stalled = sorted(chance.sample(range(ok), k=min(ok, round(ok * sum(e - s for s, e in stalls) / WINDOW_MS))))
    slow = sum(chance.random() < version.slow_share for _ in range(ok)) if version.slow_share else 0
    plain = ok - len(stalled) - min(slow, ok - len(stalled))
    buckets = Counter(chance.choices(_latencies(version.slower), k=plain))
    for number in range(ok - plain):
        wait = version.slow_ms if number >= len(stalled) else chance.uniform(0, max(e - s for s, e in stalls))
        buckets[bucket_of(20.0 * version.slower * chance.lognormvariate(0, 0.3) + wait)] += 1
    scores = Counter(chance.choices(_scores(version.score_mean), k=ok))
    return VariantStats(
        ok=ok,
        failed=failed,
        latency=dict(sorted(buckets.items())),
        scores={"score": dict(sorted(scores.items()))},
    )


@cache
def _latencies(slower: float) -> list[int]:
    """Buckets to draw from; drawing the numbers one by one takes most of the time otherwise."""
    chance = random.Random(1)
    return [bucket_of(20.0 * slower * chance.lognormvariate(0, 0.3)) for _ in range(POOL)]


@cache
def _scores(mean: float) -> list[int]:
    chance = random.Random(2)
    return [bucket_of(min(1.0, max(0.0, chance.gauss(mean, 0.1)))) for _ in range(POOL)]
