"""What a worker's telemetry counts, from the events and commands of its loop."""

from __future__ import annotations

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineKey,
    EngineStarted,
    EngineStepped,
    ModelLoaded,
)
from gpu_worker.facts import Identity, LoadModel, SendReports, SubmitBatch, TimePassed, UnloadModel
from gpu_worker.telemetry import LOAD_HOLDS_MS, ProcessSample, Telemetry
from sie_stream.control import Device, ModelLaunch
from sie_stream.loads import ModelLoad, WorkerLoad
from sie_stream.telemetry import MODELS_TOLD_EVERY_MS, GpuSample, SequenceCounts, deviation, entropy_bits
from sie_stream.trunks import trunk_of

CPU = EngineKey("cpu:0", "sklearn")
ME = Identity("w0", "w0-1", "host", 1, (Device("cpu:0", "cpu", 1 << 30), Device("cuda:0", "cuda", 1 << 34)), (), {})


def launch(model: str, version: str = "1.0.0") -> ModelLaunch:
    return ModelLaunch(model, version, "mi-1", "sklearn", "/m", "", {}, "classification", 0, 1 << 20, 64)


def items(*sizes: int) -> list[EngineInput]:
    return [EngineInput(f"r{number}", b"x" * size) for number, size in enumerate(sizes)]


def answers(count: int, tokens: int = 0) -> list[EngineOutput]:
    return [EngineOutput(f"r{n}", b"{}", prompt_tokens=tokens, completion_tokens=2 * tokens) for n in range(count)]


def loaded(telemetry: Telemetry, *models: str) -> None:
    commands = [LoadModel(CPU, slot, launch(model)) for slot, model in enumerate(models)]
    events = [ModelLoaded(CPU, slot, 1_000 + slot, "", 30, 12) for slot in range(len(models))]
    telemetry.saw([], commands)
    telemetry.saw([EngineStarted(CPU, 77, {}), *events], [])


def test_batches_are_counted_for_their_model_and_their_device() -> None:
    telemetry = Telemetry(ME)
    loaded(telemetry, "a", "b")
    telemetry.take(0.0, 1_000, {}, {})
    telemetry.saw([], [SubmitBatch(CPU, 1, 0, items(100, 120)), SubmitBatch(CPU, 2, 1, items(7))])
    telemetry.saw([BatchCompleted(CPU, 1, answers(2, tokens=5), 250.0), BatchFailed(CPU, 2, "engine_error", "no")], [])
    cpu, cuda = telemetry.take(1_000.0, 2_000, {}, {})
    assert (cpu.worker, cpu.incarnation, cpu.device, cpu.at_ms, cpu.window_ms) == ("w0", "w0-1", "cpu:0", 2_000, 1_000)
    assert (cpu.busy_bp, cuda.busy_bp) == (2_500, 0)
    first, second = cpu.models
    assert (first.model, first.version, first.memory_bytes, first.cold_start_ms) == ("a", "1.0.0", 1_000, 42)
    assert (first.requests, first.batches, first.errors, first.busy_ms, first.input_bytes) == (2, 1, 0, 250, 220)
    assert (first.prompt_tokens, first.completion_tokens) == (10, 20)
    assert (second.model, second.requests, second.errors, second.input_bytes) == ("b", 0, 1, 7)
    assert cuda.models == ()


def test_a_trunk_is_told_and_counted_once_as_long_as_any_model_has_it() -> None:
    telemetry = Telemetry(ME)
    trunk = trunk_of("sha256:w", b"{}", b"{}", "float32, dense, fast", "16 tokens")
    telemetry.saw([], [LoadModel(CPU, slot, launch(model)) for slot, model in enumerate("abc")])
    parts = {"trunk": 700, "head": 200}
    sizes = [(950, parts), (950, parts), (800, {"trunk": 700, "other head": 50})]
    events = [ModelLoaded(CPU, n, size, "", 1, 1, 0, trunk, shared) for n, (size, shared) in enumerate(sizes)]
    telemetry.saw(events, [])
    first = telemetry.take(0.0, 0, {}, {})[0].models
    assert [(m.memory_bytes, m.trunk) for m in first] == [(950, trunk), (50, trunk), (100, trunk)]
    telemetry.saw([], [UnloadModel(CPU, 0)])
    left = telemetry.take(float(MODELS_TOLD_EVERY_MS), 0, {}, {})[0].models
    assert [(m.model, m.memory_bytes) for m in left] == [("b", 950), ("c", 100)]


def test_a_model_that_did_nothing_is_told_only_every_half_minute() -> None:
    telemetry = Telemetry(ME)
    loaded(telemetry, "a", "b")
    assert [m.model for m in telemetry.take(0.0, 0, {}, {})[0].models] == ["a", "b"]
    telemetry.saw([], [SubmitBatch(CPU, 1, 1, items(9))])
    telemetry.saw([BatchCompleted(CPU, 1, answers(1), 1.0)], [])
    assert [m.model for m in telemetry.take(1_000.0, 0, {}, {})[0].models] == ["b"]
    assert [m.model for m in telemetry.take(float(MODELS_TOLD_EVERY_MS), 0, {}, {})[0].models] == ["a", "b"]


