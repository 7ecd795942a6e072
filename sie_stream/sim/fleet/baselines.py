"""The baselines: what others do, on the same servers, engines, traffic and faults, each with sensible choices.

All of them know the mean rate of every model (which an operator rarely does), pay 5 ms for the way there and back
instead of the 80 ms of the log, notice a dead server after 2 s, as ours does, and spread requests evenly over the ready
replicas of a model from one moment to the next, without a hand-over. What waits in a queue when a server dies waits on
elsewhere; only what was in an engine fails, because no log has it. A rolling restart ends engines between requests.

- `static`: one model, one GPU. Every replica has a GPU to itself; all GPUs of the fleet are given out, one per model
  first, the others to the models with the most load per replica. Nothing moves; what a GPU held comes back with it.
- `round-robin`: as many replicas as the declarations ask for at least, dealt to the GPUs in turn, skipping those that
  are full or have the model. Lost replicas are dealt again.
- `first-fit`: the same, each replica on the first GPU with room that has not the model.
- `lru`: models swapped in at request, as ModelMesh does: one copy is loaded when the first request comes (one of each
  is there from the start); another copy when the copies of a model were above 75 % busy in the last 10 s, as many at
  once as bring it below; on the GPU with the most free memory; if none has room, on that whose replicas were used least
  recently, which are evicted (not the last copy of a model that was used in the last minute). A copy above the declared
  minimum that was idle for 10 minutes goes. There are never more copies than the declaration allows.
- `lru-unbounded`: the same without that last rule. It says what a bound of the users costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct

from sie_stream.sim.fleet.board import Board
from sie_stream.sim.fleet.events import Events
from sie_stream.sim.fleet.policy import EPOCH_MS, RESTART_MS, Hit, device_count, offered_mb
from sie_stream.sim.fleet.population import REPLICAS_MAX, Population
from sie_stream.sim.fleet.scenario import Scenario

NOTICED_MS = 2_000
PIPELINE_MS = 5.0


class Copy(Struct):
    """One replica."""

    model: int
    device: int
    station: int
    ready: bool = False
    used_ms: float = 0.0


class Baseline:
    """Common to all: loads, shares, and faults. The placement is what differs."""

    name = ""

    def __init__(self, scenario: Scenario, population: Population, board: Board) -> None:
        self.board = board
        self.events = Events(EPOCH_MS)
        self.population = population
        self.scenario = scenario
        self.up = np.ones(device_count(scenario.fleet), dtype=bool)
        self.free_mb = np.full(len(self.up), float(offered_mb(scenario.fleet)))
        self.copies: list[Copy] = []
        self.migrations = 0
        self._changed: dict[int, None] = {}

    # ------------------------------------------------------------ the policy

    def start(self) -> None:
        self.set_up()
        for copy in self.copies:
            copy.ready = True
            self.board.opened(copy.station)
        self._changed.update(dict.fromkeys(range(len(self.population.names))))

    def set_up(self) -> None:
        """Place what is there from the start."""
        for model in sorted(range(len(self.population.names)), key=lambda m: (-self.population.memory_mb[m], m)):
            for _ in range(int(self.population.replicas[model])):
                self.place(model)

    def place(self, model: int) -> bool:
        """One more replica of the model, if there is room."""
        device = self.choose(model)
        if device is not None:
            self.load(model, device)
        return device is not None

    def choose(self, model: int) -> int | None:
        raise NotImplementedError

    def settle(self) -> None:
        """Even shares over what is ready."""
        for model in self._changed:
            ready = [copy.station for copy in self.copies if copy.model == model and copy.ready]
            self.board.set_shares(model, dict.fromkeys(ready, 1.0 / len(ready)) if ready else {})
        self._changed.clear()

    def counts(self) -> dict[str, int]:
        return {"switches": self.board.tally.loads, "migrations": self.migrations, "redelivered": 0, "restarted": 0}

    # ------------------------------------------------------------ replicas

    def has_room(self, model: int, device: int) -> bool:
        """Memory, and no other replica of the model there: it would add nothing."""
        if not self.up[device] or self.free_mb[device] < self.population.memory_mb[model]:
            return False
        return not any(copy.model == model and copy.device == device for copy in self.copies)

    def load(self, model: int, device: int) -> None:
        copy = Copy(model, device, self.board.add(model, device), used_ms=self.events.now_ms)
        self.copies.append(copy)
        self.free_mb[device] -= self.population.memory_mb[model]

        def done() -> None:
            if copy in self.copies:
                copy.ready = True
                self.board.opened(copy.station)
                self._changed[model] = None

        self.events.after(float(self.population.load_ms[model]), done)

    def unload(self, copy: Copy, killed: bool = False) -> None:
        self.copies.remove(copy)
        self.board.remove(copy.station, self.events.now_ms, killed)
        self.free_mb[copy.device] += self.population.memory_mb[copy.model]
        self._changed[copy.model] = None

    def replace(self, models: list[int], devices: list[int]) -> None:
        """Replicas of these models were lost on these devices."""
        for model in models:
            self.migrations += self.place(model)

    # ------------------------------------------------------------ faults

    def hit(self, fault: Hit) -> None:
        gpus = self.scenario.fleet.gpus
        per_gpu = self.scenario.fleet.workers == "per-gpu"
        server = list(range(fault.target * gpus, (fault.target + 1) * gpus))
        worker = [fault.target % len(self.up)] if per_gpu else [d % len(self.up) for d in server]
        match fault.kind:
            case "server-lost":
                self._down(server, fault.for_ms, killed=True)
            case "gpu-lost":
                self._down([fault.target], fault.for_ms, killed=True)
            case "worker-paused":
                self._pause(worker, fault.for_ms)
            case "drain":
                self._down(worker, fault.for_ms, killed=False)
            case "rolling-restart":
                units = [[d] for d in range(len(self.up))] if per_gpu else []
                units = units or [list(range(first, first + gpus)) for first in range(0, len(self.up), gpus)]
                self._restart(units, fault)

    def _restart(self, units: list[list[int]], fault: Hit) -> None:
        """One after another; the next when the last is back and has loaded."""
        waits_ms = fault.for_ms + RESTART_MS + float(self.population.load_ms.max())
        for number, unit in enumerate(units):
            begins_ms = waits_ms * (number // fault.at_once)
            self.events.after(begins_ms, lambda unit=unit: self._down(unit, fault.for_ms, killed=False))

    def _down(self, devices: list[int], for_ms: int, killed: bool) -> None:
        devices = [device for device in devices if self.up[device]]
        gone = [copy for copy in self.copies if copy.device in devices]
        self.up[devices] = False
        for copy in gone:
            self.unload(copy, killed)
        models = [copy.model for copy in gone]
        self.events.after(NOTICED_MS if killed else 0, lambda: self.replace(models, [copy.device for copy in gone]))

        def back() -> None:
            self.up[devices] = True
            self.came_back([copy.model for copy in gone], [copy.device for copy in gone])

        self.events.after(for_ms, back)

    def came_back(self, models: list[int], devices: list[int]) -> None:
        """Devices work again that held these replicas, pairwise."""

    def _pause(self, devices: list[int], for_ms: int) -> None:
        """Nobody is told; the balancer takes it out after NOTICED_MS and back when it answers again."""
        paused = [copy for copy in self.copies if copy.device in devices and copy.ready]
        for copy in paused:
            self.board.pause(copy.station, True)

        def turn(ready: bool) -> Callable[[], None]:
            def done() -> None:
                for copy in paused:
                    if copy in self.copies:
                        copy.ready = ready
                        self._changed[copy.model] = None
                        if ready:
                            self.board.pause(copy.station, False)

            return done

        if for_ms > NOTICED_MS:
            self.events.after(NOTICED_MS, turn(False))
        self.events.after(for_ms, turn(True))


class Static(Baseline):
    name = "static"

    def set_up(self) -> None:
        models, load = self.population, self.population.rate / self.population.per_s
        wanted = np.zeros(len(models.names), dtype=np.int64)
        for device in range(len(self.up)):
            if device < len(wanted):
                model = device
            else:
                model = int(np.argmax(np.where(wanted < REPLICAS_MAX, load / wanted, -1.0)))
            wanted[model] += 1
            self.load(model, device)

    def replace(self, models: list[int], devices: list[int]) -> None:
        """Nothing moves."""

    def came_back(self, models: list[int], devices: list[int]) -> None:
        for model, device in zip(models, devices, strict=True):
            self.load(model, device)


class RoundRobin(Baseline):
    name = "round-robin"

    def __init__(self, scenario: Scenario, population: Population, board: Board) -> None:
        super().__init__(scenario, population, board)
        self._next = 0

    def choose(self, model: int) -> int | None:
        count = len(self.up)
        for step in range(count):
            device = (self._next + step) % count
            if self.has_room(model, device):
                self._next = (device + 1) % count
                return device
        return None


class FirstFit(Baseline):
    name = "first-fit"

    def choose(self, model: int) -> int | None:
        return next((device for device in range(len(self.up)) if self.has_room(model, device)), None)
