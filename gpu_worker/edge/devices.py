"""The devices of a worker, and what its server is made of.

What is offered for placement is one cpu device with a declared size; CUDA devices are reported in the topology.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import structlog

from gpu_worker.edge.nvml import NvmlUnavailable, read_gpus
from sie_stream.control import Device
from sie_stream.topology.assemble import from_nvml
from sie_stream.topology.cpus import cpu_devices, parse_lscpu, parse_numactl
from sie_stream.topology.records import CpuDevice, GpuTopology
from sie_stream.topology.text import TopologyError

CPU = "cpu:0"
TOOL_TIMEOUT_S = 5.0


def find_devices(cpu_memory_mb: int) -> tuple[Device, ...]:
    """What this worker offers to the scheduler. The cpu device always exists, so everything runs without a GPU."""
    return (Device(CPU, "cpu", cpu_memory_mb * 1024 * 1024),)


def find_topology(log: structlog.stdlib.BoundLogger) -> GpuTopology:
    """The server as NVML, lscpu and numactl tell it. What is missing or unreadable is left out, and logged."""
    cpus = _find_cpus(log)
    try:
        return from_nvml(read_gpus(), cpus)
    except NvmlUnavailable as reason:
        log.info("no_gpus", reason=str(reason))
    except TopologyError as error:
        log.warning("topology_unreadable", reason=str(error))
    return GpuTopology(cpus=cpus)


def _find_cpus(log: structlog.stdlib.BoundLogger) -> tuple[CpuDevice, ...]:
    """One per NUMA node; one for the whole machine where lscpu is not to be had."""
    try:
        lscpu, numactl = _output("lscpu"), _output("numactl", "--hardware")
        if lscpu:
            return cpu_devices(parse_lscpu(lscpu), parse_numactl(numactl) if numactl else ())
    except TopologyError as error:
        log.warning("topology_unreadable", reason=str(error))
    return (CpuDevice(0, 0, f"0-{(os.cpu_count() or 1) - 1}", 0),)


def _output(tool: str, *arguments: str) -> str:
    """What the tool prints in the C locale; empty when it is not installed or fails."""
    path = shutil.which(tool)
    if path is None:
        return ""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""
