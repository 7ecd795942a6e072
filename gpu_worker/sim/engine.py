"""Engines under virtual time: every delay, answer and death is decided by the script they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput, failed
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineEvent,
    EngineKey,
    EngineStarted,
    EngineStepped,
    ImageMoved,
    LoadFailed,
    ModelLoaded,
    ModelSwitched,
    SequenceAdopted,
    SequenceExported,
    StreamedTokens,
    SwitchFailed,
    TokensStreamed,
)
from gpu_worker.memory.slots import Below
from sie_stream.control import ModelLaunch
from sie_stream.ids import base_of
from sie_stream.ports import Clock


def echo(item: EngineInput) -> EngineOutput:
    return EngineOutput(item.request_id, outputs=b'{"echo":' + item.inputs + b"}")


def _refused(item: EngineInput) -> EngineOutput:
    return failed(item, "engine_refused", "scripted: this version refuses everything")


@dataclass(slots=True)
class EngineScript:
    """How virtual engines behave. Request ids name the inputs that break them."""

    start_ms: float = 20.0
    load_ms: float = 10.0
    batch_ms: float = 2.0
    item_ms: float = 0.0
    answer: Callable[[EngineInput], EngineOutput] = echo
    kills: set[str] = field(default_factory=set)
    hangs: set[str] = field(default_factory=set)
    raises: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    """Models that do not load."""
    broken: set[tuple[str, str]] = field(default_factory=set)
    """(model, version) that refuse every input."""
    kills_loading: set[str] = field(default_factory=set)
    """Models whose load ends the process."""
    continuous: dict[str, int] = field(default_factory=dict)
    """Models whose requests run side by side, and how many of them."""
    movable: bool = False
    """Whether requests that run side by side can go on in another engine."""
    images: dict[str, int] = field(default_factory=dict)
    """Bytes of models whose weights can leave the device."""
    switch_ms: float = 5.0
    unreadable: set[str] = field(default_factory=set)
    """Models that cannot be brought to the device."""
    stuck: set[str] = field(default_factory=set)
    """Models whose way to the device has no end."""
    disk_full: bool = False
    """Whether no image can be written to the disk."""


class Frozen(Struct, frozen=True):
    """The image of a request: what part of its time is over, and how many pieces of its answer were told."""

    request_id: str = ""
    done: float = 0.0
    told: int = 0


BEGIN = Frozen()


@dataclass(slots=True)
class _Flight:
    item: EngineInput
    slot: int
    started_ms: float
    """As if it had begun and ended here."""
    took_ms: float


@dataclass(slots=True)
class _Process:
    busy_until: float
    load_until: float
    slots: dict[int, ModelLaunch] = field(default_factory=dict)
    away: dict[int, None] = field(default_factory=dict)
    """Slots whose weights are not on the device."""
    mapped: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Pages of the slots that are."""
    pending: list[tuple[float, int, EngineEvent]] = field(default_factory=list)
    flights: dict[int, _Flight] = field(default_factory=dict)
    """By batch id, requests of movable models; some have landed."""
    hanging: bool = False

    def flying(self) -> list[int]:
        """Batches whose answer is on its way."""
        return [entry[2].batch_id for entry in self.pending if isinstance(entry[2], BatchCompleted)]


FLYING = (BatchCompleted, EngineStepped, TokensStreamed, SequenceAdopted)
PIECES = 4
"""Parts in which an answer is streamed; the last one never is."""
STEPPED_EVERY_MS = 1_000.0


