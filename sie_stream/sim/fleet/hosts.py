"""Simulated worker hosts at work: they follow the rows of sie.placements as real ones do, and report on sie.cluster.

A host loads what is listed for it, one replica after another; unloads what is not listed any more; works off the
partitions assigned to it; and gives back those it is asked for when the requests in its engine have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from msgspec import Struct

from sie_stream.control import (
    ClusterRecord,
    PartitionPlacement,
    PartitionReleased,
    ReplicaReady,
    RouteRow,
)
from sie_stream.loads import DeviceLoad, ModelLoad, WorkerLoad
from sie_stream.routing import SHARES, bucket_of, spill_of, sticky_key
from sie_stream.sim.fleet.board import Board
from sie_stream.sim.fleet.events import Events
from sie_stream.sim.fleet.population import Population
from sie_stream.sim.fleet.scenario import Fleet
from sie_stream.sim.fleet.workers import MIB, SimWorker, device_name, device_number

WARM_MS = 1_000
"""Of a load, for the prompts before a replica is ready."""
SESSIONS = 1_024
"""Keys per model that are asked for their bucket."""
FINISH_FACTOR = 2.0
"""The last request of an engine that starts nothing more ends after so many mean latencies."""
FINISH_MIN_MS = 20.0

Holding = tuple[str, str, str, int]
"""Worker, incarnation, model, placement epoch."""


class Held(Struct):
    """One replica on a host."""

    station: int
    ready: bool = False


class Owned(Struct, frozen=True):
    """One partition at a host."""

    worker: str
    incarnation: str
    epoch: int


class Listed(Struct, frozen=True):
    """One replica of a row, as far as a simulated host needs it: there is no engine to launch."""

    worker: str
    incarnation: str
    device: str
    placement_epoch: int


class Row(Struct, frozen=True):
    """The same of a whole `PlacementRow`."""

    replicas: tuple[Listed, ...]
    partitions: tuple[PartitionPlacement, ...]


class Hosts:
    """All hosts of a fleet. `say` appends a record to sie.cluster."""

    def __init__(
        self,
        fleet: Fleet,
        population: Population,
        board: Board,
        events: Events,
        workers: Mapping[str, SimWorker],
        say: Callable[[ClusterRecord], None],
    ) -> None:
        self._fleet = fleet
        self._population = population
        self._board = board
        self._events = events
        self._workers = workers
        self._say = say
        self._number = {name: number for number, name in enumerate(population.names)}
        self._decoder = msgspec.json.Decoder(Row)
        self._held: dict[str, dict[Holding, Held]] = {name: {} for name in population.names}
        self._owned: list[dict[int, Owned]] = [{} for _ in population.names]
        """{partition: who works it off}, by model."""
        self._releasing: dict[tuple[str, int, int], None] = {}
        """Model, partition, epoch."""
        self._home = [self._bucket_weights(number) for number in range(len(population.names))]
        self._weights = [list(weights) for weights in self._home]
        self._routes = msgspec.json.Decoder(RouteRow)
        self._changed: dict[int, None] = {}

    # ------------------------------------------------------------ what the scheduler published

    def row(self, model: str, body: msgspec.Raw | None) -> None:
        row = None if body is None else self._decoder.decode(body)
        listed = {} if row is None else {(r.worker, r.incarnation, model, r.placement_epoch): r for r in row.replicas}
        for holding in [holding for holding in self._held[model] if holding not in listed]:
            self._unload(model, holding)
        for holding, replica in listed.items():
            if holding in self._held[model]:
                continue
            worker = self._workers[replica.worker]
            device = device_number(worker, replica.device, self._fleet)
            if worker.up and worker.incarnation == replica.incarnation and device not in worker.lost:
                self._load(worker, holding, device)
        self._partitions(model, () if row is None else row.partitions)
        self._changed[self._number[model]] = None

    def route(self, model: str, body: msgspec.Raw | None) -> None:
        """The Traffic Director's shares, in the mean over all keys: what a bucket gives away goes to those above."""
        row = None if body is None else self._routes.decode(body)
        number = self._number[model]
        home = self._home[number]
        spill = None if row is None else spill_of(row.shares, len(home))
        weights = list(home)
        if spill is not None:
            weights = [part * keep / SHARES for part, keep in zip(home, spill.keep, strict=True)]
            given, below = 1.0 - sum(weights), 0
            for upto, taker in zip(spill.upto, spill.takers, strict=True):
                weights[taker] += given * (upto - below) / spill.upto[-1]
                below = upto
        self._weights[number] = weights
        self._changed[number] = None

    def _partitions(self, model: str, placements: tuple[PartitionPlacement, ...]) -> None:
        owned = self._owned[self._number[model]]
        listed = {placement.partition: placement for placement in placements}
        for partition in [partition for partition in owned if partition not in listed]:
            del owned[partition]
        for placement in placements:
            worker = self._workers[placement.worker]
            if not worker.up or worker.paused or worker.incarnation != placement.incarnation:
                continue
            mine = Owned(placement.worker, placement.incarnation, placement.placement_epoch)
            if placement.state == "assigned":
                owned[placement.partition] = mine
            else:
                self._finish(model, placement.partition, mine)

    def _finish(self, model: str, partition: int, mine: Owned) -> None:
        """Nothing more is started of that partition; it is given back when what runs has ended."""
        key = (model, partition, mine.epoch)
        if key in self._releasing:
            return
        self._releasing[key] = None
        number = self._number[model]
        station = self._station(number, mine)
        self._owned[number].pop(partition, None)
        released = PartitionReleased(mine.worker, mine.incarnation, model, partition, mine.epoch, 0)
        wait_ms = FINISH_MIN_MS
        if station is not None and self._board.running(station) > 0:
            law = self._population
            size = min(self._board.running(station), float(law.batch[number]))
            wait_ms += FINISH_FACTOR * float(law.base_ms[number] + law.each_ms[number] * size)

        def done() -> None:
            self._releasing.pop(key, None)
            worker = self._workers[mine.worker]
            if worker.up and worker.incarnation == mine.incarnation:
                self._say(released)

        self._events.after(wait_ms, done)

    # ------------------------------------------------------------ replicas

    def _load(self, worker: SimWorker, holding: Holding, device: int) -> None:
        model, epoch = holding[2], holding[3]
        number = self._number[model]
        held = Held(self._board.add(number, device))
        self._held[model][holding] = held
        load_ms = float(self._population.load_ms[number])
        begins_ms = max(worker.loads_until_ms, self._events.now_ms)
        worker.loads_until_ms = begins_ms + load_ms
        memory = int(self._population.used_mb[number]) * MIB
        ready = ReplicaReady(
            *(worker.name, worker.incarnation, model, "1.0.0", epoch, memory, round(load_ms - WARM_MS), WARM_MS),
            waited_ms=round(begins_ms - self._events.now_ms),
        )

        def done() -> None:
            if self._held[model].get(holding) is not held:
                return
            if worker.paused:
                self._events.after(WARM_MS, done)
                return
            held.ready = True
            self._board.opened(held.station)
            self._changed[number] = None
            self._say(ready)

        self._events.at(worker.loads_until_ms, done)

    def _unload(self, model: str, holding: Holding, killed: bool = False) -> None:
        held = self._held[model].pop(holding)
        self._board.remove(held.station, self._events.now_ms, killed)
        self._changed[self._number[model]] = None

    def clear(self, worker: SimWorker, killed: bool) -> None:
        """The process has ended, or can commit nothing any more."""
        for model, held in self._held.items():
            for holding in [h for h in held if h[0] == worker.name]:
                self._unload(model, holding, killed)

    def lose(self, worker: SimWorker, device: int) -> None:
        """One GPU is gone, with what its engines had in work; the host goes on."""
        for model, held in self._held.items():
            for holding in [
                h for h, r in held.items() if h[0] == worker.name and self._board.device[r.station] == device
            ]:
                self._unload(model, holding, killed=True)

    def pause(self, worker: SimWorker, paused: bool) -> None:
        for held in self._held.values():
            for holding, replica in held.items():
                if holding[0] == worker.name:
                    self._board.pause(replica.station, paused)

    # ------------------------------------------------------------ shares and reports

    def settle(self) -> None:
        """Requests go where the partitions are."""
        for number in self._changed:
            lane = int(self._population.lane[number])
            shares: dict[int, float] = {}
            weights = self._weights[number]
            for partition, owner in self._owned[number].items():
                if partition // len(weights) != lane:
                    continue
                station = self._station(number, owner)
                if station is not None:
                    shares[station] = shares.get(station, 0.0) + weights[partition % len(weights)]
            self._board.set_shares(number, shares)
        self._changed.clear()

    def _station(self, number: int, owner: Owned) -> int | None:
        """The ready replica of the model at that host; the newest, if a version is replaced."""
        held = self._held[self._population.names[number]]
        found = [
            (holding[3], replica.station)
            for holding, replica in held.items()
            if replica.ready and holding[:2] == (owner.worker, owner.incarnation)
        ]
        return max(found)[1] if found else None

    def report(self, window_ms: int) -> None:
        """Every host says what its models had to do."""
        loads: dict[str, list[ModelLoad]] = {}
        board = self._board
        ready = [
            (holding[0], model, replica.station)
            for model, held in self._held.items()
            for holding, replica in held.items()
            if replica.ready
        ]
        stations = [station for _, _, station in ready]
        seen, running_at = board.seen.take_all(stations), board.running_at(stations)
        for (worker, model, station), (arrivals, completions, busy_ms, p99_ms), has in zip(
            ready, seen, running_at, strict=True
        ):
            waiting, running = round(board.waiting(station)), round(has)
            if arrivals or completions or waiting or running:
                worst = round(p99_ms) if completions else None
                load = ModelLoad(model, arrivals, completions, waiting, running, busy_ms, worst)
                loads.setdefault(worker, []).append(load)
        busy = board.busy().tolist()
        for name, models in loads.items():
            worker = self._workers[name]
            if worker.up and not worker.paused:
                devices = tuple(
                    DeviceLoad(device_name(device, self._fleet), busy_bp)
                    for device in worker.devices
                    if (busy_bp := round(10_000 * busy[device]))
                )
                self._say(WorkerLoad(name, worker.incarnation, window_ms, tuple(models), devices))

    def _bucket_weights(self, number: int) -> list[float]:
        """Share of the sessions per bucket, by the routing that ingress uses."""
        width = int(self._population.replicas_max[number])
        counts = [0] * width
        for session in range(SESSIONS):
            name = f"{self._population.names[number]}/{session}"
            counts[bucket_of(sticky_key(name, b"", name), width)] += 1
        return [count / SESSIONS for count in counts]
