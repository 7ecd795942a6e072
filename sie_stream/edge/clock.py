"""The real clocks."""

from __future__ import annotations

import time


class SystemClock:
    """Implements ports.Clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000.0
