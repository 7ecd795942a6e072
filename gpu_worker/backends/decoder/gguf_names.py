"""A decoder in a GGUF file as our families know it: config keys and tensor names of transformers.

llama.cpp, whose format this is, keeps the two rows of q and k that RoPE turns together side by side (architecture
`llama` only), and adds the 1 to the norms of Gemma-2. Both is undone here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.config import FAMILIES, NetworkConfig, config_of
from gpu_worker.backends.decoder.gguf_metadata import Metadata
from gpu_worker.backends.gguf_file import GgufFile
from gpu_worker.backends.tensors import Tensors

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERWISE: dict[str, dict[str, str]] = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
TURNED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Whose rows llama.cpp has in another order, head by head, and how many heads they have."""
GEMMA2_27B_LAYERS = 46
"""The one size of Gemma-2 whose scores are not scaled by the width of a head; the file does not say so."""
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_config(file: GgufFile) -> NetworkConfig:
    """Raises ModelRefused for another architecture, and for sizes that are missing or none."""
    metadata = Metadata(file)
    kind = metadata.architecture
    if kind not in FAMILIES:
        return config_of({"model_type": kind}, "GGUF metadata: general.architecture")  # raises
    if metadata.get("expert_count"):
        raise ModelRefused("unsupported_architecture", "GGUF: a mixture of experts.")
    content = metadata.sizes()
    content["model_type"] = kind
    content["tie_word_embeddings"] = "output.weight" not in file.entries
    content["attention_bias"] = "blk.0.attn_output.bias" in file.entries
    content["use_sliding_window"] = False
    content["rope_parameters"] = _rope(file, metadata, content)
    if kind == "gemma2":
        by_width = content["num_hidden_layers"] == GEMMA2_27B_LAYERS
        content["query_pre_attn_scalar"] = (
            content["hidden_size"] // content["num_attention_heads"] if by_width else content["head_dim"]
        )
    return config_of(content, "GGUF metadata")


def gguf_stop_tokens(file: GgufFile) -> frozenset[int]:
    """End of the text, and of a turn where the file tells it. Raises ModelRefused for what is no token."""
    return Metadata(file).stop_tokens()


def gguf_tensors(file: GgufFile, source: Path) -> Tensors:
    """By the names that transformers gives them."""
    metadata = Metadata(file)
    kind = metadata.architecture
    names = IN_LAYER | OTHERWISE.get(kind, {})
    sizes = metadata.sizes() if kind == "llama" else {}
    heads = {part: sizes.get(size, 0) for part, size in TURNED.items()}
    getters: dict[str, Callable[[], Tensor]] = {}
    blocks: dict[str, Callable[[], Tensor | None]] = {}
    for name in file.entries:
        stem, _, what = name.rpartition(".")
        if stem in TOP:
            known, turned = f"{TOP[stem]}.{what}", 0
        elif (place := stem.split(".", 2))[0] == "blk" and (part := place[-1]) in names:
            known, turned = f"model.layers.{place[1]}.{names[part]}.{what}", heads.get(part, 0)
        else:
            continue
        lowered = kind == "gemma2" and "norm" in known
        getters[known] = partial(_tensor, file, name, turned, lowered)
        blocks[known] = partial(_blocks, file, name, turned)
    return Tensors(source, getters, blocks)


def _rope(file: GgufFile, metadata: Metadata, sizes: dict[str, Any]) -> dict[str, Any]:
    """Raises ModelRefused for a scaling that is not followed."""
    factors = [name for name in ROPE_FACTORS if name in file.entries]
    scaling = metadata.get("rope.scaling.type") or "none"
    if factors[1:] or factors[:1] == [ROPE_FACTORS[1]] or scaling not in ("none", "linear"):
        raise ModelRefused(
            "unsupported_architecture", f"GGUF: RoPE scaling {scaling!r} with {factors} is not followed."
        )
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_theta" in sizes:
        rope["rope_theta"] = sizes["rope_theta"]
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": metadata.fraction("rope.scaling.factor")}
    if factors:
        rope |= {"rope_type": "divided", "divisors": file.tensor(factors[0]).tolist()}
    return rope


def _tensor(file: GgufFile, name: str, heads: int, lowered: bool) -> Tensor:
    tensor = file.tensor(name)
    if lowered:
        tensor = tensor - 1.0
    return halves_apart(tensor, heads) if heads else tensor


def _blocks(file: GgufFile, name: str, heads: int) -> Tensor | None:
    found = file.blocks(name)
    return halves_apart(found, heads) if found is not None and heads else found


def halves_apart(rows: Tensor, heads: int) -> Tensor:
    """(rows, ..): from pairs side by side, head by head, to all first rows of a head and then all second ones."""
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return torch.transpose(pairs, 1, 2).reshape(rows.shape)