def test_two_versions_of_a_model_are_counted_apart() -> None:
    telemetry = Telemetry(ME)
    telemetry.saw([], [LoadModel(CPU, 0, launch("a")), LoadModel(CPU, 1, launch("a", "2.0.0"))])
    telemetry.saw([], [SubmitBatch(CPU, 1, 1, items(4))])
    telemetry.saw([BatchCompleted(CPU, 1, answers(1), 1.0)], [])
    models = telemetry.take(0.0, 0, {}, {})[0].models
    assert [(m.version, m.requests) for m in models] == [("1.0.0", 0), ("2.0.0", 1)]


def test_what_waits_is_forgotten_when_the_worker_stops_reporting_it() -> None:
    telemetry = Telemetry(ME)
    loaded(telemetry, "a")
    report = WorkerLoad("w0", "w0-1", 2_000, (ModelLoad("a", 9, 4, 5, 3, 10, 70),))
    telemetry.saw([TimePassed(0, 100.0)], [SendReports((report,))])
    told = telemetry.take(200.0, 0, {}, {})[0].models[0]
    assert (told.waiting, told.running, told.p99_ms) == (5, 3, 70)
    told = telemetry.take(101.0 + LOAD_HOLDS_MS, 0, {}, {})[0].models[0]
    assert (told.waiting, told.running, told.p99_ms) == (0, 0, None)


def test_an_engine_that_died_is_counted_and_its_models_are_gone() -> None:
    telemetry = Telemetry(ME)
    loaded(telemetry, "a")
    telemetry.saw([], [SubmitBatch(CPU, 1, 0, items(4))])
    telemetry.saw([EngineDied(CPU, "SIGKILL")], [])
    assert telemetry.pids == []
    assert telemetry.take(0.0, 0, {77: ProcessSample(1, 1)}, {})[0].models == ()
    loaded(telemetry, "a")
    telemetry.saw([BatchCompleted(CPU, 1, answers(1), 1.0)], [])  # of the dead one: nobody's any more
    device = telemetry.take(1_000.0, 0, {77: ProcessSample(5 << 20, 1_500)}, {})[0]
    assert [(one.backend, one.pid, one.memory_bytes, one.cpu_ms, one.ends) for one in device.engines] == [
        ("sklearn", 77, 5 << 20, 1_500, 1)
    ]
    assert device.models[0].requests == 0


def test_sequences_are_those_of_the_newest_word_and_leave_with_their_model() -> None:
    telemetry = Telemetry(ME)
    loaded(telemetry, "a")
    counts = SequenceCounts(2, 1, 64, 30, 100, 60)
    telemetry.saw([EngineStepped(CPU, [(0, counts), (5, counts)])], [])
    assert telemetry.take(0.0, 0, {}, {})[0].models[0].sequences == counts
    telemetry.saw([], [UnloadModel(CPU, 0)])
    telemetry.saw([EngineStepped(CPU, [(0, counts)])], [])
    assert telemetry.take(1_000.0, 0, {}, {})[0].models == ()


def test_jitter_is_the_deviation_of_the_engine_s_memory() -> None:
    telemetry = Telemetry(ME)
    loaded(telemetry, "a")
    device = telemetry.take(0.0, 0, {77: ProcessSample(100, 0)}, {})[0]
    for second, memory in enumerate((200, 100, 200), start=1):
        device = telemetry.take(1_000.0 * second, 0, {77: ProcessSample(memory, 0)}, {})[0]
    assert device.engines[0].memory_jitter_bytes == 50


def test_entropy_is_of_the_sizes_since_the_last_sample() -> None:
    telemetry = Telemetry(ME)
    loaded(telemetry, "a")
    telemetry.saw([], [SubmitBatch(CPU, 1, 0, items(3, 3, 300, 300))])
    assert telemetry.take(0.0, 0, {}, {})[0].models[0].size_entropy_bits == 1.0
    telemetry.saw([], [SubmitBatch(CPU, 2, 0, items(3, 2))])
    assert telemetry.take(1_000.0, 0, {}, {})[0].models[0].size_entropy_bits == 0.0
    assert entropy_bits([]) == 0.0
    assert entropy_bits([1, 1, 1, 1]) == 2.0
    assert deviation([5]) == 0


def test_a_gpu_is_told_with_its_device() -> None:
    gpu = GpuSample(utilisation_pct=40)
    cpu, cuda = Telemetry(ME).take(0.0, 0, {}, {"cuda:0": gpu})
    assert (cpu.gpu, cuda.gpu) == (None, gpu)
