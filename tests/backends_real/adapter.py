"""A small LoRA adapter for SmolLM2 that changes its answers, in the files PEFT writes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 4


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Random matrices on the query projections of every layer: same seed, same adapter."""
    config = json.loads((model / "config.json").read_text())
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
