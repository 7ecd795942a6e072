"""Virtual time: what happens when, in order of time and, at one time, of planning."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Events:
    """Milliseconds. What is planned while running is run as well, when its time is within reach."""

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, at_ms: float, do: Callable[[], None]) -> None:
        """Not before now."""
        heapq.heappush(self._heap, (max(self.now_ms, round(at_ms)), self._planned, do))
        self._planned += 1

    def after(self, wait_ms: float, do: Callable[[], None]) -> None:
        self.at(self.now_ms + wait_ms, do)

    def every(self, period_ms: int, do: Callable[[], None]) -> None:
        """Now and then again and again."""

        def again() -> None:
            do()
            self.after(period_ms, again)

        self.after(0, again)

    def run_until(self, until_ms: int) -> None:
        """Everything that is due before `until_ms`; then it is that time."""
        while self._heap and self._heap[0][0] < until_ms:
            at_ms, _, do = heapq.heappop(self._heap)
            self.now_ms = at_ms
            do()
        self.now_ms = until_ms
