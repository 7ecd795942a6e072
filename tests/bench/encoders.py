"""Small encoders cut from the MiniLM of the zoo: its first layers, and the rows of its first tokens."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

MINILM = Path(__file__).resolve().parents[2] / ".models" / "minilm-l6-v2"
TOKENS = (1_000, 3_000)
LAYERS = (1, 2)


def encoders(folder: Path) -> list[Path]:
    """Folders with one encoder each, of different sizes: 8 to 20 MB."""
    found = []
    weights = load_file(MINILM / "model.safetensors")
    config = json.loads((MINILM / "config.json").read_text())
    for tokens in TOKENS:
        for layers in LAYERS:
            path = folder / f"minilm-{layers}-layers-{tokens}-tokens"
            path.mkdir(parents=True)
            kept = {
                name: tensor[:tokens].clone() if "word_embeddings" in name else tensor
                for name, tensor in weights.items()
                if "pooler" not in name and _layer(name) < layers
            }
            save_file(kept, path / "model.safetensors")
            changed = {**config, "vocab_size": tokens, "num_hidden_layers": layers}
            (path / "config.json").write_text(json.dumps(changed))
            found.append(path)
    return found


def _layer(name: str) -> int:
    """Of the tensor; -1: before the layers."""
    _, _, after = name.partition("encoder.layer.")
    return int(after.split(".")[0]) if after else -1
