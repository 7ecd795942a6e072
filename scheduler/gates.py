"""Gates of a rollout: what a new version may do worse than the old one, judged with regard to the number of samples.

Every gate says pass, breach or unsure. Breach: the limit is exceeded, and so much that chance would do it in less than
one of 1,000 windows (ALPHA). Unsure: the limit is exceeded, but chance could have done it; the rollout waits for more
samples. So a slow answer among fifty stops nothing, and a real fault is not outvoted by few samples.

Rates and p99: exact binomial tail. For p99: at most 1 % of answers may be slower than the limit. Scores:
Kolmogorov-Smirnov distance with its critical value c(ALPHA) sqrt((n+m)/nm); population stability index over the deciles
of the stable version, whose expected value under no change is about chi2 (1/n + 1/m) (Yurdakul 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from sie_stream.rollout_records import VariantStats
from sie_stream.sketch import BUCKET_MAX, above, count_of, quantile, rank_bucket, upper_of
from sie_stream.sketch import added as sketches

ALPHA = 0.001
KS_CRITICAL = 1.949
"""sqrt(-ln(ALPHA / 2) / 2)."""
Z_ALPHA = 3.090
SLACK_MS = 5.0
"""A p99 of the new version this much above that of the old one is no news, whatever the ratio."""
COUNT_MAX = 1 << 40
BINS = 10
PER_BIN_MIN = 5
"""Samples for each bin from which on the stability index is near its limit distribution."""
COST_SAMPLES_MIN = 1_000
"""Means of engine time are compared from here on; windows carry no variance."""

Verdict = Literal["pass", "breach", "unsure"]


class GateLimits(Struct, frozen=True):
    """As declared; None: not looked at."""

    error_rate_max: float = 0.01
    p99_ratio_max: float = 1.2
    p99_sla_ms: int | None = None
    psi_max: float = 0.2
    ks_max: float = 0.1
    schema_violations_max: float = 0.0
    cost_ratio_max: float | None = None


class GateResult(Struct, frozen=True):
    """`value` is what was seen, `limit` what is allowed. Rounded, so that records stay readable."""

    gate: str
    verdict: Verdict
    value: float
    limit: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.gate} {self.value:g} (allowed {self.limit:g}{f'; {self.detail}' if self.detail else ''})"


def judge(new: VariantStats, old: VariantStats, limits: GateLimits) -> tuple[GateResult, ...]:
    """All gates that can be judged. `old`: what the stable version answered meanwhile; it may be empty."""
    return tuple(_results(new, old, limits))


def _results(new: VariantStats, old: VariantStats, limits: GateLimits) -> Iterator[GateResult]:
    if not new.samples:
        return
    yield _rate("error_rate", new.failed + new.expired, new, old.failed + old.expired, old, limits.error_rate_max)
    yield _rate(
        "schema_violations", new.schema_violations, new, old.schema_violations, old, limits.schema_violations_max
    )
    if limits.p99_sla_ms is not None and new.latency:
        # A promise that the old version does not keep either (a busy cluster) is not what the new one is judged by.
        known = p99_limit(old, 1.0, 0.0) if old.latency else 0.0
        yield _p99("p99_sla_ms", new, max(float(limits.p99_sla_ms), known))
    if new.latency and old.latency:
        yield _p99("p99_vs_stable_ms", new, p99_limit(old, limits.p99_ratio_max))
    for name in new.scores:
        if name in old.scores:
            yield _ks(name, new.scores[name], old.scores[name], limits.ks_max)
            yield _psi(name, _deciles(new.scores[name], old.scores[name]), limits.psi_max)
    for name in new.labels:
        if name in old.labels:
            bins = _categories(new.labels[name], old.labels[name])
            if all(sum(side) >= PER_BIN_MIN * len(bins) for side in zip(*bins, strict=True)):  # else it is free text
                yield _psi(name, bins, limits.psi_max)
    if limits.cost_ratio_max is not None and new.ok and old.ok and old.busy_us:
        yield _cost(new, old, limits.cost_ratio_max)


def binomial_tail(count: int, trials: int, chance: float) -> float:
    """P(X >= count) of `trials` tries that each hit with `chance`."""
    if count <= 0:
        return 1.0
    if chance <= 0.0:
        return 0.0
    if chance >= 1.0 or count <= trials * chance:
        return 1.0  # not above what is expected: no need to know exactly
    log_hit, log_miss = math.log(chance), math.log1p(-chance)
    whole = math.lgamma(trials + 1)
    total = 0.0
    for hits in range(count, trials + 1):
        term = math.exp(
            whole - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1) + hits * log_hit + (trials - hits) * log_miss
        )
        total += term
        if term < total * 1e-9:
            break
    return min(1.0, total)


def _verdict(exceeded: bool, sure: bool) -> Verdict:
    if not exceeded:
        return "pass"
    return "breach" if sure else "unsure"


def _rate(gate: str, count: int, new: VariantStats, old_count: int, old: VariantStats, limit: float) -> GateResult:
    """The new version's rate against the limit, or against that of the old one where that is worse."""
    allowed = max(limit, old_count / old.samples if old.samples else 0.0)
    rate = count / new.samples
    verdict = _verdict(rate > allowed, binomial_tail(count, new.samples, allowed) < ALPHA)
    return GateResult(gate, verdict, _short(rate), _short(allowed), f"{count} of {new.samples}")


def p99_limit(old: VariantStats, ratio: float, slack_ms: float = SLACK_MS) -> float:
    """Milliseconds: `ratio` times the largest p99 that the old version's samples are compatible with, or `slack_ms`
    more.
    """
    total = count_of(old.latency)
    spread = Z_ALPHA * math.sqrt(total * 0.99 * 0.01)
    bucket = rank_bucket(old.latency, min(total, math.ceil(0.99 * total + spread)))
    assert bucket is not None
    p99 = upper_of(bucket)
    return max(p99 * ratio, p99 + slack_ms)


