"""A config.json as its publisher wrote it, in today's or yesterday's keys, with what its family takes for granted.

Read without transformers: importing that library takes twice as long as loading a small model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import ModelRefused
from sie_stream.errors import did_you_mean

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2")
ROPE_THETA = 10_000.0
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
LayerCount = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
ROPE_BY_CONTEXT = ("llama3", "yarn", "longrope")
"""Ways to lengthen a context that need to know the original one."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "phi3": {"rms_norm_eps": 1e-5},
    "gemma2": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
"""What a key means that is missing. One that is null means null."""


class NetworkConfig(Struct, frozen=True):
    """Keys as transformers names them. Sizes have no defaults: a model without them is broken, not standard."""

    model_type: str
    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: LayerCount
    num_attention_heads: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    hidden_activation: str = "gelu_pytorch_tanh"
    """Of gemma2, which does not look at hidden_act."""
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = ROPE_THETA
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: int | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """rope_type, rope_theta and what the type needs, wherever the file keeps them. Raises ModelRefused."""
        found: dict[str, Any] = {"rope_theta": self.rope_theta, "partial_rotary_factor": self.partial_rotary_factor}
        found |= self.rope_scaling or self.rope_parameters or {}
        found.setdefault("rope_type", found.get("type", "default"))
        if any(isinstance(value, dict) for value in found.values()):
            raise ModelRefused("unsupported_architecture", "config.json: rope_parameters that differ between layers.")
        if found["rope_type"] in ROPE_BY_CONTEXT:
            if self.original_max_position_embeddings is not None:
                found["original_max_position_embeddings"] = self.original_max_position_embeddings
            found.setdefault("original_max_position_embeddings", self.max_position_embeddings)
        return found


def read_config(source: Path) -> NetworkConfig:
    """config.json of a folder. Raises ModelRefused for another architecture, and for a file that is none."""
    file = source / "config.json"
    try:
        content = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelRefused("weights_unreadable", f"cannot read {file}: {error}") from error
    return config_of(content, str(file))


def config_of(content: dict[str, Any], where: str) -> NetworkConfig:
    """From the keys of a config.json; `where` they were found, for the error. Raises ModelRefused."""
    family = content.get("model_type")
    if family not in FAMILIES:
        guess = did_you_mean(str(family), FAMILIES)
        raise ModelRefused(
            "unsupported_architecture",
            f"{where}: model_type {family!r} is not one of {', '.join(FAMILIES)}.{guess}",
        )
    try:
        return msgspec.convert(DEFAULTS.get(family, {}) | content, NetworkConfig)
    except msgspec.ValidationError as error:
        raise ModelRefused("weights_unreadable", f"{where}: {error}") from error
