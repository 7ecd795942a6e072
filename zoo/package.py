"""Turns trained or converted weights into a model folder: declaration, card, samples, golden answers, baselines.

The golden answers and the baselines come from the same backends that serve the model later, so a model that cannot be
served cannot be built.
"""

from __future__ import annotations

import gc
import json
import math
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from gpu_worker.backends.base import Backend, EngineInput, EngineOutput, LoadedModel
from gpu_worker.backends.weights import weights_digest
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from zoo.recipes import Recipe

MIB = 1 << 20
GOLDEN = 5
"""Answers kept in golden.jsonl."""
LARGE = 16 * MIB
"""From this size on, working memory is what the process grew by; below, what Python and NumPy allocated."""


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One real input. Text models carry the ids that Stage 0 should make of it."""

    inputs: dict[str, Any]
    parameters: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    seed: int | None = None


class Package(msgspec.Struct, frozen=True):
    """Everything about a model that its weights do not say."""

    version: str
    service_type: str
    config: dict[str, Any]
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]
    samples: list[Sample]
    batches: tuple[int, int, int]
    """Batch sizes of the baselines; the second is the preferred, the third the largest."""
    tolerance: float
    """How far a golden number may be off on another machine."""
    p99_latency_ms: int
    queue_ms: int
    title: str
    data: str
    algorithm: str
    metrics: dict[str, float]
    metrics_about: str
    licence: str
    limits: str
    extra: dict[str, Any] = {}
    """More fields of the declaration."""
    fusion: str = "fused"
    replicas: int = 1
    """A second one is a warm standby on another worker, and doubles the partitions of the work topic."""
    reserve_mb: int = 0
    """Device memory beyond what the baselines touch."""
    answered: int = 1_000
    """How many samples are run at build time; at least GOLDEN."""
    judge: Callable[[list[EngineOutput]], dict[str, float]] | None = None
    """More metrics, from the answers."""


Factory = Callable[[SystemClock], Backend]


class Measured(msgspec.Struct, frozen=True):
    batch_size: int
    latency_ms: float
    memory_mb: float


def write_package(recipe: Recipe, folder: Path, package: Package, factory: Factory) -> list[EngineOutput]:
    """Writes the files beside the weights that already lie in `folder`. Returns the answers to all samples."""
    digest = weights_digest(folder)
    backend = factory(SystemClock())
    launch = launch_of(recipe, folder, package, digest)
    resident = _resident_bytes()
    model, loaded_bytes = _load(backend, launch)
    answers = _answers(model, package.samples[: package.answered], package.batches[1])
    baselines = [_measure(model, loaded_bytes, resident, package.samples, size) for size in package.batches]
    declaration = _declaration(recipe, package, digest, baselines, launch.backend)
    (folder / "model-spec.yaml").write_text(yaml.safe_dump(declaration, sort_keys=False, width=120, allow_unicode=True))
    _write_lines(folder / "samples.jsonl", [sample.inputs for sample in package.samples])
    golden = zip(package.samples[:GOLDEN], answers, strict=False)
    _write_lines(folder / "golden.jsonl", [_golden(sample, answer, package.tolerance) for sample, answer in golden])
    metrics = {**package.metrics, **(package.judge(answers) if package.judge else {})}
    (folder / "MODEL_CARD.md").write_text(_card(recipe, package, digest, metrics, baselines, backend.versions()))
    backend.unload(model)
    return answers


def launch_of(recipe: Recipe, folder: Path, package: Package, digest: str) -> ModelLaunch:
    """The launch that a scheduler would make from the declaration."""
    return ModelLaunch(
        model=recipe.name,
        version=package.version,
        instance="",
        backend="sklearn" if recipe.form == "skops" else recipe.form,
        source=str(folder),
        weights_digest=digest,
        config=package.config,
        service_type=package.service_type,
        priority=int(recipe.priority[1:]),
        memory_bytes=0,
        batch_max=package.batches[2],
    )


def engine_input(place: int, sample: Sample) -> EngineInput:
    parameters = msgspec.json.encode(sample.parameters) if sample.parameters is not None else None
    return EngineInput(f"sample-{place}", msgspec.json.encode(sample.inputs), sample.token_ids, parameters, sample.seed)


def _load(backend: Backend, launch: ModelLaunch) -> tuple[LoadedModel, int]:
    """The model and its size: what the backend counts, or what Python allocated for it, whichever is more."""
    tracemalloc.start()
    model = backend.load(launch)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return model, max(kept, model.memory_bytes)


def _answers(model: LoadedModel, samples: Sequence[Sample], batch: int) -> list[EngineOutput]:
    items = [engine_input(place, sample) for place, sample in enumerate(samples)]
    answers: list[EngineOutput] = []
    for start in range(0, len(items), batch):
        answers += model.run(items[start : start + batch])
    wrong = [answer for answer in answers if answer.error_code]
    if wrong:
        raise AssertionError(f"{len(wrong)} samples failed, the first with {wrong[0].error_message}")
    return answers


def _measure(
    model: LoadedModel, loaded_bytes: int, resident_before: int, samples: Sequence[Sample], size: int
) -> Measured:
    """Median latency of a batch; weights plus the working memory that batch takes.

    `resident_before`: size of the process before the model was loaded.
    """
    batch = [engine_input(place, samples[place % len(samples)]) for place in range(size)]
    if loaded_bytes < LARGE:
        tracemalloc.start()
        model.run(batch)
        used_bytes = loaded_bytes + tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    else:
        with PeakMemory() as peak:
            model.run(batch)
        used_bytes = max(loaded_bytes, peak.bytes - resident_before)
    times: list[float] = []
    deadline = time.perf_counter() + 0.05
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 20):
        started = time.perf_counter()
        model.run(batch)
        times.append((time.perf_counter() - started) * 1000)
        if times[-1] > 500:
            break
    latency_ms = sorted(times)[len(times) // 2]
    return Measured(size, round(latency_ms, 3), math.ceil(used_bytes / MIB * 100) / 100)


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


class PeakMemory:
    """The most memory this process held within a `with` block, in `bytes`. Linux keeps that mark and can reset it."""

    bytes = 0

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *error: object) -> None:
        status = Path("/proc/self/status").read_text()
        mark = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        self.bytes = int(mark.split()[1]) * 1024


def _declaration(
    recipe: Recipe, package: Package, digest: str, baselines: list[Measured], backend: str
) -> dict[str, Any]:
    """The flat form of sie_stream.spec."""
    declared: dict[str, Any] = {
        "model_id": recipe.name,
        "version": package.version,
        "description": package.title,
        "source": {"uri": ".", "digest": digest},
        "backend": {"name": backend, "config": package.config},
        "service_type": package.service_type,
        "priority_level": recipe.priority,
        "min_gpu_memory_mb": memory_mb(baselines) + package.reserve_mb,
        "slas": {"p99_latency_ms": package.p99_latency_ms, "max_queue_time_ms": package.queue_ms},
        "min_replicas": package.replicas,
        "max_replicas": package.replicas,
        "batch_sizes": {"preferred": [package.batches[1]], "max": package.batches[2]},
        "fusion": package.fusion,
        "pre_warmup": [sample.inputs for sample in package.samples[:1]],
        "input_schema": package.input_schema,
        "output_schema": package.output_schema,
        "baselines": [msgspec.to_builtins(measured) for measured in baselines],
        **package.extra,
    }
    if recipe.tags:
        declared["tags"] = list(recipe.tags)
    return declared


def memory_mb(baselines: Sequence[Measured]) -> int:
    """What to reserve: the largest measured size, a quarter more for fragmentation, and 2 MiB for Python's own."""
    return math.ceil(max(measured.memory_mb for measured in baselines) * 1.25 + 2)