def _p99(gate: str, new: VariantStats, limit_ms: float) -> GateResult:
    total = count_of(new.latency)
    slower = above(new.latency, limit_ms)
    verdict = _verdict(slower > 0.01 * total, binomial_tail(slower, total, 0.01) < ALPHA)
    p99 = quantile(new.latency, 0.99)
    assert p99 is not None
    return GateResult(gate, verdict, _short(p99), _short(limit_ms), f"{slower} of {total} slower")


def ks_distance(new: Mapping[int, int], old: Mapping[int, int]) -> float:
    """Largest difference of the two cumulative distributions."""
    n, m = count_of(new), count_of(old)
    new_below = old_below = 0
    largest = 0.0
    for bucket in sorted(new.keys() | old.keys()):
        new_below += new.get(bucket, 0)
        old_below += old.get(bucket, 0)
        largest = max(largest, abs(new_below / n - old_below / m))
    return largest


def _ks(name: str, new: Mapping[int, int], old: Mapping[int, int], limit: float) -> GateResult:
    n, m = count_of(new), count_of(old)
    distance = ks_distance(new, old)
    critical = KS_CRITICAL * math.sqrt((n + m) / (n * m))
    verdict = _verdict(distance > limit, distance > critical)
    return GateResult(f"ks:{name}", verdict, _short(distance), _short(limit), f"{n} against {m} samples")


def _deciles(new: Mapping[int, int], old: Mapping[int, int]) -> list[tuple[int, int]]:
    """(new, old) counts in bins that each hold about a tenth of the old version's scores."""
    enough = count_of(old) / BINS
    bins: list[tuple[int, int]] = []
    here = [0, 0]
    for bucket in sorted(new.keys() | old.keys()):
        here[0] += new.get(bucket, 0)
        here[1] += old.get(bucket, 0)
        if here[1] >= enough:
            bins.append((here[0], here[1]))
            here = [0, 0]
    if here != [0, 0]:
        bins.append((here[0], here[1]))
    return bins


def _categories(new: Mapping[str, int], old: Mapping[str, int]) -> list[tuple[int, int]]:
    return [(new.get(value, 0), old.get(value, 0)) for value in sorted(new.keys() | old.keys())]


def psi_of(bins: list[tuple[int, int]]) -> float:
    """Population stability index; an empty bin counts as half a sample."""
    n, m = sum(new for new, _ in bins), sum(old for _, old in bins)
    total = 0.0
    for new, old in bins:
        actual, expected = max(new, 0.5) / n, max(old, 0.5) / m
        total += (actual - expected) * math.log(actual / expected)
    return total


def _psi(name: str, bins: list[tuple[int, int]], limit: float) -> GateResult:
    n, m = sum(new for new, _ in bins), sum(old for _, old in bins)
    psi = psi_of(bins)
    noise = _chi2(max(1, len(bins) - 1)) * (1 / n + 1 / m)
    verdict = _verdict(psi > limit, psi > noise and min(n, m) >= PER_BIN_MIN * len(bins))
    return GateResult(f"psi:{name}", verdict, _short(psi), _short(limit), f"{n} against {m} samples")


def _chi2(freedom: int) -> float:
    """Its 1 - ALPHA quantile, after Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + Z_ALPHA * math.sqrt(part)) ** 3


def _cost(new: VariantStats, old: VariantStats, limit: float) -> GateResult:
    ratio = (new.busy_us / new.ok) / (old.busy_us / old.ok)
    verdict = _verdict(ratio > limit, min(new.ok, old.ok) >= COST_SAMPLES_MIN)
    detail = f"{new.busy_us / new.ok:.0f} us of an engine for each answer against {old.busy_us / old.ok:.0f}"
    return GateResult("cost", verdict, _short(ratio), _short(limit), detail)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def is_sane(stats: VariantStats) -> bool:
    """What was written to the log by others must not stop the fold: counts count something, and not beyond reason."""
    counts = [stats.ok, stats.failed, stats.expired, stats.schema_violations, stats.busy_us, stats.tokens]
    if not all(0 <= count <= COUNT_MAX for count in counts) or stats.schema_violations > stats.failed:
        return False
    tallies = [stats.latency, *stats.scores.values()]
    if not all(abs(bucket) <= BUCKET_MAX for sketch in tallies for bucket in sketch):
        return False
    numbers = [
        *(n for sketch in tallies for n in sketch.values()),
        *(n for t in stats.labels.values() for n in t.values()),
    ]
    return all(0 < count <= COUNT_MAX for count in numbers) and all([*stats.scores.values(), *stats.labels.values()])


def added(one: VariantStats, other: VariantStats) -> VariantStats:
    """What was answered in both spans."""
    return VariantStats(
        ok=one.ok + other.ok,
        failed=one.failed + other.failed,
        expired=one.expired + other.expired,
        schema_violations=one.schema_violations + other.schema_violations,
        busy_us=one.busy_us + other.busy_us,
        tokens=one.tokens + other.tokens,
        latency=sketches(one.latency, other.latency),
        scores={
            name: sketches(one.scores.get(name, {}), other.scores.get(name, {}))
            for name in _names(one.scores, other.scores)
        },
        labels={
            name: _counts(one.labels.get(name, {}), other.labels.get(name, {}))
            for name in _names(one.labels, other.labels)
        },
    )


def _names(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    return sorted(one.keys() | other.keys())


def _counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in _names(one, other)}
