"""Devices with a memory budget as metrics: who holds the bytes, and switches between models by class. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from processors.metrics.families import Family, Labels
from sie_stream.telemetry import DeviceMemorySample, DeviceSample, SwitchSample

DEVICE: Labels = ("worker", "device")
USES: tuple[tuple[str, Callable[[DeviceMemorySample], int]], ...] = (
    ("weights", lambda memory: memory.weights_bytes),
    ("kv", lambda memory: memory.kv_bytes),
    ("workspace", lambda memory: memory.workspace_bytes),
    ("free", lambda memory: memory.free_bytes),
)
TIERS: tuple[tuple[str, Callable[[DeviceMemorySample], int]], ...] = (
    ("host", lambda memory: memory.host_used_bytes),
    ("disk", lambda memory: memory.disk_used_bytes),
)
SWITCHES: tuple[tuple[str, str, Callable[[SwitchSample], float]], ...] = (
    ("sie_switches", "Switches of a device to another model.", lambda one: one.count),
    ("sie_switched_bytes", "Weights that were copied for them.", lambda one: one.size_bytes),
    ("sie_switch_seconds", "How long that took.", lambda one: one.ms / 1_000),
)


class SwitchSums:
    """What ended incarnations of one device had counted, and how the newest stands."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], float] = {}

    def incarnation_ended(self, last: DeviceSample) -> None:
        for key, value in _counted(last).items():
            self._before[key] = self._before.get(key, 0.0) + value

    def with_newest(self, sample: DeviceSample) -> dict[tuple[str, str], float]:
        """{(metric, class): value}"""
        sums = dict(self._before)
        for key, value in _counted(sample).items():
            sums[key] = sums.get(key, 0.0) + value
        return sums


def _counted(sample: DeviceSample) -> dict[tuple[str, str], float]:
    switches = sample.memory.switches if sample.memory is not None else ()
    return {(name, one.switch_class): float(read(one)) for one in switches for name, _, read in SWITCHES}


def memory_families(devices: Iterable[tuple[Labels, DeviceSample, SwitchSums]]) -> list[Family]:
    """Nothing of devices without a budget."""
    uses: list[tuple[Labels, float]] = []
    tiers: list[tuple[Labels, float]] = []
    counted: dict[str, list[tuple[Labels, float]]] = {name: [] for name, _, _ in SWITCHES}
    for key, sample, sums in devices:
        if sample.memory is not None:
            uses += [((*key, use), float(read(sample.memory))) for use, read in USES]
            tiers += [((*key, tier), float(read(sample.memory))) for tier, read in TIERS]
        for (name, switch_class), value in sums.with_newest(sample).items():
            counted[name].append(((*key, switch_class), value))
    found = [
        Family("sie_device_held_bytes", "gauge", "Of the device's budget.", (*DEVICE, "use"), tuple(sorted(uses))),
        Family("sie_image_bytes", "gauge", "Weights below the device.", (*DEVICE, "tier"), tuple(sorted(tiers))),
        *(
            Family(name, "counter", text, (*DEVICE, "class"), tuple(sorted(counted[name])))
            for name, text, _ in SWITCHES
        ),
    ]
    return [family for family in found if family.samples]
