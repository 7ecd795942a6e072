"""Waiting for something to become true, instead of sleeping and hoping. The only place in tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from sie_stream.deadline import Deadline

T = TypeVar("T")
PATIENCE_S = 180.0
"""How long a test waits for what has to come. It says nothing of how quick that should be: where too much runs, a
process may take a minute to start. Less than the limit of pytest, so that the test fails with words."""
PATIENCE_MS = int(1000 * PATIENCE_S)
POLL_S = 0.02
POLL_MAX_S = 0.5


def within(seconds: float) -> Deadline:
    """A deadline on the monotonic clock, as the edges take it."""
    return Deadline.after(time.monotonic_ns() // 1_000_000, int(seconds * 1000))


def wait_until(probe: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first truthy answer of `probe`. Fails the test with `what` and the last answer when time is up.

    Sleeps as long as the probe took, up to POLL_MAX_S: one that reads whole topics would take the processor from what
    is waited for.
    """
    end = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        answer = probe()
        if answer:
            return answer
        now = time.monotonic()
        if now > end:
            raise AssertionError(f"waited {timeout_s:g} s for {what}; last answer: {answer!r}")
        time.sleep(min(max(POLL_S, now - asked), POLL_MAX_S))
