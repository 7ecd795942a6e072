"""Rows in, scores out: what one row does must not reach its neighbours."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.tabular import Matrix, RowDecoder, TabularModel, output_encoder, tabular_config
from tests.libraries.backends.launching import FEATURES, classifier_config, row

GOOD = {"width": 1, "height": 2.5, "weight": -3e-2}


def sum_share(matrix: Matrix) -> Matrix:
    """A stand-in for a classifier: the second class grows with the sum of the row."""
    second = 0.5 + 0.5 * np.tanh(matrix.sum(axis=1) / 2)
    return np.stack([1 - second, second], axis=1)


def model(predict: Any = sum_share, **more: Any) -> TabularModel:
    return TabularModel(tabular_config(classifier_config(**more)), predict, 10, "sha256:0")


def test_columns_follow_the_config_not_the_request() -> None:
    decoder = RowDecoder(tabular_config(classifier_config()))
    shuffled = {"weight": 3, "colour": "red", "width": 1, "height": 2}
    matrix, places, failures = decoder.decode([row("a", shuffled)])
    assert matrix.tolist() == [[1.0, 2.0, 3.0]]
    assert (places, failures) == ([0], {})


@pytest.mark.parametrize(
    ("inputs", "complaint"),
    [
        ({"width": 1, "height": 2}, "weight"),
        ({**GOOD, "height": "2"}, "height"),
        ({**GOOD, "height": None}, "height"),
        ({**GOOD, "height": True}, "height"),
        ({**GOOD, "height": 1e300}, "inputs.height"),
        (b'{"width": 1, "height": 1e999, "weight": 1}', "inputs"),
        (b'{"width": NaN, "height": 1, "weight": 1}', "inputs"),
        (b"[1,2,3]", "inputs"),
        (b"", "inputs"),
        (b'{"width": 1, "\xff": 2}', "inputs"),
    ],
)
def test_a_bad_row_fails_alone_and_says_why(inputs: object, complaint: str) -> None:
    answers = model().run([row("a", GOOD), row("bad", inputs), row("c", GOOD)])
    assert [answer.request_id for answer in answers] == ["a", "bad", "c"]
    assert [answer.error_code for answer in answers] == [None, "invalid_input", None]
    assert complaint in (answers[1].error_message or "")
    assert answers[1].outputs is None
    assert answers[0].outputs == answers[2].outputs is not None


def test_a_classifier_answers_label_score_and_every_probability() -> None:
    (answer,) = model().run([row("a", {"width": 2, "height": 0, "weight": 0})])
    outputs = json.loads(answer.outputs or b"")
    assert outputs["label"] == "yes"
    assert outputs["score"] == outputs["probabilities"]["yes"] == pytest.approx(1 / (1 + math.exp(-2)))
    assert sum(outputs["probabilities"].values()) == pytest.approx(1)


def test_labels_may_be_any_text() -> None:
    (answer,) = model(labels=("not (yet)", "Grün")).run([row("a", GOOD)])
    assert list(json.loads(answer.outputs or b"")["probabilities"]) == ["not (yet)", "Grün"]


def test_an_absent_optional_feature_is_nan_and_a_required_one_is_an_error() -> None:
    decoder = RowDecoder(tabular_config(classifier_config(optional_features=["height"])))
    batch = [row("a", {"width": 1, "weight": 3}), row("b", {"width": 1, "height": 2}), row("c", GOOD)]
    matrix, places, failures = decoder.decode(batch)
    assert places == [0, 2]
    assert list(failures) == [1]
    assert np.isnan(matrix[0, 1])
    assert not np.isnan(matrix[1]).any()


def test_rows_the_model_refuses_fail_alone() -> None:
    def picky(matrix: Matrix) -> Matrix:
        if (matrix[:, 0] == 13).any():
            raise ValueError("thirteen is not allowed")
        return sum_share(matrix)

    answers = model(picky).run([row("a", GOOD), row("bad", {**GOOD, "width": 13}), row("c", GOOD)])
    assert [answer.error_code for answer in answers] == [None, "inference_failed", None]
    assert "thirteen" in (answers[1].error_message or "")


def test_an_answer_that_is_not_finite_is_an_error_not_a_null() -> None:
    def dividing(matrix: Matrix) -> Matrix:
        with np.errstate(divide="ignore"):
            return np.stack([1 / matrix[:, 0], matrix[:, 1]], axis=1)

    answers = model(dividing).run([row("a", {**GOOD, "width": 0}), row("b", GOOD)])
    assert [answer.error_code for answer in answers] == ["output_not_finite", None]


def test_other_errors_of_the_engine_are_not_hidden() -> None:
    def broken(matrix: Matrix) -> Matrix:
        raise RuntimeError("segmented")

    with pytest.raises(RuntimeError, match="segmented"):
        model(broken).run([row("a", GOOD)])


def test_an_empty_batch_and_a_batch_of_failures_do_not_reach_the_model() -> None:
    def never(matrix: Matrix) -> Matrix:
        raise AssertionError("called without a row")

    assert model(never).run([]) == []
    assert [answer.error_code for answer in model(never).run([row("a", {})])] == ["invalid_input"]


def test_regressors_name_their_targets_and_anomalies_their_verdict() -> None:
    values = output_encoder(tabular_config({"kind": "regressor", "features": ["x"], "targets": ["low", "high"]}))
    assert [json.loads(raw) for raw in values(np.array([[1.0, 2.0]]))] == [{"low": 1.0, "high": 2.0}]
    verdict = output_encoder(tabular_config({"kind": "anomaly", "features": ["x"]}))
    assert [json.loads(raw) for raw in verdict(np.array([[0.25], [-0.5]]))] == [
        {"score": 0.25, "is_anomaly": True},
        {"score": -0.5, "is_anomaly": False},
    ]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"kind": "clasifier", "features": ["x"], "labels": ["a"]}, "Did you mean 'classifier'"),
        ({"kind": "classifier", "features": [], "labels": ["a"]}, "features"),
        ({"kind": "classifier", "features": ["x"]}, "labels"),
        ({"kind": "classifier", "features": ["x", "x"], "labels": ["a"]}, "must differ"),
        ({"kind": "classifier", "features": ["x"], "labels": ['the "one"']}, "rename it"),
        ({"kind": "classifier", "features": "x", "labels": ["a"]}, "not a list"),
        ({"kind": "regressor", "features": ["x"]}, "targets"),
        ({"kind": "anomaly", "features": ["height"], "optional_features": ["hight"]}, "Did you mean 'height'"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelRefused) as refused:
        tabular_config(config)
    assert refused.value.code == "invalid_model_config"
    assert complaint in str(refused.value)


numbers = st.floats(min_value=-1e30, max_value=1e30) | st.integers(min_value=-(2**53), max_value=2**53)
rows = st.fixed_dictionaries(dict.fromkeys(FEATURES, numbers))
anything = st.recursive(st.none() | st.booleans() | st.text() | numbers, st.lists, max_leaves=3)
junk = st.dictionaries(st.sampled_from([*FEATURES, "other"]), anything)


@given(st.lists(rows | junk, max_size=12))
def test_every_input_gets_its_own_answer_in_order(inputs: list[dict[str, Any]]) -> None:
    """Against the slow twin: a row is served when json reads three finite float32 numbers from it."""
    batch = [row(f"r{place}", one) for place, one in enumerate(inputs)]
    answers = model().run(batch)
    assert [answer.request_id for answer in answers] == [item.request_id for item in batch]
    for one, answer in zip(inputs, answers, strict=True):
        cells = [one.get(name) for name in FEATURES]
        served = all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)
        assert (answer.error_code is None) is served
        if served:
            (alone,) = model().run([row(answer.request_id, one)])
            assert json.loads(answer.outputs or b"")["score"] == pytest.approx(
                json.loads(alone.outputs or b"")["score"]
            )


@pytest.mark.parametrize("features", [3, 13, 64])
def test_an_answer_is_the_same_bits_in_any_batch_and_at_any_place(features: int) -> None:
    """Replay demands this: its batches are not those of the traffic."""
    names = [f"f{number}" for number in range(features)]
    random = np.random.default_rng(7)
    weights = random.normal(size=(features, 3))

    def softmax(matrix: Matrix) -> Matrix:
        scores = matrix @ weights
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        return shares / shares.sum(axis=1, keepdims=True)

    config = tabular_config({"kind": "classifier", "features": names, "labels": ["a", "b", "c"]})
    scorer = TabularModel(config, softmax, 10, "sha256:0")
    rows = random.normal(size=(100, features)).tolist()
    items = [row(f"r{place}", dict(zip(names, values, strict=True))) for place, values in enumerate(rows)]
    alone = {item.request_id: scorer.run([item])[0].outputs for item in items}
    for size in (2, 3, 8, 33, 100):
        order = [items[place] for place in random.permutation(len(items))]
        for start in range(0, len(order), size):
            for answer in scorer.run(order[start : start + size]):
                assert answer.outputs == alone[answer.request_id], (size, answer.request_id)
