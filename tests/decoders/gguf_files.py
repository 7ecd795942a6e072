"""GGUF files of the tiny networks, as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

from gpu_worker.backends.decoder.gguf_names import IN_LAYER, OTHERWISE, TOP


def write_gguf(folder: Path, file: Path, kind: str = "F32") -> Path:
    """From a folder that transformers wrote. kind: of the matrices."""
    config = json.loads((folder / "config.json").read_text())
    family = str(config["model_type"])
    writer = GGUFWriter(file, family)
    writer.add_array("tokenizer.ggml.tokens", ["a word"] * config["vocab_size"])
    writer.add_array("tokenizer.ggml.scores", [0.5] * config["vocab_size"])
    _write_sizes(writer, config)
    names = {known: name for name, known in (IN_LAYER | OTHERWISE.get(family, {})).items()}
    names |= {known: name for name, known in TOP.items()}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, what = name.rpartition(".")
        values = tensor.float().numpy()
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            stored = f"blk.{layer}.{names[part]}.{what}"
        else:
            part, stored = stem, f"{names[stem]}.{what}"
        if family == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if family == "gemma2" and "norm" in part:
            values = values + 1
        told = GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(stored, quantize(np.ascontiguousarray(values), told), raw_dtype=told)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_sizes(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    if config.get("sliding_window") and config["model_type"] != "qwen2":
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_eos_token_id(config["eos_token_id"])
