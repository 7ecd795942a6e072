"""Gates of a rollout: what a new version may do worse than the old one, judged with regard to the number of samples.

Every gate says pass, breach or unsure. Breach: the limit is exceeded, and so much that chance would do it in less than
one of 10,000 looks (ALPHA). Unsure: the limit is exceeded, but chance could have done it; the rollout waits for more
samples. So a slow answer among fifty stops nothing, and a real fault is not outvoted by few samples. A gate that only
reports says `differs` where another one would be breached.

Rates: exact binomial tail, and where the old version exceeds the limit itself, that of the two compared. p99: see
latency_gates.py. Scores: Kolmogorov-Smirnov distance with its critical value c(ALPHA) sqrt((n+m)/nm); population
stability index over the deciles of the stable version, whose expected value under no change is about chi2 (1/n + 1/m)
(Yurdakul 2018). Both take answers as independent, which those
of a handful of keys with scores of their own are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import structs

from scheduler.latency_gates import LatencyWindow, judge_latency
from scheduler.verdicts import ALPHA, Z_ALPHA, GateLimits, GateResult, binomial_tail, short, verdict_of
from sie_stream.drift import psi_of
from sie_stream.rollout_records import VariantStats
from sie_stream.sketch import BUCKET_MAX, count_of
from sie_stream.sketch import added as sketches

KS_CRITICAL = 2.225
"""sqrt(-ln(ALPHA / 2) / 2)."""
FIELDS_MAX, VALUES_MAX, NAME_CHARS_MAX = 64, 256, 256
"""More than any honest window has (processors/outcomes/windows.py)."""
COUNT_MAX = 1 << 40
BINS = 10
PER_BIN_MIN = 5
"""Samples for each bin from which on the stability index is near its limit distribution."""
COST_SAMPLES_MIN = 1_000
"""Means of engine time are compared from here on; windows carry no variance."""


def judge(
    new: VariantStats,
    old: VariantStats,
    limits: GateLimits,
    windows: Sequence[LatencyWindow] = (),
    slowest_ms: float = 0.0,
) -> tuple[GateResult, ...]:
    """All gates that can be judged. `old`: what the stable version answered since the rollout began; it may be empty.
    `windows`: the latencies of both in the present step; `slowest_ms`: p99 of the slowest window of the old version.
    """
    found = _results(new, old, limits, windows, slowest_ms)
    return tuple(_told(result) if limits.only_reports(result.gate) else result for result in found)


def _told(result: GateResult) -> GateResult:
    return structs.replace(result, verdict="differs") if result.verdict == "breach" else result


def _results(
    new: VariantStats,
    old: VariantStats,
    limits: GateLimits,
    windows: Sequence[LatencyWindow],
    slowest_ms: float,
) -> Iterator[GateResult]:
    if not new.samples:
        return
    yield _rate("error_rate", new.failed + new.expired, new, old.failed + old.expired, old, limits.error_rate_max)
    yield _rate(
        "schema_violations", new.schema_violations, new, old.schema_violations, old, limits.schema_violations_max
    )
    yield from judge_latency(windows, old.latency, slowest_ms, limits)
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


def _rate(gate: str, count: int, new: VariantStats, old_count: int, old: VariantStats, limit: float) -> GateResult:
    """The new version's rate against the limit. Where the old one exceeds it too, only what is worse than that counts:
    of the failures of both, the new version has more than its part of the answers (the exact test of two rates).
    """
    old_rate = old_count / old.samples if old.samples else 0.0
    rate, allowed = count / new.samples, max(limit, old_rate)
    chance = binomial_tail(count, new.samples, limit)
    if old_rate > limit:
        chance = max(chance, binomial_tail(count, count + old_count, new.samples / (new.samples + old.samples)))
    return GateResult(
        gate, verdict_of(rate > allowed, chance < ALPHA), short(rate), short(allowed), f"{count} of {new.samples}"
    )


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
    verdict = verdict_of(distance > limit, distance > critical)
    return GateResult(f"ks:{name}", verdict, short(distance), short(limit), f"{n} against {m} samples")


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


def _psi(name: str, bins: list[tuple[int, int]], limit: float) -> GateResult:
    n, m = sum(new for new, _ in bins), sum(old for _, old in bins)
    psi = psi_of(bins)
    noise = _chi2(max(1, len(bins) - 1)) * (1 / n + 1 / m)
    verdict = verdict_of(psi > limit, psi > noise and min(n, m) >= PER_BIN_MIN * len(bins))
    return GateResult(f"psi:{name}", verdict, short(psi), short(limit), f"{n} against {m} samples")


def _chi2(freedom: int) -> float:
    """Its 1 - ALPHA quantile, after Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + Z_ALPHA * math.sqrt(part)) ** 3


def _cost(new: VariantStats, old: VariantStats, limit: float) -> GateResult:
    ratio = (new.busy_us / new.ok) / (old.busy_us / old.ok)
    verdict = verdict_of(ratio > limit, min(new.ok, old.ok) >= COST_SAMPLES_MIN)
    detail = f"{new.busy_us / new.ok:.0f} us of an engine for each answer against {old.busy_us / old.ok:.0f}"
    return GateResult("cost", verdict, short(ratio), short(limit), detail)


def is_sane(stats: VariantStats) -> bool:
    """What was written to the log by others must not stop the fold: counts count something, and not beyond reason."""
    counts = [stats.ok, stats.failed, stats.expired, stats.schema_violations, stats.busy_us, stats.tokens]
    parts = stats.schema_violations <= stats.failed and 0 <= stats.pinned <= stats.samples
    if not all(0 <= count <= COUNT_MAX for count in counts) or not parts:
        return False
    names = [*stats.scores, *stats.labels, *(value for tally in stats.labels.values() for value in tally)]
    if len(stats.scores) + len(stats.labels) > 2 * FIELDS_MAX or any(len(name) > NAME_CHARS_MAX for name in names):
        return False
    if any(len(tally) > VALUES_MAX for tally in stats.labels.values()):
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
        pinned=one.pinned + other.pinned,
    )


def _names(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Those of both; what is new beyond VALUES_MAX is left out, or windows of ever other values would pile up."""
    return sorted(one) + sorted(other.keys() - one.keys())[: max(0, VALUES_MAX - len(one))]


def _counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in _names(one, other)}
