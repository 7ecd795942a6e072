"""Devices with a budget (setting device_memory_mb), where models come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_worker.engine_port import EngineKey
from gpu_worker.memory.mapper import DeviceMemory
from gpu_worker.memory.pages import arena_of
from gpu_worker.residency import Residency
from gpu_worker.switch_counts import SwitchCounts
from sie_stream.control import Device
from sie_stream.settings import Settings

MIB = 1024 * 1024


class Coming(NamedTuple):
    """A model that was ordered to its device. Times are monotonic."""

    ordered_at: float
    waited_ms: float
    gave_way: tuple[str, ...]


class Away(NamedTuple):
    """A model that left its device for another (model@version)."""

    since: float
    left_for: str


@dataclass(slots=True, eq=False)
class Managed:
    """A device with a budget."""

    residency: Residency
    counts: SwitchCounts = field(default_factory=SwitchCounts)
    engines: dict[int, EngineKey] = field(default_factory=dict)
    """Of the slots in its memory."""
    on_the_way: dict[int, float] = field(default_factory=dict)
    """Slots on their way to the device, and since when."""
    going: dict[int, None] = field(default_factory=dict)
    """Slots of unloaded models whose pages are still in use: engines hold requests of them, or they are on the way."""
    coming: dict[int, Coming] = field(default_factory=dict)
    away: dict[int, Away] = field(default_factory=dict)
    """Both by slot; forgotten with it."""

    def forget(self, slot: int) -> None:
        """The model is unloaded, or its engine is gone."""
        self.engines.pop(slot, None)
        self.going.pop(slot, None)
        self.coming.pop(slot, None)
        self.away.pop(slot, None)


def managed_devices(devices: Sequence[Device], settings: Settings) -> dict[str, Managed]:
    """By device. Only devices whose memory this process can map have a budget."""
    if not settings.device_memory_mb:
        return {}
    size, page_bytes = arena_of(settings.device_memory_mb * MIB)
    return {
        device.device: Managed(Residency(DeviceMemory(size, page_bytes, host_bytes(settings))))
        for device in devices
        if device.kind == "cpu"
    }


def host_bytes(settings: Settings) -> int:
    """What a worker with a budget offers for placement, and what images may take of it."""
    return (settings.host_memory_mb or settings.cpu_memory_mb) * MIB
