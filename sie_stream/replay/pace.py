"""How fast a replay may go, so that it takes no more than it is given."""

from __future__ import annotations

import re

from msgspec import Struct

from sie_stream.errors import ConfigError

_SPEED = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(x?)", re.ASCII)


class Pace(Struct, frozen=True):
    """At most `per_s` records each second, or `factor` times as fast as the records came; 0: no limit of that kind."""

    per_s: float = 0.0
    factor: float = 0.0

    def due_ms(self, count: int, first_at_ms: int, at_ms: int) -> float:
        """Milliseconds after the start at which record number `count` (from 0), written at `at_ms`, may start."""
        due = 0.0
        if self.per_s:
            due = count * 1_000.0 / self.per_s
        if self.factor:
            due = max(due, (at_ms - first_at_ms) / self.factor)
        return due


CREDIT_MS = 100.0
"""How far a replay may run behind its pace and catch up: sleeps are a little longer than asked."""


class Pacer:
    """Holds records to a pace from the first of them on. Time that was lost, as to an engine that had to start, is not
    made up for: a limit is a limit in every second."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._count = 0
        self._started_ms = 0.0
        self._first_at_ms = 0

    def start_ms(self, now_ms: float, at_ms: int) -> float:
        """When the next record, written at `at_ms`, may start, on the clock of `now_ms`."""
        if not self._count:
            self._started_ms, self._first_at_ms = now_ms, at_ms
        due_ms = self._pace.due_ms(self._count, self._first_at_ms, at_ms)
        self._count += 1
        self._started_ms = max(self._started_ms, now_ms - due_ms - CREDIT_MS)
        return self._started_ms + due_ms


def parse_speed(text: str) -> Pace:
    """`500` records/s, `2x` the original pace, empty for as fast as it goes. Raises ConfigError."""
    if not text:
        return Pace()
    found = _SPEED.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(
            f"--speed {text!r}: allowed are records per second (500) or the original pace (1x, 0.5x, 10x)"
        )
    number = float(found[1])
    return Pace(factor=number) if found[2] else Pace(per_s=number)
