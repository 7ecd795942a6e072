"""How many examples a property test draws, in proportion to the profile (tests/conftest.py)."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""Of profile ci."""


def examples(count: int) -> settings:
    """Settings with `count` examples under profile ci, and as many times more or fewer as the profile in force has."""
    return settings(max_examples=max(1, count * settings().max_examples // USUAL))
