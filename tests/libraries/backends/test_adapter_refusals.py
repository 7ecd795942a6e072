"""Adapters that are not followed, or do not fit their base, say which field, which value, and what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.adapter import Adapter, read_adapter
from gpu_worker.backends.decoder.shape import DecoderShape

SHAPE = DecoderShape(
    *("llama", 50, 8, 12, 2, 1, 4, 64, 1e-5, True),
    windows=(None, None),
    rope={"rope_type": "default"},
    attention_scale=0.5,
)
SIZES = {"self_attn.q_proj": (8, 8), "mlp.down_proj": (8, 12)}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
}


def tensors(
    rank: int = 2, prefix: str = "base_model.model.model.", sizes: dict[str, tuple[int, int]] = SIZES
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for layer in range(2):
        for module, (outs, ins) in sizes.items():
            found[f"{prefix}layers.{layer}.{module}.lora_A.weight"] = torch.ones(rank, ins)
            found[f"{prefix}layers.{layer}.{module}.lora_B.weight"] = torch.ones(outs, rank)
    return found


def read(folder: Path, matrices: dict[str, torch.Tensor] | None = None, rank: int = 0, **changes: Any) -> Adapter:
    config = {name: value for name, value in (CONFIG | changes).items() if value != "absent"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors() if matrices is None else matrices, folder / "adapter_model.safetensors")
    return read_adapter(folder, SHAPE, torch.float32, "cpu", rank)


def refusal(folder: Path, *given: Any, **changes: Any) -> str:
    with pytest.raises(ModelRefused) as refused:
        read(folder, *given, **changes)
    assert refused.value.code in ("unsupported_adapter", "weights_unreadable")
    return refused.value.message


def test_what_is_followed(tmp_path: Path) -> None:
    adapter = read(
        tmp_path, task_type="CAUSAL_LM", lora_dropout=0.5, use_dora=False, modules_to_save=None, new_field=None
    )
    assert adapter.size_bytes == 4 * 2 * (2 * (8 + 8 + 8 + 12))
    states, product = torch.ones(3, 8), torch.zeros(3, 16)
    changed = adapter.added((1, "qkv"), product, states, torch.tensor([[True], [False], [True]]))
    # A: 8 ones each, B: two of these; times alpha / r. Queries are the first 8 of 16 columns.
    assert changed.tolist() == [[32.0] * 8 + [0.0] * 8, [0.0] * 16, [32.0] * 8 + [0.0] * 8]
    assert not product.any(), "the base's product is not written to"
    assert adapter.added((1, "gate_up"), product, states, None) is product
    assert read(tmp_path, tensors(prefix="base_model.model.")).size_bytes == adapter.size_bytes
    assert read(tmp_path, rank=2, alora_invocation_tokens=[49, 0]).invocation == (49, 0)


def test_a_row_on_which_nothing_acts_keeps_its_bits(tmp_path: Path) -> None:
    adapter = read(tmp_path)
    odd = torch.tensor([[-0.0, float("nan"), float("inf"), 1e-40] * 4])
    kept = adapter.added((0, "qkv"), odd, torch.full((1, 8), float("inf")), torch.tensor([[False]]))
    assert kept.numpy().tobytes() == odd.numpy().tobytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3': it is not one of 'LORA'"),
        ({"r": "absent"}, "r None: the rank is a whole number from 1 to 1024"),
        ({"r": 0}, "r 0: "),
        ({"r": True}, "r True: "),
        ({"r": 2.0}, "r 2.0: "),
        ({"lora_alpha": "absent"}, "lora_alpha None: it is a number > 0, at most 3e+38"),
        ({"lora_alpha": 10**400}, "0000...: it is a number > 0"),
        ({"lora_alpha": 1e39}, "lora_alpha 1e+39: it is a number > 0"),
        ({"lora_alpha": float("inf")}, "cannot read"),
        ({"lora_alpha": "4"}, "lora_alpha '4': "),
        ({"lora_alpha": -1}, "lora_alpha -1: "),
        ({"use_rslora": 1}, "use_rslora 1: it is not one of False, True"),
        ({"use_dora": True}, "use_dora True: "),
        ({"bias": "lora_only"}, "bias 'lora_only': it is not one of 'none'"),
        ({"lora_bias": True}, "lora_bias True: "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head']: "),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern {'q_proj': 4}: "),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True: "),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa': "),
        ({"lora_alphas": 3}, "Did you mean 'lora_alpha'"),
        ({"target_modules": "absent"}, "target_modules None: it is a list of names"),
        ({"target_modules": ".*q_proj"}, "no pattern"),
        ({"target_modules": []}, "target_modules []: "),
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head': its base (llama) has down_proj, gate_proj"),
        ({"target_modules": ["query_proj", "down_proj"]}, "Did you mean"),
        ({"layers_to_transform": [0, 2]}, "layers_to_transform 2: its base has layers 0 to 1"),
        ({"layers_to_transform": "0"}, "layers_to_transform ['0']: "),
        ({"layers_pattern": "h"}, "layers_pattern 'h': "),
        ({"alora_invocation_tokens": []}, "alora_invocation_tokens []: "),
        ({"alora_invocation_tokens": [3, "4"]}, "alora_invocation_tokens [3, '4']: "),
        ({"alora_invocation_tokens": [3, 50]}, "alora_invocation_tokens 50: its base has tokens 0 to 49"),
        ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight is of no module"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "lacks base_model.model.model.layers.0.self_attn.v"),
        ({"layers_to_transform": 0}, "layers.1.mlp.down_proj.lora_A.weight is of no module"),
    ],
    ids=str,
)
def test_a_field_that_is_not_followed_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, **changes)


def test_tensors_of_another_base_and_of_another_rank_are_refused(tmp_path: Path) -> None:
    other = refusal(tmp_path, tensors(sizes=SIZES | {"mlp.down_proj": (8, 16)}))
    assert "layers.0.mlp.down_proj.lora_A.weight is (2, 16), and for r 2 on this base (2, 12)" in other
    assert "adapter of another base" in other
    assert "is (3, 8), and for r 2 on this base (2, 8)" in refusal(tmp_path, tensors(rank=3))
    declared = refusal(tmp_path, None, 16)
    assert declared.startswith("lora.rank: 16 is declared, and ")
    assert "says r 2" in declared


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (float("-inf"), torch.bfloat16), (1e5, torch.float16)]
)
def test_matrices_that_hold_no_numbers_in_the_dtype_of_the_states_are_refused(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    read(tmp_path)
    matrices = tensors()
    name = sorted(matrices)[3]
    matrices[name][0, 0] = value
    save_file(matrices, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelRefused, match="holds NaN, infinity, or numbers too large for ") as refused:
        read_adapter(tmp_path, SHAPE, dtype, "cpu")
    assert name in refused.value.message
    assert str(dtype).removeprefix("torch.") in refused.value.message


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int32])
def test_matrices_of_whole_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Quantised ones: without their scales they are another adapter."""
    narrow = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    assert f"is of type {str(dtype).removeprefix('torch.')}; matrices of" in refusal(tmp_path, narrow)


def test_a_matrix_by_both_of_its_names_is_refused(tmp_path: Path) -> None:
    both = tensors() | {name: 0 * one for name, one in tensors(prefix="base_model.model.").items()}
    assert "are one matrix by two names" in refusal(tmp_path, both)


def test_a_long_value_is_told_in_part(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, rank_pattern={f"module{number}": 4 for number in range(5_000)})) < 500


def test_files_that_are_not_there_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"which has adapter_config.json and adapter_model.safetensors"):
        read_adapter(tmp_path, SHAPE, torch.float32, "cpu")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"pickled")
    with pytest.raises(ModelRefused, match=r"no \*.safetensors"):
        read_adapter(tmp_path, SHAPE, torch.float32, "cpu")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelRefused, match="cannot read"):
        read_adapter(tmp_path, SHAPE, torch.float32, "cpu")
