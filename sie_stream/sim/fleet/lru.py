"""The baselines `lru` and `lru-unbounded`: models swapped in at request, least recently used out. Described in
baselines.py.
"""

from __future__ import annotations

import math

import numpy as np

from sie_stream.sim.fleet.baselines import Baseline, Copy
from sie_stream.sim.fleet.population import REPLICAS_MAX

LOOK_MS = 10_000
BUSY = 0.75
IDLE_MS = 600_000
RECENT_MS = 60_000


class Lru(Baseline):
    name = "lru"

    def start(self) -> None:
        super().start()
        self.events.every(LOOK_MS, self._look)
        self.events.every(self.scenario.step_ms, self._at_request)

    def set_up(self) -> None:
        for model in range(len(self.population.names)):
            self.place(model)

    def choose(self, model: int) -> int | None:
        """The most free memory; or else room is made."""
        order = np.lexsort((np.arange(len(self.up)), -self.free_mb))
        found = next((int(device) for device in order if self.has_room(model, int(device))), None)
        return self._make_room(model) if found is None else found

    def replace(self, models: list[int], devices: list[int]) -> None:
        """What is gone is loaded when it is asked for."""

    def most(self, model: int) -> int:
        """Copies that the model may have."""
        return int(self.population.replicas_max[model])

    # ------------------------------------------------------------ parts

    def _at_request(self) -> None:
        """A model with requests and no copy is loaded."""
        there = {copy.model for copy in self.copies}
        for model in range(len(self.population.names)):
            if model not in there and self.board.waits_for(model) > 0:
                self.place(model)

    def _look(self) -> None:
        """Once in LOOK_MS: copies for busy models; idle ones go."""
        by_model: dict[int, list[Copy]] = {}
        busy: dict[int, float] = {}
        for copy in self.copies:
            arrivals, _, busy_ms, _ = self.board.seen.take(copy.station)
            if arrivals:
                copy.used_ms = self.events.now_ms
            by_model.setdefault(copy.model, []).append(copy)
            busy[copy.model] = busy.get(copy.model, 0.0) + busy_ms / LOOK_MS
        for model, copies in by_model.items():
            if not all(copy.ready for copy in copies):
                continue
            missing = math.ceil(busy[model] / BUSY) - len(copies)
            for _ in range(max(0, min(missing, self.most(model) - len(copies)))):
                self.place(model)
            idle = [copy for copy in copies if self.events.now_ms - copy.used_ms > IDLE_MS]
            for copy in idle[: max(0, len(copies) - int(self.population.replicas[model]))]:
                self.unload(copy)

    def _make_room(self, model: int) -> int | None:
        """Of the devices where what may go is enough, the one whose most recent of it was used longest ago."""
        best: tuple[float, int, list[Copy]] | None = None
        for device in np.flatnonzero(self.up):
            here = [copy for copy in self.copies if copy.device == device]
            if any(copy.model == model for copy in here):
                continue
            chosen = self._victims(here, float(self.population.memory_mb[model] - self.free_mb[device]))
            if chosen is None:
                continue
            latest = max(copy.used_ms for copy in chosen)
            if best is None or (latest, int(device)) < best[:2]:
                best = (latest, int(device), chosen)
        if best is None:
            return None
        for copy in best[2]:
            self.unload(copy)
        return best[1]

    def _victims(self, here: list[Copy], needed_mb: float) -> list[Copy] | None:
        """The least recently used, until it is enough; None when it is not."""
        chosen: list[Copy] = []
        for copy in sorted((c for c in here if self._may_go(c)), key=lambda c: (c.used_ms, c.station)):
            if needed_mb <= 0:
                break
            chosen.append(copy)
            needed_mb -= float(self.population.memory_mb[copy.model])
        return chosen if chosen and needed_mb <= 0 else None

    def _may_go(self, copy: Copy) -> bool:
        last = sum(other.model == copy.model for other in self.copies) == 1
        return copy.ready and not (last and self.events.now_ms - copy.used_ms < RECENT_MS)


class LruUnbounded(Lru):
    name = "lru-unbounded"

    def most(self, model: int) -> int:
        return REPLICAS_MAX
