"""Counts what the models of this worker have to do, for the scheduler. Costs nothing per record, a little per batch."""

from __future__ import annotations

from msgspec import Struct

from sie_stream.loads import DeviceLoad, ModelLoad

EVERY_MS = 2_000.0
FULL_BP = 10_000
LATENCIES_MAX = 512
"""One per batch is kept; more in one window are not needed for a p99."""


class _Tally(Struct):
    arrivals: int = 0
    completions: int = 0
    busy_ms: float = 0.0
    latencies_ms: list[int] = []


class LoadMeter:
    """Of one worker. `take` gives the counts since the last time."""

    def __init__(self) -> None:
        self._models: dict[str, _Tally] = {}
        self._devices: dict[str, float] = {}
        """Milliseconds that engines of the device were busy."""
        self._since: float | None = None
        """When the present window began; None before the first look."""

    def arrived(self, model: str, count: int) -> None:
        self._of(model).arrivals += count

    def answered(self, model: str, device: str, count: int, busy_ms: float, latency_ms: int) -> None:
        """One batch: `busy_ms` of the engine, `latency_ms` of its first request, which waited longest in its lane."""
        tally = self._of(model)
        self._devices[device] = self._devices.get(device, 0.0) + busy_ms
        tally.completions += count
        tally.busy_ms += busy_ms
        if len(tally.latencies_ms) < LATENCIES_MAX:
            tally.latencies_ms.append(latency_ms)

    def due(self, at_ms: float) -> bool:
        if self._since is None:
            self._since = at_ms
        return at_ms - self._since >= EVERY_MS

    def take(
        self, at_ms: float, waiting: dict[str, int], running: dict[str, int]
    ) -> tuple[int, tuple[ModelLoad, ...], tuple[DeviceLoad, ...]]:
        """(window in ms, what was done and what is left by model, by device); without those that had nothing."""
        window_ms = max(1, round(at_ms - (at_ms if self._since is None else self._since)))
        self._since = at_ms
        models = dict.fromkeys([*self._models, *waiting, *running])
        loads: list[ModelLoad] = []
        for model in models:
            tally = self._models.get(model) or _Tally()
            load = ModelLoad(
                model,
                tally.arrivals,
                tally.completions,
                waiting.get(model, 0),
                running.get(model, 0),
                round(tally.busy_ms),
                _p99(tally.latencies_ms),
            )
            if load.arrivals or load.completions or load.waiting or load.running:
                loads.append(load)
        devices = tuple(
            DeviceLoad(device, min(round(busy_ms * FULL_BP / window_ms), FULL_BP))
            for device, busy_ms in self._devices.items()
        )
        self._models.clear()
        self._devices.clear()
        return window_ms, tuple(loads), devices

    def _of(self, model: str) -> _Tally:
        tally = self._models.get(model)
        if tally is None:
            tally = self._models[model] = _Tally(latencies_ms=[])
        return tally


def _p99(latencies_ms: list[int]) -> int | None:
    return sorted(latencies_ms)[len(latencies_ms) * 99 // 100] if latencies_ms else None
