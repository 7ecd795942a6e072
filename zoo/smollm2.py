"""SmolLM2 from a GGUF file to what transformers reads: safetensors, config, tokenizer and chat template.

The tensors become what transformers' own GGUF loader makes of them, bit for bit (a slow test compares the logits). The
formats: GGUF as in ggml's documentation; tokenizer.json as the tokenizers library writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3
"""tokenizer.ggml.token_type of special tokens."""


class GgufFile:
    """One open GGUF file of a LLaMA model."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        if self("general.architecture") != "llama":
            raise ValueError(f"{path} holds a {self('general.architecture')} model, only llama can be converted")

    def __call__(self, key: str) -> Any:
        """Value of a metadata key. Raises KeyError."""
        return self._reader.fields[key].contents()

    def get(self, key: str, default: Any) -> Any:
        return self(key) if key in self._reader.fields else default

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Every tensor, dequantised, under the name transformers uses."""
        heads = {"attn_q": self("llama.attention.head_count"), "attn_k": self("llama.attention.head_count_kv")}
        found: dict[str, NDArray[np.float32]] = {}
        for tensor in self._reader.tensors:
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            stem = tensor.name.removesuffix(".weight")
            if stem in TOP:
                found[f"{TOP[stem]}.weight"] = np.ascontiguousarray(values)
                continue
            _, layer, part = stem.split(".")
            if part in heads:
                values = halves_apart(values, heads[part])
            found[f"model.layers.{layer}.{IN_LAYER[part]}.weight"] = np.ascontiguousarray(values)
        return found


def halves_apart(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes GGUF's row order in q and k.

    GGUF puts the two rows that RoPE rotates together side by side, head by head; transformers keeps all first rows,
    then all second rows.
    """
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def convert(source: Path, folder: Path) -> None:
    """Writes model.safetensors (float32), the two configs, tokenizer.json and tokenizer_config.json."""
    file = GgufFile(source)
    tensors = file.tensors()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", network_config(file, tied="lm_head.weight" not in tensors))
    tokens = {name: file(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
    ids = {"bos_token_id": tokens["bos"], "eos_token_id": tokens["eos"], "pad_token_id": tokens["padding"]}
    _write(folder / "generation_config.json", ids)
    _write(folder / "tokenizer.json", tokenizer(file))
    words = file("tokenizer.ggml.tokens")
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": words[tokens["bos"]],
            "eos_token": words[tokens["eos"]],
            "pad_token": words[tokens["padding"]],
            "unk_token": words[file("tokenizer.ggml.unknown_token_id")],
            "model_max_length": file("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": file("tokenizer.chat_template"),
        },
    )


def network_config(file: GgufFile, tied: bool) -> dict[str, Any]:
    """config.json. `tied`: the output layer is the token embedding."""
    theta = file("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file("llama.vocab_size"),
        "hidden_size": file("llama.embedding_length"),
        "intermediate_size": file("llama.feed_forward_length"),
        "num_hidden_layers": file("llama.block_count"),
        "num_attention_heads": file("llama.attention.head_count"),
        "num_key_value_heads": file("llama.attention.head_count_kv"),
        "head_dim": file("llama.rope.dimension_count"),
        "max_position_embeddings": file("llama.context_length"),
        # GGUF keeps it as float32; the shortest decimal that means the same is what the model was trained with.
        "rms_norm_eps": float(str(np.float32(file("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": file("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
        "use_cache": True,
    }


def tokenizer(file: GgufFile) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE that splits digits one by one, as `tokenizer.ggml.pre: smollm` asks."""
    if (kind := file("tokenizer.ggml.pre")) != "smollm":
        raise ValueError(f"tokenizer.ggml.pre is {kind!r}; only 'smollm' can be converted")
    words: list[str] = file("tokenizer.ggml.tokens")
    special = [place for place, kind in enumerate(file("tokenizer.ggml.token_type")) if kind == CONTROL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": place, "content": words[place], **plain} for place in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {word: place for place, word in enumerate(words)},
            "merges": [merge.split(" ") for merge in file("tokenizer.ggml.merges")],
        },
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1))