def _golden(sample: Sample, answer: EngineOutput, tolerance: float) -> dict[str, Any]:
    line: dict[str, Any] = {"inputs": sample.inputs}
    if sample.parameters is not None:
        line["parameters"] = sample.parameters
    if sample.seed is not None:
        line["seed"] = sample.seed
    if sample.token_ids is not None:
        line["token_ids"] = sample.token_ids
    if answer.outputs is not None:
        line["outputs"] = json.loads(answer.outputs)
    else:
        line["output_token_ids"] = answer.token_ids
        line["finish_reason"] = answer.finish_reason
    line["tolerance"] = tolerance
    return line


def _write_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines))


def _card(
    recipe: Recipe,
    package: Package,
    digest: str,
    metrics: Mapping[str, float],
    baselines: list[Measured],
    versions: Mapping[str, str],
) -> str:
    quality = "\n".join(f"| {name} | {value:.4g} |" for name, value in metrics.items())
    speeds = "\n".join(f"| {m.batch_size} | {m.latency_ms:g} | {m.memory_mb:g} |" for m in baselines)
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"""# {recipe.name}

{package.title}

| | |
|---|---|
| version | {package.version} |
| service | {package.service_type} |
| weights | {digest} |
| built with | {libraries} |

## Data

{package.data}

## Algorithm

{package.algorithm}

## Quality

{package.metrics_about}

| metric | value |
|---|---|
{quality}

## Speed and memory

Measured at build time with one thread, other builds running beside it.

| batch | latency ms | memory MiB |
|---|---|---|
{speeds}

## Licence

{package.licence}

## Limits

{package.limits}
"""
