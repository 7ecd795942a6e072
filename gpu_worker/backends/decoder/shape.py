"""What a decoder looks like, from its config.json: the differences between the families of the LLaMA architecture.

family   differences from Llama
mistral  every layer may look back only `sliding_window` tokens
qwen2    biases on q, k and v; the upper layers may use a sliding window
qwen3    RMS norm over each head of q and k; else as qwen2, without the biases
phi3     q, k and v are one tensor, gate and up another; every layer may use a sliding window
gemma2   GELU (tanh) instead of SiLU; norms multiply by 1 + weight, and there are some after attention and MLP, too;
         scores and logits are kept within bounds by tanh; embeddings times sqrt(width); a window on every other layer
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.config import NetworkConfig

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "divided": ("divisors",),
}
"""What each needs to be told."""


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
    attention_scale: float
    """Of the products of queries and keys."""
    score_cap: float | None = None
    """Scores of the attention are kept within this by tanh; None: as they are."""
    logit_cap: float | None = None
    attention_bias: bool = False
    """Of q, k and v."""
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def layers(self) -> int:
        return len(self.windows)


def shape_of(config: NetworkConfig) -> DecoderShape:
    """Raises ModelRefused for an option that is not followed."""
    family, rope = config.model_type, config.rope
    if family == "gemma2":
        _only("hidden_activation", config.hidden_activation, ("gelu_pytorch_tanh",))
        _only("use_bidirectional_attention", config.use_bidirectional_attention, (None, False))
    else:
        _only("hidden_act", config.hidden_act, ("silu",))
    _only("rope_type", rope["rope_type"], tuple(ROPE_TYPES))
    _check_rope(rope)
    _only("partial_rotary_factor", rope["partial_rotary_factor"], (1.0,))
    biased = family in ("llama", "qwen3", "gemma2") and config.attention_bias
    head_width = config.head_dim or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % kv_heads or head_width % 2:
        raise ModelRefused(
            "weights_unreadable",
            f"config.json: {config.num_attention_heads} attention heads of width {head_width}, {kv_heads} of keys and "
            "values: the first number must be a multiple of the last, and the width even.",
        )
    gemma = config if family == "gemma2" else None
    return DecoderShape(
        family=family,
        vocabulary=config.vocab_size,
        width=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_width=head_width,
        positions=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        windows=_windows(config),
        rope=rope,
        attention_scale=((gemma and gemma.query_pre_attn_scalar) or head_width) ** -0.5,
        score_cap=gemma and gemma.attn_logit_softcapping,
        logit_cap=gemma and gemma.final_logit_softcapping,
        attention_bias=family == "qwen2" or biased,
        output_bias=biased,
        mlp_bias=family == "llama" and config.mlp_bias,
    )


def _check_rope(rope: dict[str, Any]) -> None:
    """Raises ModelRefused for what the type needs and is missing, and for what nothing can be divided by."""
    for key in ("rope_theta", *ROPE_TYPES[rope["rope_type"]]):
        value = rope.get(key)
        if value is None:
            raise ModelRefused("weights_unreadable", f"config.json: rope_type {rope['rope_type']!r} without {key}.")
        for one in value if isinstance(value, list) else [value]:
            if type(one) not in (int, float) or not math.isfinite(one) or one <= 0:
                raise ModelRefused("weights_unreadable", f"config.json: {key} {one!r} is no finite number > 0.")


def _windows(config: NetworkConfig) -> tuple[int | None, ...]:
    family, layers, window = config.model_type, config.num_hidden_layers, config.sliding_window
    if family in ("qwen2", "qwen3") and not config.use_sliding_window:
        window = None
    if family == "llama" or window is None:
        return (None,) * layers
    if family in ("mistral", "phi3"):
        return (window,) * layers
    kinds = config.layer_types
    if kinds is None and family == "gemma2":
        return tuple(None if number % 2 else window for number in range(layers))
    if kinds is None:
        full = min(config.max_window_layers, layers)
        return (*[None] * full, *[window] * (layers - full))
    if len(kinds) != layers:
        raise ModelRefused("weights_unreadable", f"config.json: {len(kinds)} layer_types for {layers} layers.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _only(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        known = ", ".join(map(str, allowed))
        raise ModelRefused("unsupported_architecture", f"config.json: {key} {value!r} is not one of {known}.")
