"""Static capability: which precision x context x tensor-parallel size of a model fits which device class, in bytes.

Per device, with t devices:  weights / t  +  KV of one full context / min(t, KV heads)  +  workspace.

- weights: parameters x bits / 8; int8 and int4 add a 16-bit scale per 128 weights.
- KV per token: 2 (key and value) x layers x KV heads x head size x bytes, 4 bytes at fp32 and 2 otherwise (weights that
  are quantised keep a 16-bit cache, as vLLM and SGLang do by default). KV heads that are fewer than the devices are
  copied, so they stop shrinking the share of one device.
- workspace: what the runtime takes on a device whatever the model is, and 5 % of its share of the weights for
  activations and buffers. A first guess, to be replaced by measured fingerprints.

Where the numbers of the architecture are not declared, they are derived from min_gpu_memory_mb: it is taken to hold
the weights, the KV cache of the longest context and the workspace at the preferred precision, over all the devices of
tensor_parallel_size together. The matrix says so in `assumptions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from scheduler.device_classes import PRECISIONS, DeviceClass, DeviceKind
from sie_stream.errors import ConfigError
from sie_stream.spec.model import ModelSpec, Precision

MIB = 1024 * 1024
Verdict = Literal["fits", "exclusive", "too_big", "impossible"]

WEIGHT_BITS: dict[Precision, int] = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
KV_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "int8": 2, "int4": 2}
SCALED: tuple[Precision, ...] = ("int8", "int4")
SCALE_GROUP = 128
SCALE_BYTES = 2
RUNTIME_BYTES: dict[DeviceKind, int] = {"cuda": 512 * MIB, "mig": 512 * MIB, "cpu": 64 * MIB}
"""CUDA context, libraries and their workspaces; on a CPU, the engine's buffers."""
ACTIVATION_PERCENT = 5
EXCLUSIVE_PERCENT = 90
"""A replica that needs so much of a device leaves no room for another: it has the device alone."""
KV_SHARE_PERCENT = 25
"""Of the memory of a text model whose architecture is not known: so much is taken to be its KV cache."""
ROUNDING_BYTES = 4
"""What rounding up may add to the weights: a part of a byte, and a scale of a group that is not full."""
CONTEXT_MIN = 1_024
TEXT_SERVICES = frozenset({"text-generation"})


class Architecture(Struct, frozen=True):
    """Numbers that decide a transformer's memory. A model without a KV cache has 0 layers."""

    parameters: int
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0


class Footprint(Struct, frozen=True):
    """Memory of a model as functions of precision and context, whatever it was found from."""

    parameters: int
    kv_elements_per_token: int
    """Numbers cached per token: 2 x layers x KV heads x head size."""
    kv_heads: int
    """0: not known; then the cache is taken to divide evenly."""
    context_max: int
    """0: the model has no context."""
    runtime_bytes: int | None = None
    """Workspace per device apart from activations, where it is a part of a declared size; None: RUNTIME_BYTES."""
    assumptions: tuple[str, ...] = ()


class Fit(Struct, frozen=True):
    """One cell of the matrix. Bytes are per device."""

    device_class: str
    precision: Precision
    context_tokens: int
    tensor_parallel: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    device_bytes: int
    verdict: Verdict
    why: str = ""
    """Why it does not fit, or what to mind when it does."""

    @property
    def need_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def contexts_at_once(self) -> int:
        """Sequences that may fill their whole context at the same time, with the device to itself; 0: has no cache."""
        free = self.device_bytes - self.weights_bytes - self.workspace_bytes
        return max(free, 0) // self.kv_bytes if self.kv_bytes else 0

    @property
    def possible(self) -> bool:
        return self.verdict in ("fits", "exclusive")


class CapabilityMatrix(Struct, frozen=True):
    model: str
    version: str
    tensor_parallel: int
    """What the declaration asks for; the matrix shows other sizes as well."""
    assumptions: tuple[str, ...]
    fits: tuple[Fit, ...]
    """By device class, tensor-parallel size, precision (best first), context (longest first)."""


# ---------------------------------------------------------------- what a model needs


def declared_architecture(spec: ModelSpec) -> Architecture | None:
    """From backend.config: num_parameters, num_hidden_layers, num_key_value_heads, head_dim; None without the first.

    The last three belong together. Raises ConfigError when one is no whole number above 0, or when only some are given.
    """
    config = spec.backend.config
    if "num_parameters" not in config:
        return None
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    given = [name for name in names if name in config]
    if given and len(given) < len(names):
        missing = ", ".join(name for name in names if name not in config)
        raise ConfigError(f"backend.config: {', '.join(given)} given without {missing}; the KV cache needs all three.")
    numbers = [_whole(config[name], name) for name in ("num_parameters", *given)]
    return Architecture(*numbers)


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"backend.config.{name}: {value!r}, a whole number above 0 is expected.")
    return value


