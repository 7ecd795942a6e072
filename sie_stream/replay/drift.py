"""How a distribution of scores moved: samples of bounded size, PSI, Kolmogorov-Smirnov, histograms.

PSI over the tenths of the first sample (sie_stream/drift.py); the two-sample Kolmogorov-Smirnov distance is the
largest gap between the two empirical distributions.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from sie_stream.drift import psi_of

SAMPLE_MAX = 32_768
PSI_BINS = 10


class Sample:
    """Pairs of numbers, before and after, in bounded memory: when full, every second one goes, and from then on only
    every second (fourth, eighth ...) one comes in. No chance in it, so the same records give the same report.
    """

    def __init__(self, size_max: int = SAMPLE_MAX) -> None:
        self.before = array("d")
        self.after = array("d")
        self.seen = 0
        self._size_max = size_max
        self._stride = 1

    def add(self, before: float, after: float) -> None:
        if self.seen % self._stride == 0:
            self.before.append(before)
            self.after.append(after)
            if len(self.before) >= self._size_max:
                self.before, self.after = self.before[::2], self.after[::2]
                self._stride *= 2
        self.seen += 1


def psi(before: Sequence[float], after: Sequence[float], bins: int = PSI_BINS) -> float:
    """Population stability index; 0 for equal samples, and when one is empty. Above 0.2 counts as a shift."""
    if not before or not after:
        return 0.0
    ordered = sorted(before)
    edges = sorted({ordered[len(ordered) * number // bins] for number in range(1, bins)})
    return psi_of(list(zip(_counted(after, edges), _counted(before, edges), strict=True)))


def _counted(values: Sequence[float], edges: list[float]) -> list[int]:
    counts = [0] * (len(edges) + 1)
    for value in values:
        counts[bisect_right(edges, value)] += 1
    return counts


def ks(before: Sequence[float], after: Sequence[float]) -> float:
    """Largest distance between the two empirical distributions, 0 to 1; 0 when one is empty."""
    if not before or not after:
        return 0.0
    one, other = sorted(before), sorted(after)
    largest, at, beside = 0.0, 0, 0
    while at < len(one) and beside < len(other):
        value = min(one[at], other[beside])
        while at < len(one) and one[at] <= value:
            at += 1
        while beside < len(other) and other[beside] <= value:
            beside += 1
        largest = max(largest, abs(at / len(one) - beside / len(other)))
    return largest


class Histogram(Struct, frozen=True):
    """Counts of both samples in the same equal bins from `low` to `high`."""

    low: float
    high: float
    before: tuple[int, ...]
    after: tuple[int, ...]


def histogram(before: Sequence[float], after: Sequence[float], bins: int = 24, tail: float = 0.0) -> Histogram:
    """`tail`: this share of the largest values is counted in the last bin, lest one straggler flatten the rest."""
    both = sorted([*before, *after])
    if not both:
        return Histogram(0.0, 1.0, (0,) * bins, (0,) * bins)
    low, high = both[0], both[min(len(both) - 1, int(len(both) * (1 - tail)))]
    if high <= low:
        high = low + 1.0
    return Histogram(low, high, _counts(before, low, high, bins), _counts(after, low, high, bins))


def _counts(values: Sequence[float], low: float, high: float, bins: int) -> tuple[int, ...]:
    counts = [0] * bins
    width = (high - low) / bins
    for value in values:
        counts[min(bins - 1, int((value - low) / width))] += 1
    return tuple(counts)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Scored(Struct, frozen=True, gc=False):
    score: float | None = None
    label: str | None = None


_scored = msgspec.json.Decoder(_Scored)


def score_and_label(outputs: bytes | None) -> tuple[float | None, str | None]:
    """`score` and `label` of an outputs object; without a score its first number, by sorted names."""
    if outputs is None:
        return None, None
    try:
        found = _scored.decode(outputs)
        if found.score is not None or found.label is not None:
            return found.score, found.label
    except msgspec.DecodeError:
        pass  # other fields, or these with other types: look for any number
    try:
        return _first_number(msgspec.json.decode(outputs)), None
    except msgspec.DecodeError:
        return None, None


def _first_number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    items = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
    if isinstance(items, list):
        for item in items:
            found = _first_number(item)
            if found is not None:
                return found
    return None
