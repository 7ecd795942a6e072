"""What is counted: requests by model, memory over time, and what stations did since they were last asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Tally:
    """Of one policy's run. Requests per model; memory as sums over steps."""

    def __init__(self, models: int) -> None:
        self.carried = np.zeros(models)
        """In the system when counting began."""
        self.arrived = np.zeros(models, dtype=np.int64)
        self.completed = np.zeros(models)
        self.inside = np.zeros(models)
        """Completed within the SLA."""
        self.failed = np.zeros(models)
        self.interrupted = 0.0
        """Were in an engine when its process ended."""
        self.loads = 0
        self.steps = 0
        self.devices_held = 0
        self.used_mb = 0.0
        self.reserved_mb = 0.0
        self.stations = 0
        self.devices_most = 0

    def held(self, devices: int, used_mb: float, reserved_mb: float, stations: int) -> None:
        self.steps += 1
        self.devices_held += devices
        self.devices_most = max(self.devices_most, devices)
        self.used_mb += used_mb
        self.reserved_mb += reserved_mb
        self.stations += stations


class Seen:
    """Per station, since it was last asked."""

    def __init__(self, room: int) -> None:
        self.arrivals = np.zeros(room)
        self.completions = np.zeros(room)
        self.busy_ms = np.zeros(room)
        self.p99_ms = np.zeros(room)

    def add(
        self, index: np.ndarray, arrivals: np.ndarray, completions: np.ndarray, busy: np.ndarray, p99: np.ndarray
    ) -> None:
        self.arrivals[index] += arrivals
        self.completions[index] += completions
        self.busy_ms[index] += busy
        self.p99_ms[index] = np.maximum(self.p99_ms[index], p99)

    def clear(self, station: int) -> None:
        for part in (self.arrivals, self.completions, self.busy_ms, self.p99_ms):
            part[station] = 0.0

    def take(self, station: int) -> tuple[int, int, int, float]:
        """(arrivals, completions, busy ms, p99 ms); what is less than one whole stays for the next time."""
        return self.take_all([station])[0]

    def take_all(self, stations: Sequence[int]) -> list[tuple[int, int, int, float]]:
        """The same for each of these."""
        index = np.array(stations, dtype=np.int64)
        whole: list[list[int]] = []
        for part in (self.arrivals, self.completions, self.busy_ms):
            found = part[index].astype(np.int64)
            part[index] -= found
            whole.append(found.tolist())
        p99_ms = self.p99_ms[index].tolist()
        self.p99_ms[index] = 0.0
        return list(zip(*whole, p99_ms, strict=True))
