"""Results and samples of telemetry, added up for Prometheus. Pure.

What is counted from results counts from the start of this process. What workers count starts anew with every
incarnation: the book adds what earlier incarnations had, so its counters only grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct, field

from processors.metrics.families import (
    Family,
    Histogram,
    HistogramFamily,
    Kind,
    Labels,
    cumulative,
    empty_histogram,
)
from processors.metrics.memory import SwitchSums, memory_families
from sie_stream.control import RouteRow
from sie_stream.records import Result
from sie_stream.telemetry import MODEL_GONE_MS, DeviceSample, EngineSample, GpuSample, ModelSample

UP_MS = 10_000
"""A worker without a sample for so long counts as down."""
FORGET_MS = 600_000
"""After so long a device is left out altogether."""
UNKNOWN = "unknown"
MODELS_MAX = 2_000
"""Names in results are users' text (`unknown_model` has any): beyond this many they are counted as one.
Declared models keep their own."""

DEVICES_MAX = 10_000
DEVICE_MODELS_MAX = 5_000
"""Names in samples are their writer's text, too: beyond these nothing new is counted."""

DEVICE: Labels = ("worker", "device")
GPU_FIGURES: tuple[tuple[str, str, Kind, Callable[[GpuSample], float | None]], ...] = (
    (
        "sie_gpu_utilisation_ratio",
        "Share of time a kernel ran.",
        "gauge",
        lambda gpu: _scaled(gpu.utilisation_pct, 0.01),
    ),
    ("sie_gpu_memory_used_bytes", "Memory in use.", "gauge", lambda gpu: gpu.memory_used_bytes),
    ("sie_gpu_temperature_celsius", "Temperature.", "gauge", lambda gpu: gpu.temperature_c),
    ("sie_gpu_power_watts", "Power drawn.", "gauge", lambda gpu: _scaled(gpu.power_mw, 0.001)),
    ("sie_gpu_sm_clock_hertz", "Clock of the multiprocessors.", "gauge", lambda gpu: _scaled(gpu.sm_clock_mhz, 1e6)),
    ("sie_gpu_memory_clock_hertz", "Memory clock.", "gauge", lambda gpu: _scaled(gpu.memory_clock_mhz, 1e6)),
    ("sie_gpu_ecc_uncorrected", "Uncorrected errors.", "gauge", lambda gpu: gpu.ecc_uncorrected),
    ("sie_gpu_nvlink_sent_bytes", "Sent by NVLink.", "counter", lambda gpu: _scaled(gpu.nvlink_tx_kib, 1024)),
    ("sie_gpu_nvlink_received_bytes", "Received by NVLink.", "counter", lambda gpu: _scaled(gpu.nvlink_rx_kib, 1024)),
)
MODEL_COUNTERS: tuple[tuple[str, str, Callable[[ModelSample], float]], ...] = (
    ("sie_model_batches", "Batches that engines ran.", lambda model: model.batches),
    ("sie_model_batch_errors", "Batches for which the backend raised.", lambda model: model.errors),
    ("sie_model_busy_seconds", "Engine time of batches.", lambda model: model.busy_ms / 1_000),
    ("sie_model_input_bytes", "Inputs given to engines.", lambda model: model.input_bytes),
    (
        "sie_prompt_tokens",
        "Tokens of admitted prompts.",
        lambda model: model.sequences.prompt_tokens if model.sequences else 0,
    ),
    (
        "sie_reused_tokens",
        "Those that a cached prefix spared.",
        lambda model: model.sequences.reused_tokens if model.sequences else 0,
    ),
)
MODEL_GAUGES: tuple[tuple[str, str, Callable[[ModelSample], float | None]], ...] = (
    ("sie_model_memory_bytes", "Weights, measured at load.", lambda model: model.memory_bytes),
    ("sie_model_cold_start_seconds", "The last load and warm-up.", lambda model: model.cold_start_ms / 1_000),
    ("sie_model_waiting", "Admitted requests that wait for the engine.", lambda model: model.waiting),
    ("sie_model_running", "Requests with the engine.", lambda model: model.running),
    ("sie_model_size_entropy_bits", "Entropy of request sizes.", lambda model: model.size_entropy_bits),
    ("sie_kv_blocks", "KV blocks of the pool.", lambda model: model.sequences.blocks if model.sequences else None),
    (
        "sie_kv_blocks_used",
        "KV blocks that sequences hold.",
        lambda model: model.sequences.blocks_used if model.sequences else None,
    ),
)


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


