"""How engine processes share one machine: priority, processors and memory, by tier and by the operator's settings."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, structs

from sie_stream.control import Device
from sie_stream.settings import Settings

ENGINE_NICE: dict[str, int] = {"": 0, "tier-0": 0, "tier-1": 10, "tier-2": 19}
"""Tier of the worker -> niceness of its engine processes.

A scorer of tier-0 needs a millisecond; an engine that generates text takes all it gets. The kernel wakes the scorer
(and hosts and broker, which stay at 0) at once when the other has a lower priority, which gets what is left.
"""
REALTIME_TIER = "tier-0"
TRIAL_LOAD_NICE = 10
LIBRARIES_BYTES = 2 * 1024**3
"""What an engine may hold on top of its device's memory: interpreter, libraries, buffers, a file while it is read."""


class EngineLimits(Struct, frozen=True):
    """What an engine process may take. Each is set as far as the machine permits."""

    nice: int = 0
    memory_bytes: int = 0
    """Private memory; an allocation beyond it fails. 0: no limit."""
    cpus: tuple[int, ...] = ()
    """Processors it may run on; none: all."""
    realtime_priority: int = 0
    """1 to 99 of the kernel's round-robin class; 0: an ordinary process."""
    load_nice: int = 0
    """Niceness, on top of `nice`, of the threads that import libraries and load models."""


def engine_limits(settings: Settings, tier: str, devices: Iterable[Device]) -> dict[str, EngineLimits]:
    """By device. Only engines of tier-0 become real-time ones, and only those of cpu devices get a memory limit by
    default: what a GPU's driver maps into the process is no memory of the host.
    """
    return {
        device.device: EngineLimits(
            nice=ENGINE_NICE[tier],
            memory_bytes=memory_limit(settings, device),
            cpus=settings.engine_cpu_numbers,
            realtime_priority=settings.engine_realtime_priority if tier == REALTIME_TIER else 0,
        )
        for device in devices
    }


def limits_on_trial(limits: EngineLimits, threads: int) -> EngineLimits:
    """Nobody waits for a version on trial to load, so what serves goes first. Its batches run like all others: its
    latency is compared. `threads`: of one batch; a pool of several would be made while loading, and stay nice.
    """
    return structs.replace(limits, load_nice=TRIAL_LOAD_NICE) if threads == 1 else limits


def memory_limit(settings: Settings, device: Device) -> int:
    """Bytes; 0: none."""
    if settings.engine_memory_limit_mb:
        return settings.engine_memory_limit_mb * 1024**2
    return device.memory_bytes + LIBRARIES_BYTES if device.kind == "cpu" else 0
