"""Engine processes of a replay: its own, at the nice value of this process. Production has no part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.edge.stage2 import Stage2Store
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineEvent,
    EngineKey,
    EnginePort,
    EngineStarted,
    EngineStepped,
    LoadFailed,
    ModelLoaded,
    TokensStreamed,
)
from gpu_worker.outcomes import Stage2Refused, engine_label
from sie_stream.control import ModelLaunch
from sie_stream.edge.stop import StopFlag
from sie_stream.postprocess import Stage2
from sie_stream.replay.versions import Unavailable

DEVICE = "cpu:0"
OUTSTANDING_MAX = 3
"""Batches an engine holds: it must not wait while this process reads."""
ROWS_TABULAR = 512
TABULAR = ("sklearn", "onnx")
WAIT_MS = 50.0


class Target(Struct, eq=False):
    """One version of a model, loaded."""

    launch: ModelLaunch
    key: EngineKey
    slot: int
    stage2: Stage2
    batch_rows: int
    weights_digest: str = ""
    engine: str = ""
    """As provenance writes it."""


class Batch(Struct, eq=False):
    target: Target
    items: list[EngineInput]
    tokens: list[object]
    """What the owner wants back, one for each item."""


Answered = Callable[[Target, Sequence[object], Sequence[EngineOutput], float], None]
"""(target, tokens, their outputs, inference ms of the batch)"""
Waiting = Callable[[ModelLaunch], AbstractContextManager[None]]
"""Around a wait for a version to be loaded."""


def unheard(_launch: ModelLaunch) -> AbstractContextManager[None]:
    """Nobody is told of waits."""
    return nullcontext()


class Engines:
    """Loads versions, runs batches, and tries alone what an engine did not survive."""

    def __init__(
        self, links: EnginePort, record_bytes_max: int, answered: Answered, stop: StopFlag, waiting: Waiting = unheard
    ) -> None:
        self._links = links
        self._waiting = waiting
        self._stop = stop
        self._stage2_of = Stage2Store(record_bytes_max)
        self._answered = answered
        self._versions: dict[EngineKey, dict[str, str]] = {}
        self._targets: dict[bytes, Target | Unavailable] = {}
        """By the launch as JSON."""
        self._loading: dict[int, Target] = {}
        self._refused: dict[int, str] = {}
        self._backends: dict[str, None] = {}
        self._running: dict[int, Batch] = {}
        self._next_batch = 0
        self._next_slot = 0
        self.deaths = 0

    def prepare(self, launch: ModelLaunch) -> None:
        """Begin to load this version; target() waits for it."""
        key = msgspec.json.encode(launch)
        if key in self._targets:
            return
        try:
            # What is pooled in production is finished here, too: there is no egress after this process.
            stage2 = self._stage2_of(msgspec.structs.replace(launch, fusion="fused"))
        except Stage2Refused as refusal:
            self._targets[key] = Unavailable(f"{launch.model}@{launch.version}: {refusal}")
            return
        self._next_slot += 1
        rows = max(launch.batch_max, ROWS_TABULAR) if launch.backend in TABULAR else launch.batch_max
        target = Target(launch, EngineKey(DEVICE, launch.backend), self._next_slot, stage2, rows)
        self._targets[key] = target
        self._backends.setdefault(launch.backend)
        self._load(target)

    def _load(self, target: Target) -> None:
        self._loading[target.slot] = target
        self._links.load(target.key, target.slot, target.launch)

    def target(self, launch: ModelLaunch) -> Target | Unavailable:
        """Load this version, or say why it cannot be. Waits for the load; batches that run meanwhile are answered."""
        self.prepare(launch)
        key = msgspec.json.encode(launch)
        found = self._targets[key]
        if isinstance(found, Target):
            found = self._targets[key] = self._loaded(found)
        return found

    def _loaded(self, target: Target) -> Target | Unavailable:
        if target.slot in self._loading:
            with self._waiting(target.launch):
                while target.slot in self._loading and not self._stop:
                    self._poll(WAIT_MS)
        if target.slot in self._loading:
            return Unavailable(f"{target.launch.model}@{target.launch.version}: stopped while it was loading")
        why = self._refused.get(target.slot)
        return target if why is None else Unavailable(f"{target.launch.model}@{target.launch.version}: {why}")

    def unload_all(self) -> None:
        """What follows needs other models. Waits for what runs."""
        self.finish()
        for target in self._targets.values():
            if isinstance(target, Target):
                self._loaded(target)
                self._links.unload(target.key, target.slot)
        self._targets.clear()

    def submit(self, target: Target, items: list[EngineInput], tokens: list[object]) -> None:
        """Waits while the engine has enough to do."""
        while len(self._running) >= OUTSTANDING_MAX and not self._stop:
            self._poll(WAIT_MS)
        self._send(Batch(target, items, tokens))

    def _send(self, batch: Batch) -> None:
        why = self._refused.get(batch.target.slot)
        if why is not None:  # its engine died, and it could not be loaded again
            lost = [
                EngineOutput(item.request_id, error_code="engine_unavailable", error_message=why)
                for item in batch.items
            ]
            self._answered(batch.target, batch.tokens, lost, 0.0)
            return
        self._next_batch += 1
        self._running[self._next_batch] = batch
        self._links.submit(batch.target.key, self._next_batch, batch.target.slot, batch.items)

    def finish(self) -> None:
        """Wait for everything that runs, unless asked to stop."""
        while self._running and not self._stop:
            self._poll(WAIT_MS)

    def tend(self) -> None:
        """Answer what is done, without waiting."""
        if self._running:
            self._poll(0.0)

    def _poll(self, wait_ms: float) -> None:
        for event in self._links.poll(wait_ms):
            self._handle(event)

    def _handle(self, event: EngineEvent) -> None:
        match event:
            case BatchCompleted():
                batch = self._running.pop(event.batch_id)
                self._answered(batch.target, batch.tokens, event.outputs, event.inference_ms)
            case BatchFailed():
                self._alone(self._running.pop(event.batch_id), event.code, event.message)
            case ModelLoaded():
                target = self._loading.pop(event.slot)
                target.weights_digest = event.weights_digest
                target.engine = engine_label(target.launch.backend, self._versions.get(target.key, {}))
            case LoadFailed():
                del self._loading[event.slot]
                self._refused[event.slot] = f"{event.code}: {event.message}"
            case EngineStarted():
                self._versions[event.engine] = event.versions
            case EngineStepped() | TokensStreamed():
                pass  # what runs goes on
            case EngineDied():
                self._revive(event)

    def _alone(self, batch: Batch, code: str, message: str) -> None:
        """One input must not fail its neighbours: each of them again by itself; a lone one has its answer."""
        if len(batch.items) == 1:
            item = batch.items[0]
            output = EngineOutput(item.request_id, error_code=code, error_message=message)
            self._answered(batch.target, batch.tokens, [output], 0.0)
            return
        for item, token in zip(batch.items, batch.tokens, strict=True):
            self._send(Batch(batch.target, [item], [token]))

    def _revive(self, event: EngineDied) -> None:
        """The models of a dead engine are loaded again, and what it was running is tried alone."""
        self.deaths += 1
        lost = [number for number, batch in self._running.items() if batch.target.key == event.engine]
        batches = [self._running.pop(number) for number in lost]
        for slot in [slot for slot, target in self._loading.items() if target.key == event.engine]:
            del self._loading[slot]
            self._refused[slot] = f"the engine died loading it: {event.cause}"
        again = [one for one in self._targets.values() if isinstance(one, Target) and one.key == event.engine]
        for target in again:
            if target.slot not in self._refused:
                self._load(target)
        for target in again:
            self._loaded(target)
        if not batches:
            return
        # It runs batches in order, so the first is the suspect.
        if len(batches[0].items) == 1:
            self._alone(batches[0], "poison", f"the engine died of it: {event.cause}")
        else:
            self._one_by_one(batches[0])
        for batch in batches[1:]:
            self._send(batch)

    def _one_by_one(self, batch: Batch) -> None:
        """Each waits for the one before, so that the next death names its cause."""
        for item, token in zip(batch.items, batch.tokens, strict=True):
            self._send(Batch(batch.target, [item], [token]))
            self.finish()

    def close(self) -> None:
        self._links.close()

    def backends(self) -> Sequence[str]:
        return list(self._backends)
