"""The converted language model against transformers' own reading of the GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from zoo.weights import cache_folder, pins

FOLDER = Path(__file__).parents[2] / ".models" / "smollm2-135m-instruct"
PIN = pins()["smollm2"]
GGUF = cache_folder() / f"{PIN.package}-{PIN.version}" / Path(next(iter(PIN.files))).name

TEXTS = (
    "Who wrote Hamlet?",
    "In 1969, 2 people walked on the Moon; the 3rd stayed in orbit.\n\tGrüße, 你好!",
    "def add(a, b):\n    return a + b\n",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER.exists() and GGUF.exists()), reason="run `make models`"),
]


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Any, Any]:
    """(ours, transformers' own from the GGUF file)"""
    theirs = AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name, local_files_only=True)
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True), theirs


def test_logits_are_equal(tokenizers: tuple[Any, Any]) -> None:
    """By transformers' reader of GGUF tensors; its from_pretrained would need one more library for the same."""
    ours: Any = AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32)
    theirs: Any = LlamaForCausalLM(ours.config).eval()
    checkpoint = load_gguf_checkpoint(str(GGUF), return_tensors=True, model_to_load=theirs)
    report = theirs.load_state_dict(checkpoint["tensors"], strict=False)
    assert set(report.missing_keys) <= {"lm_head.weight"}
    assert not report.unexpected_keys
    theirs.tie_weights()
    for name in ("rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "vocab_size"):
        assert getattr(ours.config, name) == pytest.approx(checkpoint["config"][name], rel=1e-6), name
    for text in TEXTS:
        ids = torch.tensor([tokenizers[0].encode(text, add_special_tokens=False)])
        with torch.inference_mode():
            difference = (ours(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max()
        assert float(difference) == 0.0, text


def test_tokens_are_equal_and_come_back(tokenizers: tuple[Any, Any]) -> None:
    ours, theirs = tokenizers
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
