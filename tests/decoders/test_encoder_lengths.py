"""Texts that are longer than an encoder reads: the same answer from every engine, and none for their neighbours.

Sentence-transformers cuts a text at max_seq_length; here that is `truncation` of tokenizer.json, which Stage 0 follows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.backends.embedding import EmbeddingModel, StepRefused, Tokens
from gpu_worker.backends.onnx_backend import OnnxBackend
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.backends.transformers_encoder import TransformersEncoder
from sie_stream.edge.tokenizer import shared_tokenizers
from tests.libraries.backends.launching import FixedClock, launch, row

MODELS = Path(__file__).parents[2] / ".models"
MINILM, SMALLER = MODELS / "minilm-l6-v2", MODELS / "minilm-l6-v2-int8"
POSITIONS = 5


def encoder_with_positions(folder: Path) -> None:
    """Hidden state: the token's row of a table plus the position's. More tokens than positions cannot be added up."""
    constants = {
        "words": np.eye(10, 4, dtype=np.float32) + 1,
        "places": np.ones((POSITIONS, 4), np.float32),
        "start": np.array([0]),
        "first_axis": np.array([0]),
        "second": np.array([1]),
    }
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "second"], ["tokens"]),
        helper.make_node("Slice", ["places", "start", "tokens", "first_axis"], ["used"]),
        helper.make_node("Gather", ["words", "input_ids"], ["states"]),
        helper.make_node("Add", ["states", "used"], ["last_hidden_state"]),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    hidden = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens", 4])
    kept = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "places", [ids], [hidden], kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def texts(*token_ids: list[int]) -> list[EngineInput]:
    return [row(str(place), {"text": "?"}, token_ids=ids) for place, ids in enumerate(token_ids)]


def codes(answers: list[EngineOutput]) -> list[str | None]:
    return [answer.error_code for answer in answers]


@pytest.mark.parametrize("declared", [None, 1_000, 6])
def test_a_network_with_fewer_positions_than_declared_refuses_only_the_longer_texts(
    declared: int | None, tmp_path: Path
) -> None:
    encoder_with_positions(tmp_path)
    config: dict[str, Any] = {"kind": "embedding"} | ({} if declared is None else {"max_tokens": declared})
    model = OnnxBackend(FixedClock()).load(launch(tmp_path, "onnx", config))
    for _ in range(2):
        answers = model.run(texts([1] * POSITIONS, [1] * (POSITIONS + 1), [2, 3], [2, 99]))
        assert codes(answers) == [None, "context_length_exceeded", None, "invalid_input"]
        assert f"6 tokens, but the model reads at most {POSITIONS}" in (answers[1].error_message or "")


def test_a_network_that_fails_whatever_it_is_given_is_the_engine_s_fault() -> None:
    def broken(ids: Tokens, mask: Tokens) -> Any:
        raise StepRefused("a node of the graph")

    with pytest.raises(StepRefused):
        EmbeddingModel(broken, 10, 0, 0, "").run(texts([1, 2, 3]))


needs_models = pytest.mark.skipif(not (MINILM.exists() and SMALLER.exists()), reason="run `make models`")


@needs_models
def test_the_real_encoder_reads_512_tokens_and_refuses_more_with_every_engine() -> None:
    config = {"kind": "embedding", "max_tokens": 600}
    transformers = TransformersEncoder(MINILM, torch.float32, "cpu")
    engines = [
        TorchBackend(FixedClock()).load(launch(MINILM, "torch", config)),
        OnnxBackend(FixedClock()).load(launch(SMALLER, "onnx", config)),
        EmbeddingModel(transformers, min(600, transformers.positions), 0, 0, "", transformers.vocabulary),
    ]
    long, longer = [101, *[2003] * 510, 102], [101, *[2003] * 511, 102]
    vectors: list[list[float]] = []
    for engine in engines:
        answers = engine.run(texts(long, longer, [101, 2003, 102]))
        assert codes(answers) == [None, "context_length_exceeded", None]
        vectors.append(json.loads(answers[0].outputs or b"")["embedding"])
    ours, smaller, theirs = vectors
    assert np.allclose(ours, theirs, atol=1e-4)
    assert np.dot(ours, smaller) > 0.95


@needs_models
def test_stage_0_cuts_a_long_text_as_sentence_transformers_does() -> None:
    """At max_seq_length, 256 of this model, the two special tokens included."""
    tokenizer = shared_tokenizers().get(str(MINILM / "tokenizer.json"))
    text = "one two three four five six seven " * 100
    ids = tokenizer.encode(text)
    whole = tokenizer.encode("one two three four five six seven")[1:-1] * 100
    assert ids == [101, *whole[:254], 102]
    model = TorchBackend(FixedClock()).load(launch(MINILM, "torch", {"kind": "embedding", "max_tokens": 256}))
    assert codes(model.run(texts(ids))) == [None]
