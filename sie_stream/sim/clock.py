"""Time that only moves when the simulator says so."""

from __future__ import annotations


class SimClock:
    """Implements ports.Clock. Both clocks advance together, in whole milliseconds."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._start_ms = start_ms
        self._now_ms = start_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> float:
        return float(self._now_ms - self._start_ms)

    def advance(self, ms: int) -> None:
        assert ms >= 0, ms
        self._now_ms += ms

    def advance_to(self, at_ms: int) -> None:
        """Move to `at_ms`; nothing happens when that is in the past."""
        self._now_ms = max(self._now_ms, at_ms)
