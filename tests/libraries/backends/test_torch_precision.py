"""A model of the torch backend is loaded in the precision that the scheduler placed it in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_worker.backends.base import ModelRefused, OnTrunk
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.backends.weights import weights_digest
from tests.libraries.backends.launching import FixedClock, launch
from tests.libraries.backends.test_torch_backend import bert, language_model, load

__all__ = ["language_model"]


def placed(folder: Path, chosen: str, kind: str = "text_generation", **config: Any) -> Any:
    """Loaded as a launch says that the scheduler placed in this precision."""
    asked = launch(folder, "torch", {"kind": kind, **config}, weights_digest(folder))
    return TorchBackend(FixedClock()).load(msgspec.structs.replace(asked, precision=chosen))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_a_decoder_is_loaded_in_the_precision_it_was_placed_in(precision: str, language_model: Path) -> None:
    ours = placed(language_model, precision)
    same = load(language_model, precision=precision)
    assert isinstance(same, OnTrunk)
    assert ours.trunk == same.trunk
    assert ours.memory_bytes == same.memory_bytes
    both = placed(language_model, precision, precision=precision)
    dense = load(language_model)
    assert isinstance(both, OnTrunk)
    assert isinstance(dense, OnTrunk)
    assert both.trunk == same.trunk
    assert (ours.trunk == dense.trunk) == (precision == "fp32")


def test_an_encoder_is_loaded_in_the_precision_it_was_placed_in(tmp_path: Path) -> None:
    bert(tmp_path)
    whole, half = (placed(tmp_path, precision, "embedding") for precision in ("fp32", "bf16"))
    assert half.memory_bytes * 2 == whole.memory_bytes


@pytest.mark.parametrize(
    ("precision", "config", "complaint"),
    [
        ("int8", {"precision": "bf16"}, r"backend\.config\.precision: 'bf16', but the replica was placed in 'int8'"),
        ("int8", {"precision": "dense"}, r"backend\.config\.precision: 'dense', but"),
        ("fp32", {"dtype": "bfloat16"}, r"backend\.config\.dtype: 'bfloat16', but the replica was placed in 'fp32'"),
        ("fp8", {}, r"preferred_precision: 'fp8' was chosen, .* loaded in fp32, bf16, fp16, int8, int4"),
        ("int8", {"kind": "embedding"}, r"preferred_precision: 'int8' was chosen, .* loaded in fp32, bf16, fp16"),
        ("", {"kind": "embedding", "precision": "int8"}, r"backend\.config\.precision: 'int8' is not one of"),
    ],
)
def test_another_precision_than_it_was_placed_in_is_refused(
    precision: str, config: dict[str, Any], complaint: str, language_model: Path
) -> None:
    with pytest.raises(ModelRefused, match=complaint) as refused:
        placed(language_model, precision, **config)
    assert refused.value.code == "invalid_model_config"
