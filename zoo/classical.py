"""Trains one classical model on one cohort and saves it as skops or ONNX."""

from __future__ import annotations

import json
import math
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import skops.io
from skl2onnx import to_onnx
from sklearn import metrics
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning

from gpu_worker.backends.base import EngineOutput
from gpu_worker.backends.onnx_backend import OnnxBackend
from gpu_worker.backends.sklearn_backend import SklearnBackend
from gpu_worker.backends.tabular import Kind
from zoo.algorithms import ABOUT, CLASSIFIERS, REGRESSORS, outlier_detector
from zoo.datasets import Array, Split, Table, cohort, split, table
from zoo.package import Package, Sample, write_package
from zoo.recipes import Recipe

VERSION = "1.0.0"
SAMPLES_MAX = 120
ONNX_OPSET = 17
BATCHES = (1, 64, 256)
TOLERANCE = {"skops": 1e-6, "onnx": 1e-4}
"""Largest relative difference to the trained estimator: ONNX computes in float32."""

SERVICE = {"classifier": "classification", "regressor": "regression", "anomaly": "scoring"}
DEADLINES_MS = {"P0": (50, 20), "P1": (200, 100), "P2": (2_000, 1_000)}
"""priority -> (p99 latency, queue time)"""


def build(recipe: Recipe, folder: Path) -> None:
    """Train, save, and check that the saved model answers as the trained one does on every held-out sample."""
    data = cohort(recipe.dataset, recipe.cohort)
    parts = split(data, recipe.seed)
    kind = kind_of(recipe, data)
    estimator = train(recipe, kind, parts)
    names = {"classifier": data.labels, "regressor": data.targets, "anomaly": ()}[kind]
    save(recipe, estimator, kind, parts.train_rows, folder)
    held = parts.held_rows[:SAMPLES_MAX]
    package = Package(
        version=VERSION,
        service_type=SERVICE[kind],
        config=_config(kind, data.features, names),
        input_schema=input_schema(table(recipe.dataset), data.features),
        output_schema=output_schema(kind, names),
        samples=[Sample(dict(zip(data.features, row, strict=True))) for row in held.tolist()],
        batches=BATCHES,
        tolerance=TOLERANCE[recipe.form],
        p99_latency_ms=DEADLINES_MS[recipe.priority][0],
        queue_ms=DEADLINES_MS[recipe.priority][1],
        title=f"{ABOUT[recipe.algorithm]}, trained on {data.title} ({data.cohort}).",
        data=f"{data.title}: {data.about} Cohort: {data.cohort}, {len(data.rows)} rows, of which "
        f"{len(parts.train_rows)} were trained on and {len(parts.held_rows)} held out (seed {recipe.seed}).",
        algorithm=f"{ABOUT[recipe.algorithm]}.\n\n```\n{estimator!r}\n```\n\nSaved as {recipe.form}.",
        metrics=quality(kind, estimator, parts, recipe.seed),
        metrics_about=_metrics_about(kind, len(parts.held_rows)),
        licence=f"Weights: Apache-2.0, as this project. Data: {data.licence}.",
        limits=_limits(kind, data),
        replicas=2 if recipe.priority == "P0" else 1,
    )
    answers = write_package(recipe, folder, package, OnnxBackend if recipe.form == "onnx" else SklearnBackend)
    _check(recipe, kind, answers, expected(estimator, kind, held))


def kind_of(recipe: Recipe, data: Table) -> Kind:
    if recipe.algorithm == "iforest":
        return "anomaly"
    return "classifier" if data.labels else "regressor"


def train(recipe: Recipe, kind: Kind, parts: Split) -> BaseEstimator:
    """A fitted estimator. The same recipe gives the same estimator."""
    with warnings.catch_warnings():
        # A perceptron stopped at its iteration limit is still the model whose quality the card reports.
        warnings.simplefilter("ignore", ConvergenceWarning)
        match kind:
            case "classifier":
                return CLASSIFIERS[recipe.algorithm](recipe.seed).fit(parts.train_rows, parts.train_answers)
            case "regressor":
                answers = parts.train_answers
                return REGRESSORS[recipe.algorithm](recipe.seed).fit(parts.train_rows, answers)
            case "anomaly":
                return outlier_detector(recipe.seed).fit(parts.train_rows)


def save(recipe: Recipe, estimator: BaseEstimator, kind: Kind, rows: Array, folder: Path) -> None:
    """model.skops or model.onnx."""
    warnings.filterwarnings("ignore", "Attribute `prob[AB]_` was deprecated", FutureWarning)  # skl2onnx, of an SVC
    if recipe.form == "skops":
        file = folder / "model.skops"
        skops.io.dump(estimator, file)
        repack(file)
        return
    options = {"zipmap": False} if kind == "classifier" else None
    graph: Any = to_onnx(estimator, rows[:1].astype(np.float32), options=options, target_opset=ONNX_OPSET)
    graph.producer_version = ""
    (folder / "model.onnx").write_bytes(graph.SerializeToString(deterministic=True))


def repack(file: Path) -> None:
    """Rewrites a skops file so that the same estimator gives the same bytes, and compresses it.

    skops numbers objects by their address in memory and stamps the members with the time; both are replaced by the
    order of first mention and by a fixed date.
    """
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(members.pop("schema.json"))
    numbers: dict[int, int] = {}
    renamed: dict[str, str] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "__id__" in node:
                node["__id__"] = numbers.setdefault(node["__id__"], len(numbers))
            if node.get("file") in members:
                old = node["file"]
                node["file"] = renamed.setdefault(old, f"{len(renamed)}{Path(old).suffix}")
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(schema)
    assert set(renamed) == set(members), "a member of the skops file is not mentioned in its schema"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        contents = {"schema.json": json.dumps(schema).encode()}
        contents |= {new: members[old] for old, new in renamed.items()}
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)


