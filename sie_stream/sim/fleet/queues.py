"""First in, first out queues of request masses with their arrival times: where a wait is longer than a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

Cohort = tuple[float, float]
"""(when they came, ms; how many)."""
TINY = 1e-12


def put_at(queue: deque[Cohort], at_ms: float, count: float) -> None:
    """Keeps the order of arrival; what comes late in log time (of another queue) finds its place from the end."""
    if count <= TINY:
        return
    behind: list[Cohort] = []
    while queue and queue[-1][0] > at_ms:
        behind.append(queue.pop())
    if queue and queue[-1][0] == at_ms:
        queue[-1] = (at_ms, queue[-1][1] + count)
    else:
        queue.append((at_ms, count))
    queue.extend(reversed(behind))


def take(queue: deque[Cohort], most: float, now_ms: float, step_ms: float) -> Iterator[tuple[float, float, float]]:
    """Up to `most` requests from the front, at an even pace over the step: (came, how many, started)."""
    taken = 0.0
    while queue and taken < most - TINY:
        at, count = queue[0]
        part = min(count, most - taken)
        if part >= count - TINY:
            part = count
            queue.popleft()
        else:
            queue[0] = (at, count - part)
        started = now_ms + step_ms * min(1.0, (taken + 0.5 * part) / most)
        taken += part
        yield at, part, started
