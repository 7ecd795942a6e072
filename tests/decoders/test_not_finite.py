"""Weights that hold NaN, or sums that leave the range of their dtype: an error of those requests, and of no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.embedding import EmbeddingModel, Hidden, Tokens
from tests.decoders.families import VOCABULARY, ask, load, prompts, save
from tests.libraries.backends.launching import row

BAD = VOCABULARY - 1
"""The token whose embedding is none."""


@pytest.fixture(scope="module", params=[float("nan"), float("inf")])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save(tmp_path_factory.mktemp("model"), eos_token_id=None)
    file = made / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][BAD] = request.param
    save_file(tensors, file, metadata={"format": "pt"})
    return made


def mixed(model: DecoderModel, **parameters: Any) -> None:
    """Of three requests together the one with the bad token fails; the others have the answers they have alone."""
    asked = [[token % BAD for token in prompt] for prompt in prompts([5, 9, 14])]
    asked[1][4] = BAD
    items = [ask(str(number), prompt, seed=number, **parameters) for number, prompt in enumerate(asked)]
    alone = [model.run([item])[0] for item in (items[0], items[2])]
    first, failed, third = model.run(items)
    assert (failed.error_code, failed.outputs, failed.token_ids) == ("output_not_finite", None, None)
    assert "became NaN or infinite" in (failed.error_message or "")
    for one, other in zip((first, third), alone, strict=True):
        assert one.error_code is None
        assert (one.token_ids, one.outputs) == (other.token_ids, other.outputs)
    assert not model.busy


@pytest.mark.parametrize(
    "parameters", [{"max_tokens": 6}, {"max_tokens": 6, "temperature": 0.9, "top_p": 0.9}, {"score": True}], ids=str
)
@pytest.mark.parametrize("precision", ["dense", "int8"])
def test_an_answer_that_is_no_number_fails_alone(parameters: dict[str, Any], precision: str, folder: Path) -> None:
    mixed(load(folder, repeatable=True, precision=precision), **parameters)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_vector_that_is_no_number_fails_alone(pooling: str, folder: Path) -> None:
    mixed(load(folder, repeatable=True, head="embedding", pooling=pooling))


def test_of_texts_that_an_encoder_reads_together_one_that_becomes_no_number_fails_alone() -> None:
    def forward(ids: Tokens, mask: Tokens) -> Hidden:
        hidden = np.ones((*ids.shape, 4), np.float32)
        hidden[(ids == BAD).any(axis=1)] = np.nan
        return hidden

    model = EmbeddingModel(forward, 16, 0, 0, "")
    asked = [row(str(n), {"text": "?"}, token_ids=ids) for n, ids in enumerate([[1, 2], [BAD, 3, 4], [5]])]
    answers = model.run(asked)
    assert [answer.error_code for answer in answers] == [None, "output_not_finite", None]
    assert answers[1].outputs is None
