"""How far a distribution moved, in one definition for the gates of a rollout and for the reports of a replay."""

from __future__ import annotations

import math
from collections.abc import Sequence


def psi_of(bins: Sequence[tuple[int, int]]) -> float:
    """Population stability index of (new, old) counts by bin: sum of (q - p) ln(q / p), an empty bin counting as half a
    sample (Siddiqi, Credit Risk Scorecards, 2006). Both have to have samples."""
    n, m = sum(new for new, _ in bins), sum(old for _, old in bins)
    total = 0.0
    for new, old in bins:
        actual, expected = max(new, 0.5) / n, max(old, 0.5) / m
        total += (actual - expected) * math.log(actual / expected)
    return total
