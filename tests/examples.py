"""How much a test that draws or tries goes through, in proportion to the profile (tests/conftest.py)."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""Of profile ci."""
FEWEST = 5


def examples(count: int) -> settings:
    """Settings with `count` examples under profile ci, and as many times more or fewer as the profile in force has."""
    return settings(max_examples=_scaled(count))


def rounds(count: int) -> int:
    """How many of `count` seeds, sizes or moments a test without hypothesis tries: fewer only under profile quick."""
    return min(count, _scaled(count))


def _scaled(count: int) -> int:
    return max(min(count, FEWEST), count * settings().max_examples // USUAL)
