"""Signs of life of a Kafka client that owns nothing better to tell whether it still reaches anybody.

librdkafka 2.16 can go deaf for good when a lone broker was missing from its own metadata for a moment: it connects,
reports nothing and asks no more. Only a new client helps, so the process ends and its supervisor starts a new one.
A reader of chosen partitions knows where it stands, and goes on with a new client by itself (kafka_hearing.py).
"""

from __future__ import annotations

import time

from sie_stream.errors import FatalLogError

SILENCE_S = 30.0
"""Longer than any election, restart or rebalance that heals by itself."""
LOOK_EVERY_S = 1.0


class Pulse:
    """Remembers when `what` last worked. The owner says so; `check` raises when that was too long ago."""

    def __init__(self, what: str, silence_s: float = SILENCE_S) -> None:
        self._what = what
        self._silence_s = silence_s
        self._alive_at = time.monotonic()

    def alive(self) -> None:
        self._alive_at = time.monotonic()

    def look_due(self) -> bool:
        """Whether it is worth looking for a sign of life: the last one is a second old."""
        return time.monotonic() - self._alive_at >= LOOK_EVERY_S

    def check(self) -> None:
        """Raises FatalLogError after `silence_s` without a sign of life."""
        silent_s = time.monotonic() - self._alive_at
        if silent_s > self._silence_s:
            raise FatalLogError(f"{self._what} for {silent_s:.0f} s; this client does not recover, a new one may")
