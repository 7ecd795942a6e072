"""Processor time and memory of processes, as the kernel counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import psutil


class Usage:
    """Seconds of processor time that groups of processes have used since this was made, without their children."""

    def __init__(self, groups: Mapping[str, Sequence[int]]) -> None:
        self._groups = {name: list(pids) for name, pids in groups.items()}
        self._start = self._now()

    def seconds(self) -> dict[str, float]:
        """{group: seconds}. Processes that ended in between count with what they had used at the start: nothing."""
        now = self._now()
        return {name: max(0.0, now[name] - self._start[name]) for name in self._groups}

    def _now(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._groups.items()}


def family(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all their children, each once, as far as they live."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                found[one.pid] = one
        except psutil.NoSuchProcess:
            continue
    return list(found.values())


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads, also of those that ended; 0 once the process is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def resident_mb(pid: int) -> float:
    """Resident memory of one process, without its children."""
    return psutil.Process(pid).memory_info().rss / (1024 * 1024)
