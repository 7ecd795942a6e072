"""Limits of engine processes: what follows from tier and settings, and the files of a cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from gpu_worker.edge.cgroup import EngineGroups
from gpu_worker.isolation import LIBRARIES_BYTES, engine_limits
from sie_stream.control import Device
from sie_stream.errors import ConfigError
from sie_stream.settings import Settings, settings_from

DEVICES = (Device("cpu:0", "cpu", 4 << 30), Device("cuda:0", "cuda", 80 << 30))


def test_a_cpu_device_limits_its_engines_and_a_gpu_does_not() -> None:
    limits = engine_limits(Settings(), "", DEVICES)
    assert limits["cpu:0"].memory_bytes == (4 << 30) + LIBRARIES_BYTES
    assert limits["cuda:0"].memory_bytes == 0
    limits = engine_limits(Settings(engine_memory_limit_mb=512), "", DEVICES)
    assert [one.memory_bytes for one in limits.values()] == [512 << 20, 512 << 20]


def test_only_tier_0_runs_in_real_time_and_lower_tiers_give_way() -> None:
    settings = settings_from({"engine_realtime_priority": "10", "engine_cpus": "0-2,5"})
    assert settings.engine_cpu_numbers == (0, 1, 2, 5)
    seen = {tier: engine_limits(settings, tier, DEVICES[:1])["cpu:0"] for tier in ("", "tier-0", "tier-1", "tier-2")}
    assert [(one.realtime_priority, one.nice) for one in seen.values()] == [(0, 0), (10, 0), (0, 10), (0, 19)]
    assert {one.cpus for one in seen.values()} == {(0, 1, 2, 5)}


@pytest.mark.parametrize("text", ["a", "3-1", "1-", "-2", "1,,x"])
def test_processors_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="setting engine_cpus"):
        settings_from({"engine_cpus": text})


def delegated(folder: Path, controllers: str = "cpu memory") -> Path:
    """As the kernel shows a group that is handed on: files that are there from the start."""
    (folder / "cgroup.controllers").write_text(f"{controllers}\n")
    (folder / "cgroup.subtree_control").write_text("")
    return folder


def test_an_engine_gets_a_group_with_its_limit(tmp_path: Path) -> None:
    groups = EngineGroups(delegated(tmp_path), "w0", structlog.get_logger())
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    group = groups.hold(4711, 1 << 30)
    assert group is not None
    folder = tmp_path / "w0-4711"
    assert (folder / "memory.max").read_text() == str(1 << 30)
    assert (folder / "cgroup.procs").read_text() == "4711"
    assert not (folder / "memory.swap.max").exists(), "a kernel without swap has no such file"
    assert group.oom_kills() == 0
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 2\noom_group_kill 1\n")
    assert group.oom_kills() == 2
    assert not group.remove(), "the kernel keeps it while something is in it"
    for file in list(folder.iterdir()):
        file.unlink()
    assert group.remove()
    assert group.remove(), "gone is gone"


def test_a_folder_that_is_no_cgroup_or_hands_no_memory_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_cgroup.*No such file"):
        EngineGroups(tmp_path, "w0", structlog.get_logger())
    with pytest.raises(ConfigError, match="no memory controller"):
        EngineGroups(delegated(tmp_path, "cpu pids"), "w0", structlog.get_logger())


def test_an_engine_runs_without_a_group_when_the_kernel_refuses(tmp_path: Path) -> None:
    groups = EngineGroups(delegated(tmp_path), "w0", structlog.get_logger())
    (tmp_path / "w0-9").write_text("in the way")
    assert groups.hold(9, 1) is None
