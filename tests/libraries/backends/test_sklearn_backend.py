"""skops files: only what is trusted, only what was declared, and the estimator's own answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skops.io
from sklearn.ensemble import (
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import ElasticNet, Lasso, LinearRegression, LogisticRegression, Ridge
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.sklearn_backend import SklearnBackend, load_trusted
from gpu_worker.backends.sklearn_shortcuts import shortcut
from gpu_worker.backends.weights import weights_digest
from tests.libraries.backends.launching import FEATURES, FixedClock, classifier_config, launch, row

generator = np.random.default_rng(5)
ROWS = generator.normal(size=(60, 3)) * [1, 40, 900] + [0, 7, -50]
CLASSES = (ROWS[:, 0] + ROWS[:, 1] / 40 > 0).astype(int)
THREE = np.digitize(ROWS[:, 2], [-400, 300])


def saved(estimator: Any, folder: Path) -> Path:
    skops.io.dump(estimator, folder / "model.skops")
    return folder


def as_inputs(values: np.ndarray) -> dict[str, float]:
    return dict(zip(FEATURES, values.tolist(), strict=True))


@pytest.fixture
def backend() -> SklearnBackend:
    return SklearnBackend(FixedClock())


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_pipeline(StandardScaler(), LogisticRegression()),
        lambda: RandomForestClassifier(n_estimators=5, random_state=0),
        lambda: HistGradientBoostingClassifier(max_iter=5),
        GaussianNB,
    ],
)
def test_answers_are_the_estimators_own(make: Callable[[], Any], backend: SklearnBackend, tmp_path: Path) -> None:
    estimator = make().fit(ROWS, CLASSES)
    digest = weights_digest(saved(estimator, tmp_path))
    model = backend.load(launch(tmp_path, "sklearn", classifier_config(), digest))
    answers = model.run([row(str(place), as_inputs(values)) for place, values in enumerate(ROWS[:20])])
    served = [list(json.loads(answer.outputs or b"")["probabilities"].values()) for answer in answers]
    assert np.allclose(served, estimator.predict_proba(ROWS[:20]), rtol=1e-9)
    assert model.weights_digest == digest
    assert model.memory_bytes > 0


def test_missing_values_reach_a_model_that_accepts_them(backend: SklearnBackend, tmp_path: Path) -> None:
    estimator = HistGradientBoostingClassifier(max_iter=5).fit(ROWS, CLASSES)
    config = classifier_config(optional_features=["weight"])
    model = backend.load(launch(saved(estimator, tmp_path), "sklearn", config))
    (answer,) = model.run([row("a", {"width": 1, "height": 2})])
    expected = estimator.predict_proba([[1, 2, np.nan]])[0]
    assert list(json.loads(answer.outputs or b"")["probabilities"].values()) == pytest.approx(expected.tolist())


def test_an_anomaly_score_grows_with_strangeness(backend: SklearnBackend, tmp_path: Path) -> None:
    estimator = IsolationForest(n_estimators=20, random_state=0).fit(ROWS)
    config = {"kind": "anomaly", "features": list(FEATURES)}
    model = backend.load(launch(saved(estimator, tmp_path), "sklearn", config))
    usual, odd = model.run([row("usual", as_inputs(ROWS.mean(axis=0))), row("odd", as_inputs(np.full(3, 9e4)))])
    assert json.loads(usual.outputs or b"")["score"] < 0 < json.loads(odd.outputs or b"")["score"]
    assert json.loads(odd.outputs or b"")["is_anomaly"] is True


def test_other_weights_than_declared_are_refused(backend: SklearnBackend, tmp_path: Path) -> None:
    digest = weights_digest(saved(GaussianNB().fit(ROWS, CLASSES), tmp_path))
    saved(GaussianNB().fit(ROWS, 1 - CLASSES), tmp_path)
    with pytest.raises(ModelRefused, match="not the declared ones") as refused:
        backend.load(launch(tmp_path, "sklearn", classifier_config(), digest))
    assert refused.value.code == "weights_digest_mismatch"


@pytest.mark.parametrize("function", [os.system, np.save])
def test_a_file_that_names_a_function_is_refused_before_it_is_loaded(function: Any, tmp_path: Path) -> None:
    saved(make_pipeline(FunctionTransformer(func=function), GaussianNB()), tmp_path)
    with pytest.raises(ModelRefused, match=function.__name__) as refused:
        load_trusted(tmp_path / "model.skops")
    assert refused.value.code == "untrusted_types"


def test_what_is_no_skops_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.skops").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(ModelRefused, match="not a skops file"):
        load_trusted(tmp_path / "model.skops")


def test_a_file_without_an_estimator_is_refused(tmp_path: Path) -> None:
    saved({"weights": ROWS}, tmp_path)
    with pytest.raises(ModelRefused, match="not an estimator"):
        load_trusted(tmp_path / "model.skops")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (classifier_config(labels=("a", "b", "c")), "3 names for 2 classes"),
        ({"kind": "anomaly", "features": list(FEATURES)}, "decision_function"),
    ],
)
def test_a_config_that_does_not_fit_the_estimator_is_refused(
    config: dict[str, Any], complaint: str, backend: SklearnBackend, tmp_path: Path
) -> None:
    saved(GaussianNB().fit(ROWS, CLASSES), tmp_path)
    with pytest.raises(ModelRefused, match=complaint):
        backend.load(launch(tmp_path, "sklearn", config))


QUICK: list[tuple[Any, Any, str]] = [
    (LogisticRegression(), CLASSES, "predict_proba"),
    (LogisticRegression(max_iter=5_000), THREE, "predict_proba"),
    (make_pipeline(StandardScaler(), LogisticRegression()), CLASSES, "predict_proba"),
    (make_pipeline(StandardScaler(), LogisticRegression()), THREE, "predict_proba"),
    (make_pipeline(StandardScaler(), Ridge()), ROWS[:, :2] * 3, "predict"),
    (make_pipeline(StandardScaler(), Lasso()), ROWS[:, 0], "predict"),
    (ElasticNet(), ROWS[:, 0], "predict"),
    (LinearRegression(), ROWS[:, 0], "predict"),
    (RandomForestClassifier(n_estimators=7, random_state=0), THREE, "predict_proba"),
    (ExtraTreesClassifier(n_estimators=7, random_state=0), CLASSES, "predict_proba"),
    (RandomForestRegressor(n_estimators=7, random_state=0), ROWS[:, 0], "predict"),
]


@pytest.mark.parametrize(("estimator", "answers", "method"), QUICK)
def test_a_shortcut_is_taken_and_is_the_same(estimator: Any, answers: np.ndarray, method: str) -> None:
    estimator.fit(ROWS, answers)

    def original(rows: np.ndarray) -> np.ndarray:
        return getattr(estimator, method)(rows).reshape(len(rows), -1)

    quick = shortcut(estimator, original)
    assert quick is not original
    extreme = np.concatenate([ROWS, ROWS * 1e6, -ROWS * 1e6])
    assert np.allclose(quick(extreme), original(extreme), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "estimator",
    [
        make_pipeline(StandardScaler(with_mean=False), LogisticRegression()),
        make_pipeline(StandardScaler(), GaussianNB()),
        GaussianNB(),
    ],
)
def test_other_estimators_are_called_themselves(estimator: Any) -> None:
    method = estimator.fit(ROWS, CLASSES).predict_proba
    assert shortcut(estimator, method) is method


def test_a_shortcut_that_differs_is_not_taken() -> None:
    estimator = LogisticRegression().fit(ROWS, CLASSES)

    def patched(rows: np.ndarray) -> np.ndarray:
        return estimator.predict_proba(rows) ** 1.001

    assert shortcut(estimator, patched) is patched
