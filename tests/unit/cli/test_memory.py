"""What `sie-stream memory` draws of a few samples."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sie_stream.cli.memory import BAR, NO_BUDGET, bar, chosen, device_row, picture
from sie_stream.errors import ConfigError
from sie_stream.telemetry import DeviceMemorySample, DeviceSample, ModelMemory, SwitchSample

MIB = 1024 * 1024


def device(worker: str = "w0", held: DeviceMemorySample | None = None) -> DeviceSample:
    return DeviceSample(worker, f"{worker}-1", "cpu:0", 1_000, 1_000, 0, 4_096 * MIB, memory=held)


def map_of(weights: int = 600, kv: int = 256, workspace: int = 32, free: int = 136) -> DeviceMemorySample:
    models = (
        ModelMemory("minilm", "1", "host", 88 * MIB, 0, "host"),
        ModelMemory("churn", "2", "device", MIB, 0, ""),
        ModelMemory("smollm2", "1", "device", 599 * MIB, 599, "disk"),
        ModelMemory("rare", "1", "disk", 20 * MIB, 0, "disk"),
    )
    switches = (SwitchSample("resident", 7), SwitchSample("host", 2, 176 * MIB, 50.0, 30.0), SwitchSample("disk"))
    total = weights + kv + workspace + free
    sizes = (weights * MIB, kv * MIB, workspace * MIB, free * MIB)
    below = (4_096 * MIB, 88 * MIB, 619 * MIB)
    return DeviceMemorySample(total * MIB, MIB, *sizes, *below, models, switches)


def drawn(*samples: DeviceSample) -> str:
    console = Console(width=120, record=True, file=None)
    with console.capture() as capture:
        console.print(picture(list(samples)))
    return capture.get()


def test_the_map_names_who_holds_what_and_who_waits_where() -> None:
    lines = drawn(device(held=map_of())).splitlines()
    assert lines[0] == "w0 cpu:0: 1024.0 MB, pages of 1024 KiB"
    assert lines[1].strip() == "#" * 37 + "k" * 15 + "w" + "." * 7
    assert lines[2].strip() == "# weights 600.0 MB, k kv 256.0 MB, w workspace 32.0 MB, . free 136.0 MB"
    assert lines[3].strip() == "below: 88.0 of 4096.0 MB of the host, 619.0 MB on the disk"
    rows = [line.split() for line in lines[6:10]]
    assert [row[0] for row in rows] == ["smollm2", "churn", "minilm", "rare"]
    assert rows[0][2:] == ["device", "599.0", "599", "disk"]
    assert rows[1][2:] == ["device", "1.0", "-", "never", "leaves"]
    assert [line.split() for line in lines[-2:]] == [
        ["host", "2", "176.0", "25.0", "30.0"],
        ["disk", "0", "0.0", "-", "-"],
    ]


@pytest.mark.parametrize("parts", [(1024, 0, 0, 0), (0, 0, 0, 1024), (1, 1, 1, 1021), (340, 342, 1, 341)])
def test_the_bar_is_always_as_long(parts: tuple[int, int, int, int]) -> None:
    held = map_of(*parts)
    assert len(bar(held)) == BAR
    for sign, size in zip("#kw.", parts, strict=True):
        assert (bar(held).count(sign) > 0) == (size > 0)


def test_devices_without_a_budget_are_left_out_and_it_says_how_to_set_one() -> None:
    found = chosen([device("w0"), device("w1", map_of())], "")
    assert [one.worker for one in found] == ["w1"]
    assert "".join(drawn().split()) == "".join(NO_BUDGET.split())


def test_a_worker_that_is_not_there_is_told_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"--worker: 'w11' has told nothing.*Workers: w0, w1\."):
        chosen([device("w0"), device("w1", map_of())], "w11")


def test_json_has_all_of_it_in_bytes() -> None:
    row = json.loads(json.dumps(device_row(device(held=map_of()))))
    assert row["weights_bytes"] + row["kv_bytes"] + row["workspace_bytes"] + row["free_bytes"] == row["total_bytes"]
    assert [one["model"] for one in row["models"]] == ["smollm2", "churn", "minilm", "rare"]
    assert row["switches"][1] == {
        "switch_class": "host",
        "count": 2,
        "size_bytes": 176 * MIB,
        "ms": 50.0,
        "ms_max": 30.0,
    }