class SimEngines:
    """Implements EnginePort. poll() never waits: the simulator moves the clock."""

    def __init__(self, clock: Clock, script: EngineScript | None = None) -> None:
        self._clock = clock
        self.script = script or EngineScript()
        self._processes: dict[EngineKey, _Process] = {}
        self._sequence = 0
        self.batches: list[tuple[float, tuple[str, ...]]] = []
        """When, and which request ids, in the order they were submitted."""
        self.resumed: list[str] = []
        """Request ids that were to go on from what an earlier process kept."""
        self.computed_ms = 0.0
        """Of requests of movable models: how much was computed, of all of them together."""
        self.starts = 0

    def load(self, engine: EngineKey, slot: int, launch: ModelLaunch) -> None:
        process = self._started(engine)
        process.load_until = max(process.load_until, self._clock.monotonic_ms()) + self.script.load_ms
        at = process.load_until
        if launch.model in self.script.kills_loading:
            self._later(process, at, EngineDied(engine, "SIGSEGV"))
        elif launch.model in self.script.refuses:
            self._later(process, at, LoadFailed(engine, slot, "digest_mismatch", "scripted refusal"))
        else:
            process.slots[slot] = launch
            load_ms = round(self.script.load_ms)
            side_by_side = self.script.continuous.get(launch.model, 0)
            size = self.script.images.get(launch.model, 0)
            if size:
                process.away[slot] = None
            about = (size or launch.memory_bytes, launch.weights_digest, load_ms, 0, side_by_side)
            movable = self.script.movable and side_by_side > 0
            event = ModelLoaded(engine, slot, *about, image_bytes=size, movable=movable)
            self._later(process, at, event)

    def unload(self, engine: EngineKey, slot: int) -> None:
        process = self._processes.get(engine)
        if process is not None:
            process.slots.pop(slot, None)
            process.mapped.pop(slot, None)

    def activate(self, engine: EngineKey, slot: int, pages: Sequence[int]) -> None:
        """Pages that another slot has must not be given away: whoever is there is asked."""
        process = self._processes.get(engine)
        if process is None:
            return
        at = self._clock.monotonic_ms() + self.script.switch_ms
        launch = process.slots.get(slot)
        if launch is None or launch.model in self.script.unreadable:
            self._later(process, at, SwitchFailed(engine, slot, "scripted: the image cannot be read"))
            return
        if launch.model in self.script.stuck:
            return
        slots = [item for one in self._processes.values() for item in one.mapped.items()]
        others = {page for at_slot, held in slots if at_slot != slot for page in held}
        assert not others.intersection(pages), f"slot {slot} got pages of others"
        process.mapped[slot] = tuple(pages)
        process.away.pop(slot, None)
        size = self.script.images[launch.model]
        self._later(process, at, ModelSwitched(engine, slot, "host", size, self.script.switch_ms))

    def deactivate(self, engine: EngineKey, slot: int) -> None:
        process = self._processes.get(engine)
        if process is not None:
            process.away[slot] = None
            process.mapped.pop(slot, None)

    def move_image(self, engine: EngineKey, slot: int, to: Below) -> None:
        process = self._processes.get(engine)
        if process is not None:
            moved = ImageMoved(engine, slot, to)
            if to == "disk" and self.script.disk_full:
                moved = ImageMoved(engine, slot, "host", "[Errno 28] No space left on device")
            self._later(process, self._clock.monotonic_ms() + self.script.switch_ms, moved)

    def submit(
        self, engine: EngineKey, batch_id: int, slot: int, items: Sequence[EngineInput], image: bytes = b""
    ) -> None:
        process = self._processes.get(engine)
        if process is None:
            return  # its death is already on the way
        assert slot in process.slots, (engine, slot)
        assert slot not in process.away, f"slot {slot} is not on the device"
        names = tuple(item.request_id for item in items)
        self.batches.append((self._clock.monotonic_ms(), names))
        self.resumed += [item.request_id for item in items if item.resume]
        if process.slots[slot].model in self.script.continuous:
            frozen = self._adopted(engine, process, batch_id, items[0], image) if image else BEGIN
            self._fly(engine, process, batch_id, items, frozen)
            if self.script.movable and batch_id in process.flying():
                now, took = self._clock.monotonic_ms(), self.script.batch_ms + self.script.item_ms
                process.flights[batch_id] = _Flight(items[0], slot, now - took * frozen.done, took)
                self.computed_ms += took * (1.0 - frozen.done)
            return
        started_at = max(process.busy_until, self._clock.monotonic_ms())
        took = self.script.batch_ms + self.script.item_ms * len(items)
        process.busy_until = started_at + took
        if process.hanging or self.script.hangs.intersection(names):
            process.hanging = True
        elif self.script.kills.intersection(names):
            self._later(process, process.busy_until, EngineDied(engine, "SIGSEGV"))
        elif self.script.raises.intersection(names):
            self._later(
                process, process.busy_until, BatchFailed(engine, batch_id, "engine_error", "scripted exception")
            )
        else:
            launch = process.slots[slot]
            broken = (base_of(launch.model), launch.version) in self.script.broken
            outputs = [_refused(item) if broken else self.script.answer(item) for item in items]
            self._later(process, process.busy_until, BatchCompleted(engine, batch_id, outputs, took))

    def _adopted(self, engine: EngineKey, process: _Process, batch_id: int, item: EngineInput, image: bytes) -> Frozen:
        """How much of it need not be computed again."""
        now = self._clock.monotonic_ms()
        try:
            frozen = msgspec.json.decode(image, type=Frozen)
        except msgspec.DecodeError:
            self._later(process, now, SequenceAdopted(engine, batch_id, "scripted: the image is damaged"))
            return BEGIN
        assert frozen.request_id == item.request_id, "an image of another request"
        self._later(process, now + 1, SequenceAdopted(engine, batch_id))
        return frozen

    def export(self, engine: EngineKey, batch_ids: Sequence[int], bytes_max: int) -> None:
        process = self._processes.get(engine)
        if process is None:
            return
        now = self._clock.monotonic_ms()
        for batch_id in batch_ids:
            flight = process.flights.get(batch_id)
            image: bytes | None = None
            if flight is not None and batch_id in process.flying():
                done = (now - flight.started_ms) / flight.took_ms
                untold = sum(isinstance(one, TokensStreamed) and _is_of(one, batch_id) for _, _, one in process.pending)
                image = msgspec.json.encode(Frozen(flight.item.request_id, done, PIECES - 1 - untold))
                if len(image) > bytes_max:
                    image = None
                else:
                    bytes_max -= len(image)
                    self.computed_ms -= flight.took_ms * (1.0 - done)
                    process.pending = [entry for entry in process.pending if not _is_of(entry[2], batch_id)]
            self._later(process, now, SequenceExported(engine, batch_id, image))

    def _fly(
        self, engine: EngineKey, process: _Process, batch_id: int, items: Sequence[EngineInput], frozen: Frozen
    ) -> None:
        """A request of a continuous model: it ends after its own time, whatever else runs."""
        (item,) = items
        took = self.script.batch_ms + self.script.item_ms
        ends_at = self._clock.monotonic_ms() + took * (1.0 - frozen.done)
        if item.request_id in self.script.hangs:
            process.hanging = True
        if process.hanging:
            process.pending = [entry for entry in process.pending if not isinstance(entry[2], FLYING)]
        elif item.request_id in self.script.kills:
            self._tell(engine, process, batch_id, item, took)
            self._later(process, ends_at, EngineDied(engine, "SIGSEGV"))
        elif item.request_id in self.script.raises:
            together = [*process.flying(), batch_id]
            process.pending = [entry for entry in process.pending if not isinstance(entry[2], FLYING)]
            for one in together:
                failure = BatchFailed(engine, one, "engine_error", "scripted exception", len(together))
                self._later(process, self._clock.monotonic_ms(), failure)
        else:
            self._later(process, ends_at, BatchCompleted(engine, batch_id, [self.script.answer(item)], took))
            self._tell(engine, process, batch_id, item, took, frozen)
            at = self._clock.monotonic_ms() + STEPPED_EVERY_MS
            while at < ends_at:
                self._later(process, at, EngineStepped(engine))
                at += STEPPED_EVERY_MS

    def _tell(
        self,
        engine: EngineKey,
        process: _Process,
        batch_id: int,
        item: EngineInput,
        took: float,
        frozen: Frozen = BEGIN,
    ) -> None:
        """The answer of a request that streams grows piece by piece while it flies."""
        text = (self.script.answer(item).outputs or b"").decode()
        if not item.stream or not text:
            return
        size = -(-len(text) // PIECES)
        for number in range(frozen.told, PIECES - 1):
            piece = StreamedTokens(batch_id, 0, (number,), text[number * size : (number + 1) * size])
            after = max(0.0, took * ((number + 1) / PIECES - frozen.done))
            self._later(process, self._clock.monotonic_ms() + after, TokensStreamed(engine, (piece,)))

    def cancel(self, engine: EngineKey, batch_id: int) -> None:
        """What flies lands now; the answer is nobody's."""
        process = self._processes.get(engine)
        if process is not None and batch_id in process.flying():
            entry = next(one for one in process.pending if getattr(one[2], "batch_id", None) == batch_id)
            process.pending.remove(entry)
            self._later(process, self._clock.monotonic_ms(), entry[2])

    def stop(self, engine: EngineKey) -> None:
        self._processes.pop(engine, None)

    def kill(self, engine: EngineKey, cause: str = "SIGKILL") -> None:
        """Fault: the process ends now."""
        process = self._processes.get(engine)
        if process is not None:
            process.pending.clear()
            self._later(process, self._clock.monotonic_ms(), EngineDied(engine, cause))

    def poll(self, wait_ms: float) -> list[EngineEvent]:
        now = self._clock.monotonic_ms()
        due: list[tuple[float, int, EngineEvent]] = []
        for engine, process in list(self._processes.items()):
            process.pending.sort(key=lambda entry: entry[:2])
            mine = [entry for entry in process.pending if entry[0] <= now]
            for index, entry in enumerate(mine):
                if isinstance(entry[2], EngineDied):
                    del mine[index + 1 :]
                    del self._processes[engine]
                    break
            process.pending = [entry for entry in process.pending if entry[0] > now]
            due.extend(mine)
        due.sort(key=lambda entry: entry[:2])
        return [event for _, _, event in due]

    def close(self) -> None:
        self._processes.clear()

    def _started(self, engine: EngineKey) -> _Process:
        process = self._processes.get(engine)
        if process is None:
            self.starts += 1
            ready_at = self._clock.monotonic_ms() + self.script.start_ms
            process = self._processes[engine] = _Process(ready_at, ready_at)
            self._later(process, ready_at, EngineStarted(engine, self.starts, {"sim": "1"}))
        return process

    def _later(self, process: _Process, at: float, event: EngineEvent) -> None:
        self._sequence += 1
        process.pending.append((at, self._sequence, event))


def _is_of(event: EngineEvent, batch_id: int) -> bool:
    if isinstance(event, TokensStreamed):
        return any(one.batch_id == batch_id for one in event.deltas)
    return isinstance(event, BatchCompleted | SequenceAdopted) and event.batch_id == batch_id
