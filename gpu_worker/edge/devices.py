"""The devices of a worker. Now: one cpu device with a declared size; CUDA devices (pynvml) join the same list later."""

from __future__ import annotations

from sie_stream.control import Device

CPU = "cpu:0"


def find_devices(cpu_memory_mb: int) -> tuple[Device, ...]:
    """What this worker offers to the scheduler. The cpu device always exists, so everything runs without a GPU."""
    return (Device(CPU, "cpu", cpu_memory_mb * 1024 * 1024),)
