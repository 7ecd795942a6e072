"""Counts what a worker's engines do, from the events and commands of its loop. Pure; costs a little per batch.

`saw` is called with every turn, `take` about once a second with what only the world knows (processes, GPUs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineKey,
    EngineStarted,
    EngineStepped,
    ModelLoaded,
)
from gpu_worker.facts import (
    Identity,
    LoadModel,
    SendReports,
    StopEngine,
    SubmitBatch,
    TimePassed,
    UnloadModel,
    WorkerCommand,
    WorkerEvent,
)
from gpu_worker.load_meter import EVERY_MS as LOAD_EVERY_MS
from sie_stream.loads import ModelLoad, WorkerLoad
from sie_stream.telemetry import (
    MODELS_TOLD_EVERY_MS,
    DeviceMemorySample,
    DeviceSample,
    EngineSample,
    GpuSample,
    ModelSample,
    SequenceCounts,
    deviation,
    entropy_bits,
)
from sie_stream.trunks import Trunk, own_bytes

EVERY_MS = 1_000.0
SIZES_MAX = 32
"""Requests of a batch whose sizes are looked at."""
JITTER_SAMPLES = 60
LOAD_HOLDS_MS = 2.5 * LOAD_EVERY_MS


class ProcessSample(Struct, frozen=True):
    memory_bytes: int
    cpu_ms: int


class _Name(NamedTuple):
    model: str
    version: str


class _Slot(Struct):
    """A model in an engine."""

    name: _Name
    memory_bytes: int = 0
    cold_start_ms: int = 0
    sequences: SequenceCounts | None = None
    trunk: Trunk | None = None
    parts: dict[str, int] = {}


class _Tally(Struct):
    """A model on a device, since the start of the incarnation."""

    requests: int = 0
    batches: int = 0
    errors: int = 0
    busy_ms: float = 0.0
    input_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    """Since the last sample, by the number of bits of the size."""


class _Engine(Struct):
    pid: int = 0
    ends: int = 0
    slots: dict[int, _Slot] = field(default_factory=dict)
    memory: deque[int] = field(default_factory=lambda: deque(maxlen=JITTER_SAMPLES))


class Telemetry:
    """Of one worker."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._engines: dict[EngineKey, _Engine] = {}
        self._batches: dict[tuple[EngineKey, int], _Name] = {}
        """Which model a batch under way is of."""
        self._tallies: dict[tuple[str, _Name], _Tally] = {}
        """By (device, model and version)."""
        self._busy_ms: dict[str, float] = {}
        """By device, since its last sample."""
        self._loads: dict[str, ModelLoad] = {}
        self._loads_until = float("-inf")
        """Workers report only while there is something to do: an old report says nothing of now."""
        self._at_ms = 0.0
        self._told: dict[tuple[str, _Name], ModelSample] = {}
        self._taken_at: float | None = None
        self._told_all_at = float("-inf")

    @property
    def pids(self) -> list[int]:
        """Processes whose samples `take` wants."""
        return [engine.pid for engine in self._engines.values() if engine.pid]

    # ------------------------------------------------------------ the loop

    def saw(self, events: Sequence[WorkerEvent], commands: Sequence[WorkerCommand]) -> None:
        for event in events:
            self._event(event)
        for command in commands:
            self._command(command)

    def _event(self, event: WorkerEvent) -> None:
        match event:
            case TimePassed():
                self._at_ms = event.at_ms
            case BatchCompleted():
                self._completed(event)
            case BatchFailed():
                model = self._batches.pop((event.engine, event.batch_id), None)
                if model is not None:
                    self._tally(event.engine, model).errors += 1
            case EngineStepped():
                slots = self._engine(event.engine).slots
                for slot, counts in event.sequences:
                    if slot in slots:
                        slots[slot].sequences = counts
            case ModelLoaded():
                slot = self._engine(event.engine).slots.get(event.slot)
                if slot is not None:
                    slot.memory_bytes, slot.cold_start_ms = event.memory_bytes, event.load_ms + event.warmup_ms
                    slot.trunk, slot.parts = event.trunk, event.parts
            case EngineStarted():
                self._engine(event.engine).pid = event.pid
            case EngineDied():
                self._engine(event.engine).ends += 1
                self._gone(event.engine)
            case _:
                pass

    def _completed(self, event: BatchCompleted) -> None:
        model = self._batches.pop((event.engine, event.batch_id), None)
        if model is None:
            return
        tally = self._tally(event.engine, model)
        tally.batches += 1
        tally.requests += len(event.outputs)
        tally.busy_ms += event.inference_ms
        for output in event.outputs:
            if output.prompt_tokens:
                tally.prompt_tokens += output.prompt_tokens
                tally.completion_tokens += output.completion_tokens
        device = event.engine.device
        self._busy_ms[device] = self._busy_ms.get(device, 0.0) + event.inference_ms

    def _command(self, command: WorkerCommand) -> None:
        match command:
            case SubmitBatch():
                self._submitted(command)
            case LoadModel():
                slot = _Slot(_Name(command.launch.model, command.launch.version))
                self._engine(command.engine).slots[command.slot] = slot
            case UnloadModel():
                self._engine(command.engine).slots.pop(command.slot, None)
            case StopEngine():
                self._gone(command.engine)
            case SendReports():
                for report in command.reports:
                    if isinstance(report, WorkerLoad):
                        self._loads = {load.model: load for load in report.models}
                        self._loads_until = self._at_ms + LOAD_HOLDS_MS
            case _:
                pass

    def _submitted(self, command: SubmitBatch) -> None:
        slot = self._engine(command.engine).slots.get(command.slot)
        if slot is None:
            return
        self._batches[command.engine, command.batch_id] = slot.name
        tally = self._tally(command.engine, slot.name)
        items = command.items
        tally.input_bytes += sum([len(item.inputs) for item in items])
        for item in items[:SIZES_MAX]:
            bits = len(item.inputs).bit_length()
            tally.sizes[bits] = tally.sizes.get(bits, 0) + 1

    def _engine(self, key: EngineKey) -> _Engine:
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = _Engine()
        return engine

    def _gone(self, key: EngineKey) -> None:
        engine = self._engine(key)
        engine.pid = 0
        engine.slots.clear()
        engine.memory.clear()
        for batch in [batch for batch in self._batches if batch[0] == key]:
            del self._batches[batch]

    def _tally(self, key: EngineKey, model: _Name) -> _Tally:
        tally = self._tallies.get((key.device, model))
        if tally is None:
            tally = self._tallies[key.device, model] = _Tally()
        return tally

    # ------------------------------------------------------------ samples

    def due(self, at_ms: float) -> bool:
        return self._taken_at is None or at_ms - self._taken_at >= EVERY_MS

    def take(
        self,
        at_ms: float,
        now_ms: int,
        processes: Mapping[int, ProcessSample],
        gpus: Mapping[str, GpuSample],
        memories: Mapping[str, DeviceMemorySample] | None = None,
    ) -> tuple[DeviceSample, ...]:
        """One sample per device. `at_ms` monotonic, `now_ms` since the epoch; `processes` by pid, `gpus` and `memories`
        by device.
        """
        if at_ms > self._loads_until:
            self._loads = {}
        window_ms = max(1, round(at_ms - (at_ms if self._taken_at is None else self._taken_at)))
        self._taken_at = at_ms
        if at_ms - self._told_all_at >= MODELS_TOLD_EVERY_MS:
            self._told_all_at = at_ms
            self._told.clear()
        samples = tuple(
            DeviceSample(
                self._identity.worker,
                self._identity.incarnation,
                device.device,
                now_ms,
                window_ms,
                min(10_000, round(self._busy_ms.get(device.device, 0.0) * 10_000 / window_ms)),
                device.memory_bytes,
                self._engine_samples(device.device, processes),
                self._model_samples(device.device),
                gpus.get(device.device),
                (memories or {}).get(device.device),
            )
            for device in self._identity.devices
        )
        self._busy_ms.clear()
        return samples

    def _engine_samples(self, device: str, processes: Mapping[int, ProcessSample]) -> tuple[EngineSample, ...]:
        found: list[EngineSample] = []
        for key, engine in self._engines.items():
            process = processes.get(engine.pid)
            if key.device != device or process is None:
                continue
            engine.memory.append(process.memory_bytes)
            jitter = deviation(engine.memory)
            found.append(
                EngineSample(
                    key.backend, engine.pid, process.memory_bytes, process.cpu_ms, jitter, engine.ends, key.domain
                )
            )
        return tuple(found)

    def _model_samples(self, device: str) -> tuple[ModelSample, ...]:
        found: list[ModelSample] = []
        for key, engine in self._engines.items():
            if key.device != device:
                continue
            held: dict[str, int] = {}
            for slot in engine.slots.values():
                sample = self._model_sample(device, slot, own_bytes(slot.memory_bytes, slot.parts, held))
                held |= slot.parts
                if self._told.get((device, slot.name)) != sample:
                    self._told[device, slot.name] = sample
                    found.append(sample)
        return tuple(found)

    def _model_sample(self, device: str, slot: _Slot, memory_bytes: int) -> ModelSample:
        tally = self._tallies.get((device, slot.name)) or _Tally()
        load = self._loads.get(slot.name.model)
        entropy = round(entropy_bits(tally.sizes.values()), 3)
        tally.sizes.clear()
        return ModelSample(
            *slot.name,
            memory_bytes,
            slot.cold_start_ms,
            tally.requests,
            tally.batches,
            tally.errors,
            round(tally.busy_ms),
            tally.input_bytes,
            tally.prompt_tokens,
            tally.completion_tokens,
            entropy,
            load.waiting if load else 0,
            load.running if load else 0,
            load.p99_ms if load else None,
            slot.sequences,
            slot.trunk,
        )
