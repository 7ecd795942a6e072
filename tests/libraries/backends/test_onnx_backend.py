"""ONNX files through their adapters; the graphs are tiny and made here."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from skl2onnx import to_onnx
from sklearn.linear_model import LogisticRegression, Ridge

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.onnx_backend import OnnxBackend
from tests.libraries.backends.launching import FEATURES, FixedClock, classifier_config, launch, row

generator = np.random.default_rng(3)
ROWS = generator.normal(size=(40, 3))
CLASSES = (ROWS.sum(axis=1) > 0).astype(int)
TABLE = np.asarray(generator.normal(size=(10, 4)), np.float32)


def save_graph(folder: Path, node: Any, inputs: list[Any], outputs: list[Any], constants: list[Any]) -> None:
    graph = helper.make_graph([node], "tiny", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def lookup_encoder(folder: Path) -> None:
    """A network whose hidden state of a token is a row of TABLE."""
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    hidden = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens", 4])
    node = helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])
    save_graph(folder, node, [ids], [hidden], [numpy_helper.from_array(TABLE, "table")])


def first_byte_classifier(folder: Path) -> None:
    """A network over 16 bytes whose 3 probabilities are a row of a table, chosen by the first byte modulo the rows."""
    shares = np.zeros((257, 3), np.float32)
    shares[:, 0] = 0.9
    shares[ord("#")] = [0.1, 0.8, 0.1]
    shares[ord("?")] = [0.3, 0.3, 0.4]
    shares[0xFF] = [0.1, 0.1, 0.8]
    first = helper.make_node("Slice", ["bytes", "from", "to", "axis"], ["first"])
    flat = helper.make_node("Squeeze", ["first", "axis"], ["flat"])
    chosen = helper.make_node("Gather", ["shares", "flat"], ["target_label"])
    constants = [
        numpy_helper.from_array(shares, "shares"),
        numpy_helper.from_array(np.array([0]), "from"),
        numpy_helper.from_array(np.array([1]), "to"),
        numpy_helper.from_array(np.array([1]), "axis"),
    ]
    rows = helper.make_tensor_value_info("bytes", TensorProto.INT32, ["batch", 16])
    out = helper.make_tensor_value_info("target_label", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph([first, flat, chosen], "tiny", [rows], [out], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    config = {
        "labels": ["python", "shell", "gif"],
        "text_labels": ["python", "shell"],
        "thresholds": {"gif": 0.95},
        "overwrite_map": {"python": "py"},
        "medium_confidence_threshold": 0.5,
        "beg_size": 8,
        "end_size": 8,
        "block_size": 32,
        "min_file_size_for_dl": 4,
        "padding_token": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def backend() -> OnnxBackend:
    return OnnxBackend(FixedClock())


def test_a_classifier_answers_as_scikit_learn_does(backend: OnnxBackend, tmp_path: Path) -> None:
    estimator = LogisticRegression().fit(ROWS, CLASSES)
    graph: Any = to_onnx(estimator, ROWS[:1].astype(np.float32), options={"zipmap": False}, target_opset=17)
    (tmp_path / "model.onnx").write_bytes(graph.SerializeToString())
    model = backend.load(launch(tmp_path, "onnx", classifier_config()))
    batch = [row(str(place), dict(zip(FEATURES, cells, strict=True))) for place, cells in enumerate(ROWS.tolist())]
    served = [list(json.loads(answer.outputs or b"")["probabilities"].values()) for answer in model.run(batch)]
    assert np.allclose(served, estimator.predict_proba(ROWS), atol=1e-5)


def test_a_regressor_with_two_targets(backend: OnnxBackend, tmp_path: Path) -> None:
    estimator = Ridge().fit(ROWS, ROWS[:, :2])
    graph: Any = to_onnx(estimator, ROWS[:1].astype(np.float32), target_opset=17)
    (tmp_path / "model.onnx").write_bytes(graph.SerializeToString())
    config = {"kind": "regressor", "features": list(FEATURES), "targets": ["a", "b"]}
    (answer,) = backend.load(launch(tmp_path, "onnx", config)).run([row("r", dict.fromkeys(FEATURES, 0.5))])
    assert list(json.loads(answer.outputs or b"").values()) == pytest.approx(
        estimator.predict(np.full((1, 3), 0.5))[0].tolist(), abs=1e-5
    )


def test_an_embedding_is_the_normalised_mean_over_real_tokens(backend: OnnxBackend, tmp_path: Path) -> None:
    lookup_encoder(tmp_path)
    model = backend.load(launch(tmp_path, "onnx", {"kind": "embedding", "max_tokens": 6}))
    texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [2] * 6, *([[3, place % 10] for place in range(20)])]
    answers = model.run([row(str(place), {"text": "?"}, token_ids=ids) for place, ids in enumerate(texts)])
    for ids, answer in zip(texts, answers, strict=True):
        mean = TABLE[ids].mean(axis=0)
        served = json.loads(answer.outputs or b"")["embedding"]
        assert np.allclose(served, mean / np.linalg.norm(mean), atol=1e-6)
        assert answer.prompt_tokens == len(ids)


@pytest.mark.parametrize("wrong", [len(TABLE), 1 << 40, -1])
def test_a_token_that_is_none_of_the_network_s_fails_alone(wrong: int, backend: OnnxBackend, tmp_path: Path) -> None:
    lookup_encoder(tmp_path)
    model = backend.load(launch(tmp_path, "onnx", {"kind": "embedding", "max_tokens": 6}))
    texts = [[1, 2], [3, wrong], [len(TABLE) - 1, 0]]
    answers = model.run([row(str(place), {"text": "?"}, token_ids=ids) for place, ids in enumerate(texts)])
    assert [answer.error_code for answer in answers] == [None, "invalid_input", None]
    assert "another model's tokenizer" in (answers[1].error_message or "")


def test_texts_without_tokens_or_with_too_many_fail_alone(backend: OnnxBackend, tmp_path: Path) -> None:
    lookup_encoder(tmp_path)
    model = backend.load(launch(tmp_path, "onnx", {"kind": "embedding", "max_tokens": 6}))
    tokens: list[list[int] | None] = [None, [1, 2], [1] * 7, []]
    answers = model.run([row(str(place), {"text": "?"}, token_ids=ids) for place, ids in enumerate(tokens)])
    assert [answer.error_code for answer in answers] == [
        "tokens_missing",
        None,
        "context_length_exceeded",
        "tokens_missing",
    ]


def test_file_types_with_thresholds_overwrites_and_short_contents(backend: OnnxBackend, tmp_path: Path) -> None:
    first_byte_classifier(tmp_path)
    model = backend.load(launch(tmp_path, "onnx", {"kind": "file_type"}))
    contents: list[tuple[bytes, str, str]] = [
        (b"import os", "py", "python"),
        (b"   \n  import os", "py", "python"),
        (b"#!/bin/sh\n", "shell", "shell"),
        (b"?maybe, maybe not", "unknown", "gif"),
        (b"\xff\xd8\xff\xe0....", "unknown", "gif"),
        (b"", "empty", "undefined"),
        (b"ab", "txt", "undefined"),
        (b"\xff\xfe", "unknown", "undefined"),
        (b" " * 20 + b"ab", "txt", "undefined"),
    ]
    batch = [
        row(str(place), {"content_base64": base64.b64encode(content).decode()})
        for place, (content, _, _) in enumerate(contents)
    ]
    answers = [json.loads(answer.outputs or b"") for answer in model.run(batch)]
    assert [(answer["label"], answer["raw_label"]) for answer in answers] == [pair[1:] for pair in contents]


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({}, "exactly one"),
        ({"text": "a", "content_base64": "YQ=="}, "exactly one"),
        ({"content_base64": "not base64!"}, "content_base64"),
        ({"text": 5}, "text"),
        (b"\xff", "inputs"),
    ],
)
def test_contents_that_cannot_be_read_fail_alone(
    inputs: object, complaint: str, backend: OnnxBackend, tmp_path: Path
) -> None:
    first_byte_classifier(tmp_path)
    model = backend.load(launch(tmp_path, "onnx", {"kind": "file_type"}))
    good, bad = model.run([row("good", {"text": "import os"}), row("bad", inputs)])
    assert good.error_code is None
    assert bad.error_code == "invalid_input"
    assert complaint in (bad.error_message or "")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"kind": "embeding"}, "Did you mean 'embedding'"),
        ({"kind": "embedding", "threads": -1}, "threads"),
        ({"kind": "anomaly", "features": list(FEATURES)}, "does not fit"),
        ({"kind": "file_type"}, "config.json"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    config: dict[str, Any], complaint: str, backend: OnnxBackend, tmp_path: Path
) -> None:
    lookup_encoder(tmp_path)
    with pytest.raises(ModelRefused, match=complaint):
        backend.load(launch(tmp_path, "onnx", config))


def test_what_is_no_onnx_file_is_refused(backend: OnnxBackend, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(ModelRefused, match="cannot open"):
        backend.load(launch(tmp_path, "onnx", classifier_config()))
