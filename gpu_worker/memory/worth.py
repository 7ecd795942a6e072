"""What keeping a model where it is saves: how likely it is wanted again, times what bringing it back costs, per byte.

Likelihood is a count of uses that halves every HALF_LIFE_MS, so it is least recently used between models that are used
alike, and least frequently used otherwise (LRFU: D. Lee et al., IEEE Trans. Computers 50(12), 2001). Dividing by the
size is GreedyDual-Size (P. Cao, S. Irani, USITS 1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HALF_LIFE_MS = 60_000.0
DISK_COST = 8.0
"""Bringing a byte back from a disk takes so many times as long as from host memory."""


class Likelihood:
    """Uses of one model, those of long ago counting less."""

    __slots__ = ("_at_ms", "_count")

    def __init__(self, at_ms: float) -> None:
        self._count = 0.0
        self._at_ms = at_ms

    def used(self, at_ms: float) -> None:
        self._count = self.at(at_ms) + 1.0
        self._at_ms = at_ms

    def at(self, at_ms: float) -> float:
        return self._count * 2.0 ** (-max(0.0, at_ms - self._at_ms) / HALF_LIFE_MS)


class Candidate(NamedTuple):
    """A model that may give way. size: what that frees. worth: of all of it, see above."""

    slot: int
    size: int
    worth: float

    @property
    def density(self) -> float:
        return self.worth / max(1, self.size)


def giving_way(candidates: Sequence[Candidate], wanted: int) -> tuple[int, ...] | None:
    """Slots that free at least `wanted` bytes, the least worth per byte first, and none that could stay; None: all of
    them are too little. Of what the first pass took, the most valuable stay that are not needed.
    """
    if wanted <= 0:
        return ()
    taken: list[Candidate] = []
    freed = 0
    for candidate in sorted(candidates, key=lambda one: (one.density, one.slot)):
        if candidate.size <= 0:
            continue
        taken.append(candidate)
        freed += candidate.size
        if freed >= wanted:
            break
    if freed < wanted:
        return None
    for candidate in sorted(taken, key=lambda one: (-one.worth, -one.size, one.slot)):
        if freed - candidate.size >= wanted:
            taken.remove(candidate)
            freed -= candidate.size
    return tuple(candidate.slot for candidate in taken)
