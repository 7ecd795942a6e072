"""What an engine process does to itself before it loads anything: priority, processors, memory.

What this machine does not permit is said on standard error, which is the log of the worker, and does without.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpu_worker.isolation import EngineLimits
from sie_stream.edge.priority import lower_priority


def apply_limits(limits: EngineLimits) -> None:
    """Children inherit processors and priority; servers that an engine starts have their own memory limits."""
    lower_priority(limits.nice)
    if limits.cpus:
        _permitted("on processors " + ",".join(map(str, limits.cpus)), lambda: os.sched_setaffinity(0, limits.cpus))
    if limits.realtime_priority:
        priority = os.sched_param(limits.realtime_priority)
        _permitted("with real-time priority", lambda: os.sched_setscheduler(0, os.SCHED_RR, priority))
    if limits.memory_bytes:
        _permitted(f"with a limit of {limits.memory_bytes} bytes", lambda: limit_memory(limits.memory_bytes))


def limit_memory(limit_bytes: int) -> None:
    """Allocations that would take private writable memory beyond it fail (RLIMIT_DATA: heap and anonymous mappings,
    since Linux 4.7). A file that is mapped read-only is not counted; one that is mapped to be written to is, although
    nothing is allocated before it is written: see room_for_mapping.
    """
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def room_for_mapping(size_bytes: int) -> Iterator[None]:
    """The limit of this process is higher by `size_bytes` inside, for libraries that map files so that they can be
    written to. What they mapped must be let go inside, too. For one thread at a time: that which loads models.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    raised = soft + size_bytes if hard == resource.RLIM_INFINITY else min(soft + size_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (raised, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused. torch says it with a RuntimeError of its own."""
    text = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in text or type(error).__name__ == "OutOfMemoryError"


def _permitted(what: str, change: Callable[[], None]) -> None:
    try:
        change()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"engine: not {what}: {error}\n")
