"""The board: engines on GPUs, who gets which share of a model's requests, and what became of all requests.

A station is one replica of one model on one GPU. Policies add, open and remove stations and say which share of their
model's requests goes to each; `step` plays one step of traffic over all of them. What goes to nobody (no station, or
partitions between owners) waits with its arrival time; so does what a full station cannot take. Requests are real
numbers inside (shares of a Poisson count), and none appears or disappears: arrived = completed + failed + in system.

Engines on one GPU take turns: with the others busy for a share b of the time in all, an engine runs at 1 / (1 + b).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from sie_stream.sim.fleet.engines import SATURATED, Laws, capacity_per_ms, filled, room, serve, within
from sie_stream.sim.fleet.population import Population
from sie_stream.sim.fleet.queues import Cohort, put_at, take
from sie_stream.sim.fleet.tally import Seen, Tally

ROOM = 4_096
ALL_OWNED = 1e-6
"""Less of the shares than this is a matter of rounding."""


class Board:
    """`station` numbers are given anew when a station is gone. Devices are numbered by the caller."""

    def __init__(
        self, population: Population, devices: int, step_ms: int, pipeline_ms: float, seed: int, failover: bool
    ) -> None:
        """`failover`: requests in an engine that dies are done again (a log has them); otherwise they fail."""
        self.population = population
        self.tally = Tally(len(population.names))
        self.step_ms = step_ms
        self._failover = failover
        self._devices = devices
        self._random = np.random.Generator(np.random.PCG64([seed, 2]))
        self._budget = population.sla_ms - pipeline_ms
        self.model = np.zeros(ROOM, dtype=np.int64)
        self.device = np.zeros(ROOM, dtype=np.int64)
        self.alive = np.zeros(ROOM, dtype=bool)
        self.open = np.zeros(ROOM, dtype=bool)
        self.paused = np.zeros(ROOM, dtype=bool)
        self.share = np.zeros(ROOM)
        self._had = np.zeros(ROOM)
        """Shares in the last step."""
        self._running = np.zeros(ROOM)
        self._busy = np.zeros(ROOM)
        self._queues: dict[int, deque[Cohort]] = {}
        self._homeless: list[deque[Cohort]] = [deque() for _ in population.names]
        self._free: list[int] = list(range(ROOM - 1, -1, -1))
        self.seen = Seen(ROOM)
        """What the stations did since it was last reset: what workers report."""
        self._changed = True
        self._index = np.zeros(0, dtype=np.int64)
        self._laws = self._laws_of(self._index)
        self._holding = self._held()

    # ------------------------------------------------------------ what policies do

    def add(self, model: int, device: int) -> int:
        """A replica that loads: it takes memory and no requests."""
        station = self._free.pop()
        self.model[station], self.device[station] = model, device
        self.alive[station] = True
        self.open[station] = self.paused[station] = False
        self.share[station] = self._running[station] = self._busy[station] = 0.0
        self.seen.clear(station)
        self._changed = True
        self.tally.loads += 1
        return station

    def opened(self, station: int) -> None:
        """It is loaded."""
        self.open[station] = True
        self._changed = True

    def remove(self, station: int, now_ms: float, killed: bool = False) -> None:
        """Gone. What waits there waits elsewhere; what is in its engine is done again, or fails, if it is `killed`."""
        model = int(self.model[station])
        running = float(self._running[station])
        if killed:
            self.tally.interrupted += running
        if killed and not self._failover:
            self.tally.failed[model] += running
        elif running > 0:
            put_at(self._homeless[model], now_ms, running)
        for cohort in self._queues.pop(station, ()):
            put_at(self._homeless[model], *cohort)
        self.alive[station] = self.open[station] = False
        self.share[station] = self._running[station] = 0.0
        self._free.append(station)
        self._changed = True

    def pause(self, station: int, paused: bool) -> None:
        self.paused[station] = paused

    def set_shares(self, model: int, shares: Mapping[int, float]) -> None:
        """Which part of the model's requests goes where; the rest waits. What waits where share is lost moves on."""
        for station in np.flatnonzero(self.alive & (self.model == model)):
            before, after = float(self.share[station]), shares.get(int(station), 0.0)
            if after < before and station in self._queues:
                part = 1.0 - after / before
                queue = self._queues[int(station)]
                for _ in range(len(queue)):
                    at, count = queue.popleft()
                    put_at(self._homeless[model], at, count * part)
                    if part < 1.0:
                        queue.append((at, count * (1.0 - part)))
                if not queue:
                    del self._queues[int(station)]
            self.share[station] = after
        self._changed = True

    # ------------------------------------------------------------ time passes

    def step(self, now_ms: float, arrivals: np.ndarray) -> None:
        """`arrivals`: requests per model in [now_ms, now_ms + step_ms)."""
        if self._changed:
            self._index = np.flatnonzero(self.open)
            self._laws = self._laws_of(self._index)
            self._holding = self._held()
            self._changed = False
        index = self._index
        model = self.model[index]
        self.tally.arrived += arrivals
        got = self._split(index, model, arrivals, now_ms)
        busy = self._busy[index]
        on_device = np.bincount(self.device[index], busy, minlength=self._devices)
        speed = 1.0 / (1.0 + np.maximum(on_device[self.device[index]] - busy, 0.0))
        most = capacity_per_ms(self._laws, speed) * ~self.paused[index] * self.step_ms
        running = self._running[index]
        served = serve(self._laws, speed, got / self.step_ms, running, self.step_ms)
        left = np.minimum(served.running, running + got)
        done = running + got - left
        inside = done * served.inside
        p99, busy, occupied = served.p99_ms.copy(), served.busy.copy(), served.occupied.copy()
        full = (got > SATURATED * most) | self.paused[index]
        full |= (left > self._laws.batch * 1.5) & self._laws.continuous
        if self._queues:
            full |= np.isin(index, list(self._queues))
        places = np.flatnonzero(full)
        if len(places):
            queued = self._queued(places, got[places], most[places], running[places], speed[places], now_ms)
            done[places], inside[places], left[places], p99[places] = queued
            slots = self._laws.continuous[places]
            busy[places] = 1.0
            occupied[places] = np.where(slots, np.minimum(left[places] / self._laws.batch[places], 1.0), 1.0)
        self._running[index] = left
        self._busy[index] = np.where(self.paused[index], 0.0, busy)
        count = len(arrivals)
        self.tally.completed += np.bincount(model, done, minlength=count)
        self.tally.inside += np.bincount(model, inside, minlength=count)
        self.seen.add(index, got, done, occupied * self.step_ms, p99)
        self.tally.held(*self._holding)

    def count_from_here(self) -> None:
        """What was counted so far is forgotten; what is in the system now is carried over."""
        self.tally = Tally(len(self.population.names))
        self.tally.carried = self.in_system()

    def waiting(self, station: int) -> float:
        queue = self._queues.get(station)
        return sum(count for _, count in queue) if queue else 0

    def running(self, station: int) -> float:
        return float(self._running[station])

    def running_at(self, stations: Sequence[int]) -> list[float]:
        """The same of many."""
        return self._running[np.array(stations, dtype=np.int64)].tolist()

    def busy(self) -> np.ndarray:
        """By device, the share of its time that engines compute: in the last step, 1 at most."""
        return np.minimum(1.0, np.bincount(self.device[self._index], self._busy[self._index], minlength=self._devices))

    def waits_for(self, model: int) -> float:
        """Requests of the model that no station has."""
        return sum(count for _, count in self._homeless[model])

    def in_system(self) -> np.ndarray:
        """Requests per model that have arrived and not ended."""
        count = len(self.population.names)
        found = np.bincount(self.model[self.alive], self._running[self.alive], minlength=count).astype(float)
        for station, queue in self._queues.items():
            found[self.model[station]] += sum(part for _, part in queue)
        for model, queue in enumerate(self._homeless):
            found[model] += sum(part for _, part in queue)
        return found

    # ------------------------------------------------------------ parts of a step

    def _split(self, index: np.ndarray, model: np.ndarray, arrivals: np.ndarray, now_ms: float) -> np.ndarray:
        """Requests per station: in the mean by share, with the spread that independent keys have."""
        count = len(arrivals)
        share = self.share[index]
        drawn = self._random.standard_gamma(np.maximum(arrivals[model] * share, 1e-12))
        drawn_of = np.bincount(model, drawn, minlength=count)
        shared = np.minimum(np.bincount(model, share, minlength=count), 1.0)
        taken = np.where(drawn_of > 0, arrivals * shared, 0.0)
        got = drawn * (taken / np.maximum(drawn_of, 1e-300))[model]
        rest = arrivals - np.bincount(model, got, minlength=count)
        self._go_home(index, model, shared)
        for number in np.flatnonzero(rest > 1e-9 * np.maximum(arrivals, 1)):
            put_at(self._homeless[number], now_ms + self.step_ms / 2, float(rest[number]))
        return got

    def _go_home(self, index: np.ndarray, model: np.ndarray, shared: np.ndarray) -> None:
        """What waits for an owner goes to stations that have got shares, in the mean: as much of it as has an owner."""
        gained = np.maximum(self.share[index] - self._had[index], 0.0)
        self._had[:] = 0.0
        self._had[index] = self.share[index]
        for number, queue in enumerate(self._homeless):
            if not queue:
                continue
            missing = 1.0 - float(shared[number])
            places = np.flatnonzero(model == number)
            gains = gained[places] if missing > ALL_OWNED else self.share[index[places]]
            total = float(gains.sum())
            if total <= 0.0:
                continue
            part = total / (total + missing) if missing > ALL_OWNED else 1.0
            left = [(at, count * (1.0 - part)) for at, count in queue]
            for at, count in queue:
                for place, gain in zip(places.tolist(), gains.tolist(), strict=True):
                    if gain > 0.0:
                        home = self._queues.setdefault(int(index[place]), deque())
                        put_at(home, at, count * part * gain / total)
            queue.clear()
            queue.extend(cohort for cohort in left if part < 1.0)

    def _queued(
        self,
        places: np.ndarray,
        got: np.ndarray,
        most: np.ndarray,
        running: np.ndarray,
        speed: np.ndarray,
        now_ms: float,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One step of the stations with a queue: (done, of these in time, left in the engine, p99 ms).

        `places`: where they are among the open ones; one entry per station in all arrays. What starts is collected from
        all queues first, so that the law of latency is asked once.
        """
        laws = Laws(*(part[places] for part in self._laws))
        intake = np.where(most > 0.0, room(laws, speed, running, most, self.step_ms), 0.0)
        of: list[int] = []
        counts: list[float] = []
        waits: list[float] = []
        for number, station in enumerate(self._index[places].tolist()):
            queue = self._queues.setdefault(station, deque())
            put_at(queue, now_ms + self.step_ms / 2, float(got[number]))
            for at, count, started in take(queue, float(intake[number]), now_ms, self.step_ms):
                of.append(number)
                counts.append(count)
                waits.append(max(0.0, started - at))
            if not queue:
                del self._queues[station]
        who, many, waited = np.array(of, dtype=np.int64), np.array(counts), np.array(waits)
        done = np.bincount(who, many, minlength=len(places))
        left, took_ms = filled(laws, speed, done, running, self.step_ms)
        in_time = within(Laws(*(part[who] for part in laws)), took_ms[who], waited)
        inside = np.bincount(who, many * in_time, minlength=len(places))
        longest = np.zeros(len(places))
        np.maximum.at(longest, who, waited)
        ended = running + done - left
        return ended, ended * inside / np.maximum(done, 1e-300), left, longest + 2.0 * took_ms

    def _held(self) -> tuple[int, float, float, int]:
        """Devices that hold anything, MiB in use, MiB reserved, stations."""
        stations = np.flatnonzero(self.alive)
        devices = np.bincount(self.device[stations], minlength=self._devices)
        used = float(self.population.used_mb[self.model[stations]].sum())
        reserved = float(self.population.memory_mb[self.model[stations]].sum())
        return int((devices > 0).sum()), used, reserved, len(stations)

    def _laws_of(self, index: np.ndarray) -> Laws:
        models, of = self.population, self.model[index]
        return Laws(
            base=models.base_ms[of],
            each=models.each_ms[of],
            batch=models.batch[of],
            sigma=models.sigma[of],
            continuous=models.continuous[of],
            sla=self._budget[of],
        )
