"""Small random LoRA adapters in the files that PEFT writes, and their bases with the adapter merged in."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANK = 4
MODULES = ("q_proj", "v_proj", "down_proj")
NAME = "base_model.model.{module}.{half}.weight"


def write_adapter(
    folder: Path, base: Path, seed: int = 0, targets: tuple[str, ...] = MODULES, strength: float = 0.3, **changes: Any
) -> Path:
    """Random matrices on `targets` of every layer. `changes`: of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights_of(base).items():
        module = name.removesuffix(".weight")
        if module.startswith("model.layers.") and module.endswith(targets):
            outs, ins = weight.shape
            for half, size in (("lora_A", (RANK, ins)), ("lora_B", (outs, RANK))):
                tensors[NAME.format(module=module, half=half)] = strength * torch.randn(size, generator=generator)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "r": RANK,
        "lora_alpha": 6,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": list(targets),
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """The base with the adapter added to its weights, as a model of its own."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    tensors, lows = weights_of(base), weights_of(adapter)
    for name, down in lows.items():
        if "lora_A" in name:
            place = name.removeprefix("base_model.model.").removesuffix("lora_A.weight") + "weight"
            tensors[place] = tensors[place] + scale * lows[name.replace("lora_A", "lora_B")] @ down
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
