"""What a decoder looks like, from its config.json: the differences between the families of the LLaMA architecture.

family   differences from Llama
mistral  every layer may look back only `sliding_window` tokens
qwen2    biases on q, k and v; the upper layers may use a sliding window
qwen3    RMS norm over each head of q and k; else as qwen2, without the biases
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct
from transformers import AutoConfig

from gpu_worker.backends.base import ModelRefused
from sie_stream.errors import did_you_mean

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class DecoderShape(Struct, frozen=True):
    """Counts and constants. `windows`: per layer how many tokens it sees, the present one included; None: all."""

    family: str
    vocabulary: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_width: int
    positions: int
    norm_eps: float
    tied: bool
    windows: tuple[int | None, ...]
    rope: dict[str, Any]
    attention_bias: bool = False
    """Of q, k and v."""
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def layers(self) -> int:
        return len(self.windows)


def read_shape(source: Path) -> DecoderShape:
    """Runs no code of the folder. Raises ModelRefused for another architecture or an option that is not followed."""
    try:
        config: Any = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelRefused("weights_unreadable", f"transformers cannot read {source}/config.json: {error}") from error
    family = str(config.model_type)
    if family not in FAMILIES:
        raise ModelRefused(
            "unsupported_architecture",
            f"config.json: model_type {family!r} is not one of {', '.join(FAMILIES)}.{did_you_mean(family, FAMILIES)}",
        )
    rope = dict(config.rope_parameters)
    _only(config, "hidden_act", ("silu",))
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        raise ModelRefused(
            "unsupported_architecture",
            f"config.json: rope_type {rope['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}.",
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelRefused("unsupported_architecture", "config.json: partial_rotary_factor must be 1.0.")
    biased = family in ("llama", "qwen3") and bool(config.attention_bias)
    return DecoderShape(
        family=family,
        vocabulary=int(config.vocab_size),
        width=int(config.hidden_size),
        inner=int(config.intermediate_size),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_width=int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads),
        positions=int(config.max_position_embeddings),
        norm_eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        windows=_windows(config, family),
        rope=rope,
        attention_bias=family == "qwen2" or biased,
        output_bias=biased,
        mlp_bias=family == "llama" and bool(config.mlp_bias),
    )


def _windows(config: Any, family: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    layers = int(config.num_hidden_layers)
    if family == "llama" or window is None:
        return (None,) * layers
    if family == "mistral":
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in config.layer_types)


def _only(config: Any, key: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, key, allowed[0])
    if value not in allowed:
        raise ModelRefused(
            "unsupported_architecture", f"config.json: {key} {value!r} is not one of {', '.join(allowed)}."
        )
