"""Waiting for something to become true, instead of sleeping and hoping. The only place in tests that sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from sie_stream.deadline import Deadline

T = TypeVar("T")
POLL_S = 0.02


def within(seconds: float) -> Deadline:
    """A deadline on the monotonic clock, as the edges take it."""
    return Deadline.after(time.monotonic_ns() // 1_000_000, int(seconds * 1000))


def wait_until(probe: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """The first truthy answer of `probe`. Fails the test with `what` and the last answer when time is up."""
    end = time.monotonic() + timeout_s
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited {timeout_s:g} s for {what}; last answer: {answer!r}")
        time.sleep(POLL_S)
