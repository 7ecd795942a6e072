"""Tiny decoders with random weights, one per family, and loading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gpu_worker.backends.base import EngineInput
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.torch_backend import TorchBackend
from tests.libraries.backends.launching import FixedClock, launch, row

VOCABULARY = 96
STOP = 2
CONTEXT = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": STOP,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 40}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied-biased": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama-linear": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    ),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    "phi3-window": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 9, "num_key_value_heads": 4}),
    # Small caps, so that they bend most scores.
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-uncapped": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
}


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Random weights of a family, biases and norms too."""
    config_type, network_type, differences = FAMILIES[family]
    torch.manual_seed(1)
    network = network_type(config_type(**{**SIZES, **differences, **changes}))
    with torch.no_grad():
        for name, tensor in network.named_parameters():
            if "bias" in name or "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
    network.save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path) -> Path:
    """A tokenizer of letters: token n is chr(32 + n)."""
    words = Tokenizer(models.WordLevel({chr(32 + n): n for n in range(VOCABULARY - 1)} | {"\N{DEGREE SIGN}": 95}, " "))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    words.save(str(folder / "tokenizer.json"))
    return folder


def with_byte_tokenizer(folder: Path) -> Path:
    """The same characters by a byte-level tokenizer, which llguidance can read; the last token ends an answer."""
    words = {"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" if n == 0 else chr(32 + n): n for n in range(VOCABULARY - 1)}
    words["\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}"] = VOCABULARY - 1
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def load(folder: Path, clock: FixedClock | None = None, **config: Any) -> DecoderModel:
    settings = {"kind": "text_generation", "max_tokens": 10, "kv_mb": 4, **config}
    tokenizer = folder / "tokenizer.json"
    asked = launch(folder, "torch", settings)
    if tokenizer.exists():
        asked = msgspec.structs.replace(asked, tokenizer=str(tokenizer))
    model = TorchBackend(clock or FixedClock()).load(asked)
    assert isinstance(model, DecoderModel)
    return model


def ask(
    request_id: str, prompt: list[int], seed: int | None = None, priority: int = 1, **parameters: Any
) -> EngineInput:
    raw = json.dumps(parameters).encode() if parameters else None
    return row(request_id, {"prompt": "?"}, token_ids=prompt, parameters=raw, seed=seed, priority=priority)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
