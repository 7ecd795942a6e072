"""Whether a preempted sequence's keys and values are kept in host memory or computed again; and how much is kept.

Copying costs bytes both ways; computing costs tokens. Both rates are measured while the model works, because which one
is cheaper depends on the model, on the device and on how long the sequence is (vLLM, arXiv:2309.06180, section 7.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from gpu_worker.decoding.sequence import Chunk

SMOOTHING = 0.2
MEASURABLE_MS = 0.05
"""Shorter times say nothing."""


class Rates(Struct, frozen=True):
    """What a device does in a millisecond. The defaults hold until something was measured."""

    copied_bytes: float = 1_000_000.0
    computed_tokens: float = 1.0

    def after_copy(self, count: int, ms: float) -> Rates:
        """`count` bytes went one way in `ms`."""
        return Rates(_smoothed(self.copied_bytes, count, ms), self.computed_tokens)

    def after_step(self, count: int, ms: float) -> Rates:
        """`count` tokens of prompts and answers were computed in `ms`."""
        return Rates(self.copied_bytes, _smoothed(self.computed_tokens, count, ms))


def _smoothed(rate: float, count: int, ms: float) -> float:
    return rate if ms < MEASURABLE_MS or count <= 0 else rate + SMOOTHING * (count / ms - rate)


def cheaper(tokens: int, size: int, rates: Rates) -> Literal["swap", "recompute"]:
    """For a sequence of `tokens` whose keys and values are `size` bytes. Equal costs: swap, which loses nothing."""
    return "swap" if 2 * size / rates.copied_bytes <= tokens / rates.computed_tokens else "recompute"


class SwapLimits(Struct, frozen=True):
    """blocks_max: how many are kept at once. block_bytes: of one."""

    blocks_max: int
    block_bytes: int


NO_SWAP = SwapLimits(0, 0)


class SwapSpace:
    """Counts the blocks that are kept; never sees the memory."""

    def __init__(self, limits: SwapLimits) -> None:
        self._limits = limits
        self._rates = Rates()
        self.used = 0
        """Blocks."""
        self.swaps = 0

    def take(self, tokens: int, blocks: int) -> bool:
        """Whether a sequence with so many computed tokens in so many blocks is kept; its blocks count from now on."""
        if not blocks or self.used + blocks > self._limits.blocks_max:
            return False
        if cheaper(tokens, blocks * self._limits.block_bytes, self._rates) == "recompute":
            return False
        self.used += blocks
        self.swaps += 1
        return True

    def give_back(self, blocks: int) -> None:
        self.used -= blocks

    def copied(self, size: int, ms: float) -> None:
        """So many bytes went one way in so long."""
        self._rates = self._rates.after_copy(size, ms)

    def stepped(self, chunks: Sequence[Chunk], ms: float) -> None:
        """Only steps with chunks of prompts tell how fast tokens are computed again: they are computed in chunks."""
        if any(chunk.count > 1 for chunk in chunks):
            self._rates = self._rates.after_step(sum(chunk.count for chunk in chunks), ms)
