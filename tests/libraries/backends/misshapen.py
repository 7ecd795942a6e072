"""Files of weights in which one tensor has another size than the config says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def with_another_size(file: Path, name: str, dimension: int) -> None:
    """One row, or one column, more."""
    tensors = load_file(file)
    more = [0] * 2 * tensors[name].dim()
    more[2 * (tensors[name].dim() - 1 - dimension) + 1] = 1
    save_file({**tensors, name: torch.nn.functional.pad(tensors[name], more)}, file, metadata={"format": "pt"})


def each_misshapen(file: Path) -> Iterator[str]:
    """The file with each dimension of each tensor changed in turn: the tensor's name. It is whole again at the end."""
    whole = file.read_bytes()
    for name, tensor in load_file(file).items():
        for dimension in range(tensor.dim()):
            with_another_size(file, name, dimension)
            yield name
            file.write_bytes(whole)
