"""An engine process on a device with a budget, for benchmarks: what a worker's machine does, without the log."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from gpu_worker.backends.base import EngineInput
from gpu_worker.edge.device_arena import DeviceArena
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.engine_port import (
    BatchCompleted,
    EngineEvent,
    EngineKey,
    ImageMoved,
    LoadFailed,
    ModelLoaded,
    ModelSwitched,
    SwitchFailed,
)
from gpu_worker.memory.mapper import DeviceMemory
from gpu_worker.residency import Activate, Demand, Evict, Residency
from sie_stream.control import ModelLaunch
from tests.unit.worker.rig import launch_of

MIB = 1024 * 1024
DEVICE = "cpu:0"
TOKENS = [101, 300, 301, 302, 303, 304, 305, 102]


class Answer(NamedTuple):
    """ms: from asking to the answer. came_from: where its model was when it was asked."""

    ms: float
    came_from: str
    outputs: Any


class Engines:
    """One engine process, its arena, and the residency over it."""

    def __init__(self, device_bytes: int, host_bytes: int, folder: Path, backend: str = "torch") -> None:
        self.key = EngineKey(DEVICE, backend)
        self.arena = DeviceArena(device_bytes, folder)
        self.memory = DeviceMemory(self.arena.size_bytes, self.arena.page_bytes, host_bytes)
        self.residency = Residency(self.memory)
        self.links = EngineLinks(1, arenas={DEVICE: self.arena})
        self.switches: list[ModelSwitched] = []
        self._loaded: dict[int, ModelLoaded] = {}
        self._waiting: dict[int, int] = {}
        self._leased: dict[int, int] = {}
        self._answers: dict[int, BatchCompleted] = {}
        self._came_from: dict[int, str] = {}
        self._batches = 0

    @property
    def pid(self) -> int:
        return self.links.pids()[self.key]

    def load(self, slot: int, launch: ModelLaunch) -> ModelLoaded:
        self.links.load(self.key, slot, launch)
        self._until(lambda: slot in self._loaded)
        loaded = self._loaded.pop(slot)
        self.memory.add(slot, DEVICE, loaded.image_bytes, 0, loaded.pools, _ms())
        return loaded

    def unload(self, slot: int) -> None:
        self.links.unload(self.key, slot)
        self.memory.remove(slot)

    def ask(self, slot: int) -> Answer:
        """One request, once its model is on the device."""
        started = time.perf_counter()
        one = self.memory.slots[slot]
        came_from = {"in": "resident", "coming": one.below}.get(one.place, one.below)
        self._waiting[slot] = 1
        self._until(lambda: self.residency.runnable(slot))
        del self._waiting[slot]
        self._batches += 1
        number = self._batches
        self._leased[slot] = number
        self.residency.used(slot, _ms())
        self.links.submit(self.key, number, slot, [EngineInput("r", b"{}", list(TOKENS), b'{"max_tokens":1}')])
        self._until(lambda: number in self._answers)
        del self._leased[slot]
        [output] = self._answers.pop(number).outputs
        assert output.error_code is None, output.error_message
        return Answer((time.perf_counter() - started) * 1_000, came_from, output.outputs or output.token_ids)

    def settle(self) -> None:
        """Until nothing moves any more."""
        self._until(lambda: not any(one.moving or one.place == "coming" for one in self.memory.slots.values()))

    def turn(self) -> None:
        for event in self.links.poll(1.0):
            self.heed(event)
        demand = [Demand(slot, 1) for slot in self._waiting]
        for order in self.residency.decide(demand, set(self._leased), _ms()):
            match order:
                case Activate():
                    self.links.activate(self.key, order.slot, order.pages)
                case Evict():
                    self.links.deactivate(self.key, order.slot)
                case _:
                    self.links.move_image(self.key, order.slot, order.to)

    def heed(self, event: EngineEvent) -> None:
        match event:
            case ModelLoaded():
                self._loaded[event.slot] = event
            case ModelSwitched():
                self.memory.arrived(event.slot)
                self.switches.append(event)
            case ImageMoved():
                self.memory.moved(event.slot, event.tier)
            case BatchCompleted():
                self._answers[event.batch_id] = event
            case LoadFailed() | SwitchFailed():
                raise RuntimeError(event.message)
            case _:
                pass

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.turn()

    def close(self) -> None:
        self.links.close()
        self.arena.close()


def _ms() -> float:
    return time.monotonic() * 1_000


@contextmanager
def engines(device_bytes: int, host_bytes: int) -> Iterator[Engines]:
    with tempfile.TemporaryDirectory() as folder:
        made = Engines(device_bytes, host_bytes, Path(folder))
        try:
            yield made
        finally:
            made.close()


def launch(folder: Path, **config: Any) -> ModelLaunch:
    made = launch_of(folder.name, backend="torch", source=str(folder), weights_digest="")
    return structs.replace(made, config=config)
