"""Engine processes of a replay: its own, at the nice value of this process. Production has no part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.edge.stage2 import Stage2Store
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineEvent,
    EngineKey,
    EngineStarted,
    LoadFailed,
    ModelLoaded,
)
from gpu_worker.outcomes import Stage2Refused, engine_label
from sie_stream.control import ModelLaunch
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


Answered = Callable[[Target, object, EngineOutput, float], None]
"""(target, token, output, inference ms of the batch)"""


class Engines:
    """Loads versions, runs batches, and tries alone what an engine did not survive."""

    def __init__(self, threads: int, record_bytes_max: int, answered: Answered) -> None:
        self._links = EngineLinks(threads)
        self._stage2_of = Stage2Store(record_bytes_max)
        self._answered = answered
        self._versions: dict[EngineKey, dict[str, str]] = {}
        self._targets: dict[tuple[str, str, str], Target | Unavailable] = {}
        self._running: dict[int, Batch] = {}
        self._next_batch = 0
        self._next_slot = 0
        self.deaths = 0

    def target(self, launch: ModelLaunch) -> Target | Unavailable:
        """Load this version, or say why it cannot be. Waits for the load; batches that run meanwhile are answered."""
        key = (launch.model, launch.version, launch.weights_digest)
        if key not in self._targets:
            self._targets[key] = self._load(launch)
        return self._targets[key]

    def _load(self, launch: ModelLaunch) -> Target | Unavailable:
        try:
            stage2 = self._stage2_of(launch)
        except Stage2Refused as refusal:
            return Unavailable(f"{launch.model}@{launch.version}: {refusal}")
        key = EngineKey(DEVICE, launch.backend)
        self._next_slot += 1
        rows = max(launch.batch_max, ROWS_TABULAR) if launch.backend in TABULAR else launch.batch_max
        target = Target(launch, key, self._next_slot, stage2, rows)
        return self._start(target)

    def _start(self, target: Target) -> Target | Unavailable:
        launch = target.launch
        self._links.load(target.key, target.slot, launch)
        while True:
            for event in self._links.poll(WAIT_MS):
                match event:
                    case ModelLoaded() if event.slot == target.slot:
                        target.weights_digest = event.weights_digest
                        target.engine = engine_label(launch.backend, self._versions.get(target.key, {}))
                        return target
                    case LoadFailed() if event.slot == target.slot:
                        return Unavailable(f"{launch.model}@{launch.version}: {event.code}: {event.message}")
                    case EngineDied() if event.engine == target.key and not self._runs_on(target.key):
                        return Unavailable(
                            f"{launch.model}@{launch.version}: the engine died loading it: {event.cause}"
                        )
                    case _:
                        self._handle(event)

    def _runs_on(self, key: EngineKey) -> bool:
        return any(batch.target.key == key for batch in self._running.values())

    def submit(self, target: Target, items: list[EngineInput], tokens: list[object]) -> None:
        """Waits while the engine has enough to do."""
        while len(self._running) >= OUTSTANDING_MAX:
            self._poll(WAIT_MS)
        self._send(Batch(target, items, tokens))

    def _send(self, batch: Batch) -> None:
        self._next_batch += 1
        self._running[self._next_batch] = batch
        self._links.submit(batch.target.key, self._next_batch, batch.target.slot, batch.items)

    def finish(self) -> None:
        """Wait for everything that runs."""
        while self._running:
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
                for token, output in zip(batch.tokens, event.outputs, strict=True):
                    self._answered(batch.target, token, output, event.inference_ms)
            case BatchFailed():
                self._alone(self._running.pop(event.batch_id), event.code, event.message)
            case EngineStarted():
                self._versions[event.engine] = event.versions
            case EngineDied():
                self._revive(event)
            case _:
                pass  # loads are awaited where they are asked for

    def _alone(self, batch: Batch, code: str, message: str) -> None:
        """One input must not fail its neighbours: each of them again by itself; a lone one has its answer."""
        if len(batch.items) == 1:
            item = batch.items[0]
            output = EngineOutput(item.request_id, error_code=code, error_message=message)
            self._answered(batch.target, batch.tokens[0], output, 0.0)
            return
        for item, token in zip(batch.items, batch.tokens, strict=True):
            self._send(Batch(batch.target, [item], [token]))

    def _revive(self, event: EngineDied) -> None:
        """The models of a dead engine are loaded again, and what it was running is tried alone."""
        self.deaths += 1
        lost = [number for number, batch in self._running.items() if batch.target.key == event.engine]
        batches = [self._running.pop(number) for number in lost]
        for known, target in list(self._targets.items()):
            if isinstance(target, Target) and target.key == event.engine:
                again = self._start(target)
                if isinstance(again, Unavailable):
                    self._targets[known] = again
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
        return [target.launch.backend for target in self._targets.values() if isinstance(target, Target)]
