"""The p99 gates of a rollout: slower than the stable version, slower than promised; on a machine that has stalls.

Answers of one stall are slow together, so they are not so many independent samples. Three things follow. The limit
comes from what the stable version needed meanwhile, not only from what it needed before. A breach has to be seen in
blocks of windows in a row: in three at least, and in two thirds of all. And it has to be beyond
chance (an exact binomial tail) also without the two worst blocks, which is what one stall across a border makes.
What exceeds its limit and does not meet all three is unsure: the rollout waits, and neither promotes nor rolls back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from scheduler.counts import counted
from scheduler.verdicts import ALPHA, Z_ALPHA, GateLimits, GateResult, binomial_tail, short, verdict_of
from sie_stream.rollout_records import Sketch
from sie_stream.sketch import above, added, count_of, quantile, rank_bucket, upper_of

SLACK_MS = 5.0
"""A p99 of the new version this much above that of the old one is no news, whatever the ratio."""
SLOW_SHARE = 0.01
BLOCKS_MIN = 3
ALONE_BLOCKS_MIN = 5
"""Without concurrent answers of the stable version: a busy spell of the machine has to be outlived."""
BLOCK_SAMPLES = 100
"""From here on a block shows one slow answer in fifty with a chance of 86 %; smaller rollouts make smaller blocks."""
WORST_LEFT_OUT = 2
CONTROL_MIN = 100
"""Fewer concurrent answers of the stable version say nothing of how the machine is now."""
WINDOWS_MAX = 30
"""Of the present step, the newest; older ones are forgotten."""


class LatencyWindow(Struct, frozen=True):
    """Milliseconds that answers of one window took, of the new version and of the stable one meanwhile."""

    start_ms: int
    new: Sketch
    old: Sketch = {}


class StableLatency(Struct, frozen=True):
    """What is known of the windows of the stable version since the rollout took traffic."""

    start_ms: int = -1
    """Start of the newest one."""
    newest: Sketch = {}
    slowest_ms: float = 0.0
    """Largest p99 of any with CONTROL_MIN answers."""

    def with_window(self, start_ms: int, latency: Sketch) -> StableLatency:
        p99 = quantile(latency, 0.99) if count_of(latency) >= CONTROL_MIN else None
        return StableLatency(start_ms, latency, max(self.slowest_ms, p99 or 0.0))


def with_window(
    windows: tuple[LatencyWindow, ...], stable: StableLatency, start_ms: int, latency: Sketch
) -> tuple[LatencyWindow, ...]:
    """One more window of the new version, beside that of the stable version of the same time."""
    meanwhile = stable.newest if stable.start_ms == start_ms else {}
    return (*windows, LatencyWindow(start_ms, latency, meanwhile))[-WINDOWS_MAX:]


def judge_latency(
    windows: Sequence[LatencyWindow], old: Sketch, slowest_ms: float, limits: GateLimits
) -> Iterator[GateResult]:
    """`windows`: of the present step, oldest first. `old`, `slowest_ms`: of the stable version since the rollout began,
    all answers and the p99 of its slowest window.
    """
    if not any(window.new for window in windows):
        return
    against_old = p99_limit(windows, old, slowest_ms, limits.p99_ratio_max, SLACK_MS)
    if limits.p99_sla_ms is not None:
        promised = float(limits.p99_sla_ms)
        known = p99_limit(windows, old, slowest_ms, 1.0, 0.0)
        # A promise that the old version does not keep either (a busy cluster) is not what the new one is judged by.
        if known is not None and against_old is not None and known > promised:
            promised = max(promised, against_old)
        yield _p99("p99_sla_ms", windows, promised)
    if against_old is not None:
        yield _compared(_p99("p99_vs_stable_ms", windows, against_old), count_of(old))


def _compared(found: GateResult, answers: int) -> GateResult:
    """A handful of answers of the stable version (it had no keys, and then those of a lost worker) is no p99."""
    if found.verdict != "breach" or answers >= CONTROL_MIN:
        return found
    known = counted(answers, "answer is", "answers are")
    detail = f"{found.detail}; of the stable version {known} known, too few to compare with"
    return structs.replace(found, verdict="unsure", detail=detail)


def p99_limit(
    windows: Sequence[LatencyWindow], old: Sketch, slowest_ms: float, ratio: float, slack_ms: float
) -> float | None:
    """Milliseconds: `ratio` times what the stable version's p99 may be, or `slack_ms` more; None: it is not known.

    Its p99 meanwhile, or over the whole rollout, whichever is worse. Without enough of it meanwhile (the new version
    has all keys) nothing tells a slow version from a slow machine, so then its slowest window counts too.
    """
    meanwhile: Sketch = {}
    for window in windows:
        meanwhile = added(meanwhile, window.old)
    known = [upper_p99(sketch) for sketch in (meanwhile, old) if sketch]
    if not known:
        return None
    p99 = max(known)
    if count_of(meanwhile) < CONTROL_MIN:
        p99 = max(p99, slowest_ms)
    return max(p99 * ratio, p99 + slack_ms)


def upper_p99(latency: Sketch) -> float:
    """The largest p99 that these samples are compatible with."""
    total = count_of(latency)
    spread = Z_ALPHA * math.sqrt(total * 0.99 * 0.01)
    bucket = rank_bucket(latency, min(total, math.ceil(0.99 * total + spread)))
    assert bucket is not None
    return upper_of(bucket)


def _p99(gate: str, windows: Sequence[LatencyWindow], limit_ms: float) -> GateResult:
    counts = [(above(window.new, limit_ms), count_of(window.new)) for window in windows]
    slower, total = sum(one for one, _ in counts), sum(of for _, of in counts)
    found = blocks(counts)
    slow = [block for block in found if block[0] > SLOW_SHARE * block[1]]
    control = sum(count_of(window.old) for window in windows)
    needed = BLOCKS_MIN if control >= CONTROL_MIN else ALONE_BLOCKS_MIN
    sure = len(slow) >= needed and 3 * len(slow) >= 2 * len(found)
    if sure:
        rest = sorted(found)[:-WORST_LEFT_OUT]
        sure = binomial_tail(sum(one for one, _ in rest), sum(of for _, of in rest), SLOW_SHARE) < ALPHA
    everything: Sketch = {}
    for window in windows:
        everything = added(everything, window.new)
    p99 = quantile(everything, 0.99)
    assert p99 is not None
    detail = f"{slower} of {total} slower, in {len(slow)} of {len(found)} blocks of time"
    return GateResult(gate, verdict_of(slower > SLOW_SHARE * total, sure), short(p99), short(limit_ms), detail)


def blocks(counts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(slower, answers) of windows in a row, joined until each block has BLOCK_SAMPLES, or a sixth of all answers."""
    enough = min(BLOCK_SAMPLES, math.ceil(sum(of for _, of in counts) / (2 * BLOCKS_MIN)))
    found: list[tuple[int, int]] = []
    slower = total = 0
    for one, of in counts:
        slower, total = slower + one, total + of
        if total >= max(1, enough):
            found.append((slower, total))
            slower = total = 0
    if total and found:  # too few for a block of their own
        found[-1] = (found[-1][0] + slower, found[-1][1] + total)
    return found
