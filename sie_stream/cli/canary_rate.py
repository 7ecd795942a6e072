"""The rate that a machine carries with room for a second version: where waiting begins, and half of that."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

RATES = (100, 200, 400, 800, 1_600, 3_200)
"""Requests per second, tried in this order."""
SLOWER = 2.0
"""From so many times the p90 of the lowest rate on, requests wait for each other. Not their p99: in a few seconds that
is one pause of the broker's garbage collector more or less.
"""
ANSWERED = 0.95
"""Of the requests that a carried rate sends, so many are answered in the same time."""
ROOM = 2
"""A rollout doubles the transactions at worst: both versions commit on their own."""


class Tried(Struct, frozen=True):
    """What was seen at one rate."""

    rate: int
    p90_ms: float
    answered: float
    """Answers by requests."""


def next_rate(tried: Sequence[Tried]) -> int | None:
    """What to try after these; None when there is no need."""
    if len(tried) == len(RATES) or (tried and not carried(tried[-1], tried[0])):
        return None
    return RATES[len(tried)]


def carried(one: Tried, lowest: Tried) -> bool:
    """Whether requests do not wait for each other at that rate."""
    return one.answered >= ANSWERED and one.p90_ms <= SLOWER * lowest.p90_ms


def rate_with_room(tried: Sequence[Tried]) -> int:
    """Half of the highest rate that was carried; of the lowest if none was."""
    highest = max((one.rate for one in tried if carried(one, tried[0])), default=RATES[0])
    return highest // ROOM
