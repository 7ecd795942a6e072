"""Counts switches between models on one device, by class: resident, host, disk. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.memory.slots import SWITCH_CLASSES, SwitchClass
from sie_stream.telemetry import SwitchSample


@dataclass(slots=True)
class _Sum:
    count: int = 0
    size: int = 0
    ms: float = 0.0
    ms_max: float = 0.0


class SwitchCounts:
    """Since the start of the incarnation."""

    def __init__(self) -> None:
        self._sums: dict[SwitchClass, _Sum] = {name: _Sum() for name in SWITCH_CLASSES}
        self._running: int | None = None
        self._brought: dict[int, None] = {}
        """Slots that were brought to the device and have not run since."""

    def arrived(self, slot: int, switch_class: SwitchClass, size: int, ms: float) -> None:
        """A model was brought to the device. What was there already counts when it runs."""
        if switch_class == "resident":
            return
        self._brought[slot] = None
        one = self._sums[switch_class]
        one.count += 1
        one.size += size
        one.ms += ms
        one.ms_max = max(one.ms_max, ms)

    def ran(self, slot: int) -> None:
        """Requests of it were given to an engine. After another model, that is a switch; nothing has to be moved for
        it when the model was there.
        """
        if slot != self._running and self._running is not None and slot not in self._brought:
            self._sums["resident"].count += 1
        self._running = slot
        self._brought.pop(slot, None)

    def told(self) -> tuple[SwitchSample, ...]:
        return tuple(
            SwitchSample(name, one.count, one.size, round(one.ms, 3), round(one.ms_max, 3))
            for name, one in self._sums.items()
        )