def context_max(spec: ModelSpec) -> int:
    """The longest context in tokens that a request may have; 0 when none is declared."""
    declared = [tokens for tokens in (spec.supported_context_length, spec.max_seq_len) if tokens is not None]
    return min(declared, default=0)


def footprint(spec: ModelSpec, architecture: Architecture | None = None) -> Footprint:
    """What the model needs: from `architecture`, else from backend.config, else derived from min_gpu_memory_mb."""
    architecture = architecture or declared_architecture(spec)
    tokens = context_max(spec)
    if architecture is None:
        return _derived(spec, tokens)
    elements = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim
    return Footprint(architecture.parameters, elements, architecture.kv_heads, tokens if elements else 0)


def _derived(spec: ModelSpec, tokens: int) -> Footprint:
    """Splits the declared memory, so that preferred precision, longest context and declared tensor-parallel size give
    it back: for one device never more, and less only by the rounding of single weights and cache entries; for several
    each share is rounded up."""
    precision = preferred(spec)[0]
    devices = spec.tensor_parallel_size
    total = spec.min_gpu_memory_mb * MIB
    runtime = min(RUNTIME_BYTES["cuda"], total // (4 * devices))
    rest = total - runtime * devices
    cached = spec.service_type in TEXT_SERVICES and tokens > 0
    kv_bytes = rest * KV_SHARE_PERCENT // 100 if cached else 0
    elements = kv_bytes // (tokens * KV_BYTES[precision]) if cached else 0
    budget = (rest - kv_bytes) * 100 // (100 + ACTIVATION_PERCENT) - ROUNDING_BYTES
    bytes_per_1024 = WEIGHT_BITS[precision] * 128 + (1024 // SCALE_GROUP * SCALE_BYTES if precision in SCALED else 0)
    parameters = max(budget * 1024 // bytes_per_1024, 1)
    said = [
        f"The architecture is not declared (backend.config.num_parameters and so on): min_gpu_memory_mb "
        f"{spec.min_gpu_memory_mb} is taken as weights, KV cache and workspace at {precision}, which makes "
        f"{parameters} parameters."
    ]
    if cached:
        said.append(
            f"{KV_SHARE_PERCENT} % of it is taken as the KV cache of {tokens} tokens, {elements} numbers per token."
        )
    return Footprint(parameters, elements, 0, tokens if elements else 0, runtime, tuple(said))


def preferred(spec: ModelSpec) -> tuple[Precision, ...]:
    """Precisions the model may run in, best first. A declaration that names none runs as stored: taken as bf16 for
    text generation, and as fp32 for everything else."""
    if spec.preferred_precision:
        return spec.preferred_precision
    return ("bf16",) if spec.service_type in TEXT_SERVICES else ("fp32",)


def weights_bytes(parameters: int, precision: Precision) -> int:
    """Bytes of all weights, rounded up."""
    scales = -(-parameters // SCALE_GROUP) * SCALE_BYTES if precision in SCALED else 0
    return -(-parameters * WEIGHT_BITS[precision] // 8) + scales


# ---------------------------------------------------------------- the matrix


def capability_matrix(
    spec: ModelSpec, classes: Sequence[DeviceClass], architecture: Architecture | None = None
) -> CapabilityMatrix:
    """Every precision the model may run in x context x tensor-parallel size on every class. Pure: recompute it when
    hardware joins. Raises ConfigError as `declared_architecture` does."""
    needs = footprint(spec, architecture)
    fits = [
        fit(needs, device_class, precision, tokens, size)
        for device_class in classes
        for size in sizes(device_class, spec.tensor_parallel_size)
        for precision in preferred(spec)
        for tokens in contexts(needs.context_max)
    ]
    said = list(needs.assumptions)
    if spec.lora is not None and spec.backend.name == "torch":
        said.append(
            f"This is an adapter: its engine holds the weights of its base {spec.lora.base}, too, once for all models "
            "of one trunk. They are counted as far as the declaration counts them for this model."
        )
    elif spec.lora is not None:
        said.append(f"This is an adapter: the weights of its base {spec.lora.base} are not counted.")
    if not spec.preferred_precision:
        said.append(f"No preferred_precision is declared: {preferred(spec)[0]} is taken as how it is stored.")
    return CapabilityMatrix(spec.name, spec.version, spec.tensor_parallel_size, tuple(said), tuple(fits))


def contexts(longest: int) -> tuple[int, ...]:
    """The lengths shown: the longest, then the powers of two below it down to 1,024; (0,) without a context."""
    found = [longest]
    tokens = 1 << max(longest - 1, 0).bit_length()  # the first power of two that is not below `longest`
    while (tokens := tokens // 2) >= CONTEXT_MIN:
        found.append(tokens)
    return tuple(found)


def sizes(device_class: DeviceClass, declared: int) -> tuple[int, ...]:
    """Tensor-parallel sizes that are shown: powers of two that a server has devices for, and the declared one."""
    powers = [1 << power for power in range(7) if 1 << power <= device_class.group_max]
    return tuple(sorted({*powers, declared}))


def fit(needs: Footprint, device_class: DeviceClass, precision: Precision, tokens: int, size: int) -> Fit:
    """One cell. `tokens` is the context that one sequence may fill; `size` the devices one replica spans."""
    shares = min(size, needs.kv_heads) if needs.kv_heads else size
    weights = -(-weights_bytes(needs.parameters, precision) // size)
    kv = -(-needs.kv_elements_per_token * KV_BYTES[precision] * tokens // shares)
    runtime = RUNTIME_BYTES[device_class.kind] if needs.runtime_bytes is None else needs.runtime_bytes
    workspace = runtime + weights * ACTIVATION_PERCENT // 100
    need = weights + kv + workspace
    verdict, why = _verdict(needs, device_class, precision, size, need)
    return Fit(
        device_class.name, precision, tokens, size, weights, kv, workspace, device_class.memory_bytes, verdict, why
    )


def device_bytes(spec: ModelSpec) -> int:
    """What placement reserves on each device of a replica: its part of min_gpu_memory_mb, and no less than what the
    declared architecture needs there for the longest context, where it spans several devices.

    Raises ConfigError as `declared_architecture` does, and for KV heads that do not divide over the devices.
    """
    size = spec.tensor_parallel_size
    declared = -(-spec.min_gpu_memory_mb * MIB // size)
    if size == 1 or declared_architecture(spec) is None:
        return declared
    needs = footprint(spec)
    if needs.kv_heads and max(size, needs.kv_heads) % min(size, needs.kv_heads):
        raise ConfigError(
            f"tensor_parallel_size: {size}; {needs.kv_heads} KV heads (backend.config.num_key_value_heads) do not "
            f"divide over {size} devices."
        )
    one = fit(needs, DeviceClass("any", "cuda", declared, PRECISIONS), preferred(spec)[0], needs.context_max, size)
    return max(declared, one.need_bytes)


def _verdict(needs: Footprint, on: DeviceClass, precision: Precision, size: int, need: int) -> tuple[Verdict, str]:
    if precision not in on.precisions:
        return "impossible", f"{on.name} does not compute {precision}, only {', '.join(on.precisions)}."
    if size > on.group_max:
        return "impossible", f"a server has at most {on.group_max} of {on.name}, {size} are needed."
    if needs.kv_heads and max(size, needs.kv_heads) % min(size, needs.kv_heads):
        return "impossible", f"{needs.kv_heads} KV heads do not divide over {size} devices."
    if need > on.memory_bytes:
        return "too_big", f"needs {need} bytes per device, {on.name} has {on.memory_bytes}."
    spans = f"{size} devices span NVLink islands of {on.island_max}: slower." if size > max(on.island_max, 1) else ""
    if need * 100 >= on.memory_bytes * EXCLUSIVE_PERCENT:
        return "exclusive", f"needs {need} of {on.memory_bytes} bytes: has the device alone. {spans}".strip()
    return "fits", spans


def best_fit(matrix: CapabilityMatrix, device_class: str, tensor_parallel: int, context_tokens: int = 0) -> Fit | None:
    """The best precision in which a context of at least `context_tokens` fits, at the longest context that does.

    None when there is none. `context_tokens` 0: any context will do. Only lengths of the matrix are looked at: for a
    length in between, `fit` tells exactly.
    """
    found = [
        cell
        for cell in matrix.fits
        if cell.device_class == device_class
        and cell.tensor_parallel == tensor_parallel
        and cell.possible
        and cell.context_tokens >= context_tokens
    ]
    return found[0] if found else None
