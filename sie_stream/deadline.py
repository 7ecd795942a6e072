"""One time budget shared by all steps of an operation."""

from __future__ import annotations

from typing import NamedTuple


class Deadline(NamedTuple):
    """A moment on some clock, in milliseconds; the caller says what time it is."""

    at_ms: int

    @classmethod
    def after(cls, now_ms: int, budget_ms: int) -> Deadline:
        return cls(now_ms + budget_ms)

    def remaining_ms(self, now_ms: int) -> int:
        return max(0, self.at_ms - now_ms)

    def passed(self, now_ms: int) -> bool:
        return now_ms >= self.at_ms
