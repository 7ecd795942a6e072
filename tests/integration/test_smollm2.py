"""The converted language model against transformers' own reading of the GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (FOLDER.exists() and GGUF.exists()), reason="run `make models`"),
]


@pytest.fixture(scope="module")
def tokenizers() -> tuple[Any, Any]:
    """(ours, transformers' own from the GGUF file)"""
    theirs = AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name, local_files_only=True)
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True), theirs


def test_logits_are_equal(tokenizers: tuple[Any, Any]) -> None:
    ours = AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        GGUF.parent, gguf_file=GGUF.name, local_files_only=True, dtype=torch.float32
    )
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
