"""Families of metrics as plain records: what Prometheus calls name, kind, labels and samples. Few labels on purpose."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from msgspec import Struct

Labels = tuple[str, ...]
Kind = Literal["counter", "gauge"]

LATENCY_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Family(Struct, frozen=True):
    """One number for each combination of labels."""

    name: str
    kind: Kind
    text: str
    labels: Labels
    samples: tuple[tuple[Labels, float], ...]


class Histogram(Struct):
    """Counts by bucket (not cumulative), the last for everything above the bounds; and the sum."""

    counts: list[int]
    total: float = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(LATENCY_BOUNDS_S, value)] += 1
        self.total += value


def empty_histogram() -> Histogram:
    return Histogram([0] * (len(LATENCY_BOUNDS_S) + 1))


class HistogramFamily(Struct, frozen=True):
    """Distributions; each sample has cumulative counts by upper bound, ending with +Inf, and the sum."""

    name: str
    text: str
    labels: Labels
    samples: tuple[tuple[Labels, tuple[tuple[str, int], ...], float], ...]


def cumulative(histogram: Histogram) -> tuple[tuple[str, int], ...]:
    """(upper bound, how many are at most that)"""
    rows: list[tuple[str, int]] = []
    seen = 0
    bounds = [*(str(bound) for bound in LATENCY_BOUNDS_S), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        seen += count
        rows.append((bound, seen))
    return tuple(rows)
