"""Whole numbers that add up: shares of a total in proportion to weights."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` in proportion to `weights`, none below 0, by the largest remainder (Hamilton's method).

    Ties go to the first. Weights that are all 0 count as equal. Empty for no weights.
    """
    if not weights:
        return ()
    whole = sum(weights)
    exact = [weight * total / whole for weight in weights] if whole > 0 else [total / len(weights)] * len(weights)
    shares = [int(share) for share in exact]
    order = sorted(range(len(shares)), key=lambda place: (shares[place] - exact[place], place))
    for place in order[: total - sum(shares)]:
        shares[place] += 1
    return tuple(shares)
