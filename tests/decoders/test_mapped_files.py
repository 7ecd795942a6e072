"""Files of weights under the memory limit of an engine (RLIMIT_DATA), each in a process of its own: a limit cannot be
taken back by who has it, and the maps of this process are full of libraries.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from transformers import RobertaConfig, RobertaModel

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.tensors import safetensors_of

MIB = 1 << 20
FILE_MIB = 96
SPARE_MIB = 48
"""What may still be allocated, less than the file has. Loading itself takes some."""
LIMITED = """
import re, resource, sys
from pathlib import Path
from gpu_worker.edge.process_limits import limit_memory

def limit():
    return resource.getrlimit(resource.RLIMIT_DATA)[0]

def taken():
    return int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

source = Path(sys.argv[1])
"""
LEAVE_SPARE = f"limit_memory(taken() + {SPARE_MIB * MIB}); before = limit()\n"
CHECKED = """
assert limit() == before, (limit(), before)
assert str(source) not in Path("/proc/self/maps").read_text(), "the file is still mapped"
"""


def within_limit(code: str, source: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED + code + CHECKED, str(source)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def large_and_small() -> dict[str, torch.Tensor]:
    return {"large": torch.zeros(FILE_MIB * MIB // 4), "small": torch.arange(3.0)}


def test_safetensors_that_are_larger_than_what_is_left_are_read(tmp_path: Path) -> None:
    save_file(large_and_small(), tmp_path / "model.safetensors")
    read = """
from gpu_worker.backends.tensors import safetensors_of
"""
    use = """
with safetensors_of(source) as tensors:
    small = tensors("small").clone()
    assert float(tensors("large")[-1]) == 0.0
assert small.tolist() == [0.0, 1.0, 2.0]
del tensors
"""
    within_limit(read + LEAVE_SPARE + use, tmp_path)


def test_a_gguf_that_is_larger_than_what_is_left_is_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for name, tensor in large_and_small().items():
        writer.add_tensor(name, np.asarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = """
from gpu_worker.backends.gguf_file import GgufFile
"""
    use = """
file = GgufFile(source / "model.gguf")
small = file.tensor("small").clone()
assert float(file.tensor("large")[-1]) == 0.0
assert small.tolist() == [0.0, 1.0, 2.0]
del file
"""
    within_limit(read + LEAVE_SPARE + use, tmp_path)


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 20,
}


@pytest.mark.parametrize(("dtype", "spare"), [("bfloat16", 120), ("float32", 150)])
def test_transformers_may_map_what_it_reads_and_lets_it_go(dtype: str, spare: int, tmp_path: Path) -> None:
    """`spare`: MiB for the weights as they are kept, 48 or 96, and not for the file besides, which is as large."""
    network = RobertaModel(RobertaConfig(vocab_size=FILE_MIB * MIB // 4 // 256, **SIZES), add_pooling_layer=False)
    network.save_pretrained(tmp_path)
    read = f"""
import torch
from gpu_worker.backends.transformers_encoder import TransformersEncoder
TransformersEncoder(source, torch.{dtype}, "cpu")  # once without a limit: what it imports only now takes memory, too
limit_memory(taken() + {spare * MIB}); before = limit()
"""
    use = f"""
encoder = TransformersEncoder(source, torch.{dtype}, "cpu")
assert encoder.positions == 18
"""
    within_limit(read + use, tmp_path)


def test_a_tensor_of_a_type_that_is_not_known_is_refused_when_it_is_wanted(tmp_path: Path) -> None:
    save_arrays({"wanted": np.ones(3, np.float32), "other": np.ones(3, np.uint16)}, tmp_path / "model.safetensors")
    with safetensors_of(tmp_path) as tensors:
        assert tensors("wanted").tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(ModelRefused, match="other is of type 'U16', not one of"):
            tensors("other")