class _Place(Struct):
    """A device of a worker."""

    sample: DeviceSample
    models: dict[tuple[str, str], tuple[int, ModelSample]] = {}
    """The newest of each (model, version) of this incarnation, and when it was told."""
    before: dict[str, list[float]] = {}
    """By model, what ended incarnations had counted: one number for each of MODEL_COUNTERS."""
    switches: SwitchSums = field(default_factory=SwitchSums)


class MetricsBook:
    def __init__(self) -> None:
        self._routes: dict[str, tuple[str, str]] = {}
        """{model: (service type, priority level)}"""
        self._requests: dict[Labels, float] = {}
        self._tokens: dict[Labels, float] = {}
        self._latencies: dict[Labels, Histogram] = {}
        self._names: dict[str, None] = {}
        self._places: dict[Labels, _Place] = {}

    # ------------------------------------------------------------ what happened

    def route(self, model: str, row: RouteRow | None) -> None:
        if row is not None:  # a deleted model's last results still need its labels
            self._routes[model] = (row.service_type, f"P{row.priority}")

    def result(self, result: Result) -> None:
        model = self._name(result.model)
        _add(self._requests, (model, result.status), 1)
        if result.status != "ok":
            return
        key = (model, *self._routes.get(model, (UNKNOWN, UNKNOWN)))
        histogram = self._latencies.get(key)
        if histogram is None:
            histogram = self._latencies[key] = empty_histogram()
        histogram.add(result.timings_ms.total / 1_000)
        if result.usage.prompt_tokens:
            _add(self._tokens, (model, "prompt"), result.usage.prompt_tokens)
            _add(self._tokens, (model, "completion"), result.usage.completion_tokens)

    def sample(self, sample: DeviceSample) -> str:
        """The newest of its device; samples come in the order of the log. Why it is not counted; empty: it is."""
        key = (sample.worker, sample.device)
        place = self._places.get(key)
        if place is None and len(self._places) >= DEVICES_MAX:
            return f"there are {DEVICES_MAX} devices already"
        told = {(model.model, model.version) for model in sample.models}
        if place is not None:
            told |= place.models.keys() | {(name, "") for name in place.before}
        if len(told) > DEVICE_MODELS_MAX:
            return f"it would be more than {DEVICE_MODELS_MAX} models on the device"
        if place is None:
            place = self._places[key] = _Place(sample, {}, {})
        elif place.sample.incarnation != sample.incarnation:
            for (model, _), (_, last) in place.models.items():
                sums = place.before.setdefault(model, [0.0] * len(MODEL_COUNTERS))
                for number, (_, _, read) in enumerate(MODEL_COUNTERS):
                    sums[number] += read(last)
            place.models.clear()
            place.switches.incarnation_ended(place.sample)
        place.sample = sample
        place.models.update({(model.model, model.version): (sample.at_ms, model) for model in sample.models})
        return ""

    def _name(self, model: str) -> str:
        if model in self._names or model in self._routes:
            return model
        if len(self._names) >= MODELS_MAX:
            return UNKNOWN
        self._names[model] = None
        return model

    # ------------------------------------------------------------ what Prometheus sees

    def families(self, now_ms: int) -> tuple[Family | HistogramFamily, ...]:
        """Everything as it is at `now_ms` (since the epoch)."""
        for key in [key for key, place in self._places.items() if now_ms - place.sample.at_ms > FORGET_MS]:
            del self._places[key]
        return (
            self._latency_family(),
            _family("sie_requests", "counter", "Terminal records.", ("model_id", "status"), self._requests.items()),
            _family("sie_tokens", "counter", "Tokens of answers.", ("model_id", "kind"), self._tokens.items()),
            *self._device_families(now_ms),
            *self._engine_families(),
            *self._gpu_families(),
            *memory_families((key, place.sample, place.switches) for key, place in self._places.items()),
            *self._model_families(),
        )

    def _latency_family(self) -> HistogramFamily:
        return HistogramFamily(
            "inference_latency_seconds",
            "From a request's timestamp to its result, of requests that were answered.",
            ("model_id", "service_type", "priority_level"),
            tuple((key, cumulative(one), one.total) for key, one in sorted(self._latencies.items())),
        )

    def _device_families(self, now_ms: int) -> list[Family]:
        places = self._places.items()
        up = [(key, float(now_ms - place.sample.at_ms <= UP_MS)) for key, place in places]
        busy = [(key, place.sample.busy_bp / 10_000) for key, place in places]
        memory = [(key, float(place.sample.memory_bytes)) for key, place in places]
        return [
            _family("sie_device_up", "gauge", "Whether the worker told of it in the last ten seconds.", DEVICE, up),
            _family("sie_device_busy_ratio", "gauge", "Share of time engines worked on batches.", DEVICE, busy),
            _family("sie_device_memory_bytes", "gauge", "What the device has.", DEVICE, memory),
        ]

    def _engine_families(self) -> list[Family]:
        labels = (*DEVICE, "backend", "domain")

        def rows(read: Callable[[EngineSample], float]) -> list[tuple[Labels, float]]:
            return [
                ((*key, engine.backend, engine.domain), read(engine))
                for key, place in self._places.items()
                for engine in place.sample.engines
            ]

        memory, jitter = rows(lambda one: one.memory_bytes), rows(lambda one: one.memory_jitter_bytes)
        cpu, ends = rows(lambda one: one.cpu_ms / 1_000), rows(lambda one: one.ends)
        return [
            _family("sie_engine_memory_bytes", "gauge", "Resident memory of the engine process.", labels, memory),
            _family("sie_engine_memory_jitter_bytes", "gauge", "Its deviation over a minute.", labels, jitter),
            _family("sie_engine_cpu_seconds", "counter", "Its processor time.", labels, cpu),
            _family("sie_engine_ends", "counter", "Engines that ended without being asked to.", labels, ends),
        ]

    def _gpu_families(self) -> list[Family]:
        gpus = [(key, place.sample.gpu) for key, place in self._places.items() if place.sample.gpu is not None]
        return [
            _family(name, kind, text, DEVICE, [(key, value) for key, gpu in gpus if (value := read(gpu)) is not None])
            for name, text, kind, read in GPU_FIGURES
            if gpus
        ]

    def _model_families(self) -> list[Family]:
        """Counters of models that have left stay, as Prometheus wants it; what says how a model is now does not."""
        labels = (*DEVICE, "model_id")
        found: list[Family] = []
        for number, (name, text, read) in enumerate(MODEL_COUNTERS):
            sums: dict[Labels, float] = {}
            for (worker, device), place in self._places.items():
                for model, before in place.before.items():
                    _add(sums, (worker, device, model), before[number])
                for (model, _), (_, last) in place.models.items():
                    _add(sums, (worker, device, model), read(last))
            found.append(_family(name, "counter", text, labels, sums.items()))
        for name, text, gauge in MODEL_GAUGES:
            rows = {
                (worker, device, model): value
                for (worker, device), place in self._places.items()
                for (model, _), (told_ms, last) in sorted(place.models.items(), key=_told)
                if place.sample.at_ms - told_ms <= MODEL_GONE_MS and (value := gauge(last)) is not None
            }
            found.append(_family(name, "gauge", text, labels, rows.items()))
        return found


def _told(one: tuple[tuple[str, str], tuple[int, ModelSample]]) -> int:
    """Of two versions, the one that was told later is there still."""
    return one[1][0]


def _add(sums: dict[Labels, float], key: Labels, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value


def _family(name: str, kind: Kind, text: str, labels: Labels, rows: Iterable[tuple[Labels, float]]) -> Family:
    return Family(name, kind, text, labels, tuple(sorted(rows)))
