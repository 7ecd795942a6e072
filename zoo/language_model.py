"""SmolLM2-135M-Instruct as a torch model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_worker.backends.torch_backend import TorchBackend
from zoo.package import Package, Sample, write_package
from zoo.recipes import Recipe
from zoo.smollm2 import convert
from zoo.texts import chats, sentences
from zoo.weights import fetched, pins

GOLDEN_TOKENS = 16
SAMPLES = 60
KEYS_VALUES_MB = 180
"""The KV pool: 4,096 tokens of 2 x 30 layers x 3 heads x 64 x 4 bytes = 45 KiB."""
JUDGED = 12
"""Sentences whose likelihood the card reports."""

INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "prompt": {"type": "string", "minLength": 1, "maxLength": 20_000, "description": "Text to continue as it is."},
        "messages": {
            "type": "array",
            "minItems": 1,
            "maxItems": 64,
            "description": "A conversation; the chat template turns it into a prompt.",
            "items": {
                "type": "object",
                "properties": {
                    "role": {"type": "string", "enum": ["system", "user", "assistant"]},
                    "content": {"type": "string", "maxLength": 20_000},
                },
                "required": ["role", "content"],
            },
        },
    },
}
OUTPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "finish_reason": {"type": "string", "enum": ["stop", "length"]},
    },
    "required": ["text"],
}


def build(recipe: Recipe, folder: Path) -> None:
    pin = pins()[recipe.weights[0]]
    files = fetched(recipe.weights[0])
    convert(next(path for name, path in files.items() if name.endswith(".gguf")), folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokens, nats = likelihood(folder, tokenizer)
    package = Package(
        version="1.0.0",
        service_type="text-generation",
        config={
            "kind": "text_generation",
            "dtype": "float32",
            "threads": 1,
            "max_tokens": 48,
            "context_tokens": 2048,
            "kv_mb": KEYS_VALUES_MB,
        },
        input_schema=INPUT_SCHEMA,
        output_schema=OUTPUT_SCHEMA,
        samples=[
            Sample(
                {"messages": messages}, {"max_tokens": GOLDEN_TOKENS, "temperature": 0.0}, chat_ids(tokenizer, messages)
            )
            for messages in chats(SAMPLES)
        ],
        batches=(1, 4, 8),
        tolerance=0.0,
        p99_latency_ms=30_000,
        queue_ms=20_000,
        title=f"{pin.title}, dequantised to float32.",
        data="Pretrained and instruction-tuned by its authors, mainly on English; see the model's own card. The "
        "samples are general questions and sentences of the data set descriptions in scikit-learn (BSD-3-Clause).",
        algorithm="LLaMA architecture: 30 layers, width 576, 9 query and 3 key heads, 49,152 tokens, tied embeddings. "
        f"Converted from the 4-bit GGUF of {pin.requirement}; the values are those of the quantised file, so "
        "quality is that of the 4-bit model.",
        metrics={"mean negative log likelihood per token, nats": nats, "tokens judged": float(tokens)},
        metrics_about=f"Measured at build time on {JUDGED} English sentences. The speeds below are for "
        f"{GOLDEN_TOKENS} generated tokens per request.",
        licence=f"{pin.licence} ({pin.title}).",
        limits="A small model: it makes things up. English only. Greedy answers repeat on one machine; a near tie can "
        "fall the other way on another processor. Prompt and answer share 2,048 tokens here (the network can do "
        "8,192).",
        fusion="pooled",
        answered=8,
        reserve_mb=KEYS_VALUES_MB,
        extra={
            "tokenizer": {"path": "tokenizer.json", "digest": file_digest(folder / "tokenizer.json")},
            "preferred_precision": ["fp32", "bf16"],
            "supported_context_length": 2048,
            "max_seq_len": 2048,
        },
    )
    write_package(recipe, folder, package, TorchBackend)


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """What Stage 0 should make of a conversation."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@torch.inference_mode()
def likelihood(folder: Path, tokenizer: Any) -> tuple[int, float]:
    """(tokens, mean negative log likelihood in nats) over JUDGED sentences."""
    network: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    count, total = 0, 0.0
    for sentence in sentences()[:JUDGED]:
        ids = torch.tensor([tokenizer.encode(sentence.text, add_special_tokens=False)])
        logits = network(input_ids=ids).logits
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return count, total / count


def file_digest(file: Path) -> str:
    """`sha256:...` of one file."""
    return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
