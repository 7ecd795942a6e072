"""What workers say about their devices, engines and models on sie.telemetry, about once a second.

Nobody decides by it: it is for people, for Prometheus and for the fingerprints of models. Counters count from the start
of the incarnation and only grow, so a sample that is lost or read late loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from sie_stream.trunks import Trunk

MODELS_TOLD_EVERY_MS = 30_000
"""How often models that do nothing are told, too."""
MODEL_GONE_MS = 2 * MODELS_TOLD_EVERY_MS + 5_000
"""A model that its device, which still tells, has not named for so long is not there any more."""


class GpuSample(Struct, frozen=True):
    """What NVML says of a GPU. None: this GPU or driver does not tell."""

    utilisation_pct: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    nvlink_tx_kib: int | None = None
    nvlink_rx_kib: int | None = None
    """Over all links, since the counters began."""


class EngineSample(Struct, frozen=True):
    """An engine process."""

    backend: str
    pid: int
    memory_bytes: int
    """Resident, of which shared pages count in full."""
    cpu_ms: int
    """Processor time of the process so far."""
    memory_jitter_bytes: int
    """Standard deviation of `memory_bytes` over the last minute."""
    ends: int
    """How often an engine of this kind has ended without being asked to."""
    domain: str = ""
    """Which engine of the backend (see ModelLaunch)."""


class SequenceCounts(Struct, frozen=True):
    """A continuous model inside its engine."""

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    blocks_used: int = 0
    """KV blocks that sequences hold; those that are only kept for equal prefixes are free."""
    prompt_tokens: int = 0
    """Of all sequences that were admitted."""
    reused_tokens: int = 0
    """Those of them that a cached prefix spared."""


class ModelSample(Struct, frozen=True):
    """A model on one device. Counters since the start of the incarnation."""

    model: str
    version: str
    memory_bytes: int
    """Weights, measured at load. What it shares with a model that its engine loaded before it counts there."""
    cold_start_ms: int
    """The last load and warm-up."""
    requests: int = 0
    batches: int = 0
    errors: int = 0
    """Batches for which the backend raised."""
    busy_ms: int = 0
    """Engine time of the batches."""
    input_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    size_entropy_bits: float = 0.0
    """Shannon entropy of request sizes by powers of two since the last sample: 0 when all are alike."""
    waiting: int = 0
    running: int = 0
    """In the worker, when it last counted them."""
    p99_ms: int | None = None
    """Likewise: from a request's timestamp to its result."""
    sequences: SequenceCounts | None = None
    trunk: Trunk | None = None
    """Decoders of our own: models of one engine with equal digests share keys, values and weights."""

    @property
    def compute_us_per_byte(self) -> float:
        """How much engine time a byte of input costs."""
        return 1_000 * self.busy_ms / self.input_bytes if self.input_bytes else 0.0


class SwitchSample(Struct, frozen=True):
    """Switches of a device to another model, of one class, since the start of the incarnation."""

    switch_class: str
    """resident: it was there; host, disk: its weights came from host memory or from the disk."""
    count: int = 0
    size_bytes: int = 0
    """Copied for all of them together."""
    ms: float = 0.0
    """Likewise."""
    ms_max: float = 0.0


class ModelMemory(Struct, frozen=True):
    """Where the weights of a model are."""

    model: str
    version: str
    place: str
    """device, coming (on the way there), host, or disk."""
    size_bytes: int
    pages: int = 0
    """Of the device."""
    below: str = ""
    """Where it is brought from the next time: host or disk; empty: it never leaves the device."""


class DeviceMemorySample(Struct, frozen=True):
    """A device with a budget. weights + kv + workspace + free = total."""

    total_bytes: int
    page_bytes: int
    weights_bytes: int
    """In whole pages, and what never leaves."""
    kv_bytes: int
    workspace_bytes: int
    free_bytes: int
    host_bytes: int
    """What images may take of the host's memory, and what they take."""
    host_used_bytes: int
    disk_used_bytes: int
    models: tuple[ModelMemory, ...] = ()
    switches: tuple[SwitchSample, ...] = ()


class DeviceSample(Struct, frozen=True):
    """One device of one worker. Models with nothing new are left out, but all are told every MODELS_TOLD_EVERY_MS."""

    worker: str
    incarnation: str
    device: str
    at_ms: int
    """Milliseconds since the epoch."""
    window_ms: int
    """Since the last sample of the device."""
    busy_bp: int
    """Share of the window that engines worked on batches, 0 to 10,000."""
    memory_bytes: int
    """What the device has, as declared or as NVML says."""
    engines: tuple[EngineSample, ...] = ()
    models: tuple[ModelSample, ...] = ()
    gpu: GpuSample | None = None
    memory: DeviceMemorySample | None = None
    """There on devices with a budget (setting device_memory_mb)."""


FIGURE_MAX = 2**53
"""What is counted stays below it: every such number is exact as a float, and sums of them are finite."""
CLOCK_AHEAD_MS = 60_000
NAME_CHARS_MAX = 300
BELOW_ZERO = ("temperature_c",)


def implausible(sample: DeviceSample, now_ms: int) -> str:
    """Why a sample cannot be true, whoever wrote it; empty when it may be.

    now_ms: since the epoch, of the reader. What comes from a minute ahead of it would stay the newest for ever.
    """
    if sample.at_ms > now_ms + CLOCK_AHEAD_MS:
        return f"at_ms lies {sample.at_ms - now_ms} ms in the future, allowed are {CLOCK_AHEAD_MS}"
    if len({(engine.backend, engine.domain) for engine in sample.engines}) < len(sample.engines):
        return "engines: a backend is named twice in one domain"
    sequences = [model.sequences for model in sample.models if model.sequences is not None]
    memory = () if sample.memory is None else (sample.memory, *sample.memory.models, *sample.memory.switches)
    parts = (sample, *sample.engines, *sample.models, *sequences, *([sample.gpu] if sample.gpu else []), *memory)
    return next((problem for part in parts if (problem := _problem(part))), "")


def _problem(part: Struct) -> str:
    """The first field of one record that nothing that was measured can have."""
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, str) and (len(value) > NAME_CHARS_MAX or not value.isprintable()):
            return f"{name}: no name, or longer than {NAME_CHARS_MAX} characters"
        if isinstance(value, int | float) and not (-FIGURE_MAX if name in BELOW_ZERO else 0) <= value < FIGURE_MAX:
            return f"{name}: allowed are 0 to 2**53"
    return ""


def entropy_bits(counts: Iterable[int]) -> float:
    """Shannon entropy (bits) of the distribution with these counts. Source: C. E. Shannon, 1948."""
    filled = [count for count in counts if count > 0]
    total = sum(filled)
    return -sum(count / total * math.log2(count / total) for count in filled) if total else 0.0


def deviation(values: Iterable[int]) -> int:
    """Standard deviation of the whole population, rounded; 0 for fewer than two."""
    seen = list(values)
    if len(seen) < 2:
        return 0
    mean = sum(seen) / len(seen)
    return round(math.sqrt(sum((value - mean) ** 2 for value in seen) / len(seen)))