def _config(kind: Kind, features: tuple[str, ...], names: tuple[str, ...]) -> dict[str, Any]:
    config: dict[str, Any] = {"kind": kind, "features": list(features)}
    if kind != "anomaly":
        config["labels" if kind == "classifier" else "targets"] = list(names)
    return config


def input_schema(whole: Table, features: tuple[str, ...]) -> dict[str, Any]:
    """Every feature is required; its range is the observed one, widened by half its span (never below zero)."""
    properties: dict[str, Any] = {}
    for feature in features:
        values = whole.rows[:, whole.features.index(feature)]
        low, high = float(values.min()), float(values.max())
        margin = (high - low) / 2 or max(1.0, abs(high))
        lowest = low - margin if low < 0 else max(0.0, low - margin)
        properties[feature] = {
            "type": "number",
            "minimum": _rounded(lowest, math.floor),
            "maximum": _rounded(high + margin, math.ceil),
        }
    return {"type": "object", "properties": properties, "required": list(features)}


def _rounded(value: float, towards: Callable[[float], int]) -> float:
    """Three digits, rounded so that the range only grows."""
    if value == 0:
        return 0.0
    digits = 2 - math.floor(math.log10(abs(value)))
    return round(towards(value * 10**digits) / 10**digits, max(digits, 0))


def output_schema(kind: Kind, names: tuple[str, ...]) -> dict[str, Any]:
    share = {"type": "number", "minimum": 0, "maximum": 1}
    match kind:
        case "classifier":
            every = {"type": "object", "properties": dict.fromkeys(names, share), "required": list(names)}
            properties = {"label": {"type": "string", "enum": list(names)}, "score": share, "probabilities": every}
        case "regressor":
            properties = {name: {"type": "number"} for name in names}
        case "anomaly":
            properties = {"score": {"type": "number"}, "is_anomaly": {"type": "boolean"}}
    # Copies, so that YAML writes no anchors.
    return json.loads(json.dumps({"type": "object", "properties": properties, "required": list(properties)}))


def quality(kind: Kind, estimator: Any, parts: Split, seed: int) -> dict[str, float]:
    """Metrics on the held-out rows."""
    truth = parts.held_answers
    match kind:
        case "classifier":
            shares = estimator.predict_proba(parts.held_rows)
            guesses = shares.argmax(axis=1)
            return {
                "accuracy": float(metrics.accuracy_score(truth, guesses)),
                "macro F1": float(metrics.f1_score(truth, guesses, average="macro")),
                "log loss": float(metrics.log_loss(truth, shares, labels=list(range(shares.shape[1])))),
                "accuracy of always answering the commonest class": float(np.bincount(truth).max() / len(truth)),
            }
        case "regressor":
            values = estimator.predict(parts.held_rows)
            middle = np.tile(parts.train_answers.mean(axis=0), (len(truth), 1)).reshape(truth.shape)
            return {
                "R2": float(metrics.r2_score(truth, values)),
                "mean absolute error": float(metrics.mean_absolute_error(truth, values)),
                "mean absolute error of always answering the mean": float(metrics.mean_absolute_error(truth, middle)),
            }
        case "anomaly":
            shuffled = np.random.default_rng(seed).permuted(parts.held_rows, axis=0)
            scores = -estimator.decision_function(np.concatenate([parts.held_rows, shuffled]))
            odd = np.repeat([0, 1], len(parts.held_rows))
            return {
                "AUC against the held-out rows with every column shuffled": float(metrics.roc_auc_score(odd, scores)),
                "share of held-out rows called anomalous": float((scores[odd == 0] > 0).mean()),
            }


def _metrics_about(kind: Kind, rows: int) -> str:
    what = "distance from the rows it was trained on" if kind == "anomaly" else "agreement with the true answers"
    return f"Measured at build time on {rows} held-out rows: {what}."


def _limits(kind: Kind, data: Table) -> str:
    small = " Very few rows: the figures above are rough." if len(data.rows) < 200 else ""
    purpose = "An anomaly score ranks rows, it does not explain them. " if kind == "anomaly" else ""
    return (
        f"{purpose}Trained on a small public data set to exercise a serving system; not for medical, financial or "
        f"other decisions about people. It knows only its cohort ({data.cohort}).{small}"
    )


def _check(recipe: Recipe, kind: Kind, answers: list[EngineOutput], trained: Array) -> None:
    """The served answers are the trained estimator's. Raises AssertionError with the largest difference."""
    served = np.array([_numbers(kind, json.loads(answer.outputs or b"{}")) for answer in answers])
    allowed = TOLERANCE[recipe.form] * np.maximum(1.0, np.abs(trained))
    off = np.abs(served - trained)
    if not (off <= allowed).all():
        raise AssertionError(f"{recipe.name}: served and trained answers differ by up to {off.max():.3g}")


def expected(estimator: Any, kind: Kind, rows: Array) -> Array:
    """(rows, outputs) by scikit-learn itself, none of the backend's code."""
    match kind:
        case "classifier":
            return estimator.predict_proba(rows)
        case "regressor":
            return estimator.predict(rows).reshape(len(rows), -1)
        case "anomaly":
            return -estimator.decision_function(rows).reshape(len(rows), 1)


def _numbers(kind: Kind, outputs: dict[str, Any]) -> list[float]:
    match kind:
        case "classifier":
            return list(outputs["probabilities"].values())
        case "regressor":
            return list(outputs.values())
        case "anomaly":
            return [outputs["score"]]
