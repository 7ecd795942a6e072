"""What a worker with a memory budget offers for placement, and the arena it takes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from gpu_worker.edge.device_arena import DeviceArena
from gpu_worker.main import device_arenas, make_identity
from sie_stream.errors import ConfigError
from sie_stream.settings import Settings
from sie_stream.topology.records import GpuTopology

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("settings", "offered_mb"),
    [
        (Settings(cpu_memory_mb=700), 700),
        (Settings(cpu_memory_mb=700, device_memory_mb=64), 700),
        (Settings(cpu_memory_mb=700, device_memory_mb=64, host_memory_mb=900), 900),
    ],
)
def test_a_worker_with_a_budget_offers_its_host_memory(settings: Settings, offered_mb: int) -> None:
    options = argparse.Namespace(id="w0", incarnation="w0-1", backends="sklearn", tier=None)
    [device] = make_identity(options, settings, GpuTopology()).devices
    assert device.memory_bytes == offered_mb * MIB


def test_only_devices_with_a_budget_get_an_arena(tmp_path: Path) -> None:
    options = argparse.Namespace(id="w0", incarnation="w0-1", backends="sklearn", tier=None)
    without = Settings(state_dir=str(tmp_path))
    assert device_arenas(without, make_identity(options, without, GpuTopology())) == {}
    budget = Settings(state_dir=str(tmp_path), device_memory_mb=16)
    arenas = device_arenas(budget, make_identity(options, budget, GpuTopology()))
    assert {name: arena.size_bytes for name, arena in arenas.items()} == {"cpu:0": 16 * MIB}
    for arena in arenas.values():
        arena.close()


def test_an_arena_the_machine_has_no_memory_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device_memory_mb = \d+: .* not so much memory left \(\d+ MiB"):
        DeviceArena(1 << 62, tmp_path)
