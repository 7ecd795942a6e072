"""What both peers compute, so that only the frameworks differ: the same checks and the same model, as quick as ours.

Runs in the environment of the peers, which has no msgspec: JSON by orjson, which is as fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
from skops.io import load

from gpu_worker.backends.sklearn_shortcuts import shortcut

FEATURES = ("sepal_length_cm", "sepal_width_cm", "petal_length_cm", "petal_width_cm")
RANGES = ((2.49, 9.71), (0.799, 5.6), (0.0, 9.86), (0.0, 3.7))
LABELS = ("setosa", "versicolor", "virginica")


def route(value: bytes) -> bytes:
    """Hop 1: decode, check the inputs against their ranges, name the model's version. Raises ValueError."""
    request = orjson.loads(value)
    inputs = request["inputs"]
    for name, (low, high) in zip(FEATURES, RANGES, strict=True):
        given = inputs[name]
        if type(given) not in (int, float) or not low <= given <= high:
            raise ValueError(f"{name} = {given!r}")
    request["version"] = "1.0.0"
    request["instance"] = "mi-0123456789ab"
    return orjson.dumps(request)


class Scorer:
    """Hop 2: decode, score, encode the result."""

    def __init__(self, folder: str) -> None:
        # The same formulas on the fitted numbers that our own engine uses; plain predict_proba is slower.
        estimator = load(next(Path(folder).glob("*.skops")), trusted=[])
        self._predict = shortcut(estimator, estimator.predict_proba)

    def score(self, values: list[bytes]) -> list[bytes]:
        items = [orjson.loads(value) for value in values]
        rows = np.array([[item["inputs"][name] for name in FEATURES] for item in items], np.float64)
        return [self._result(item, row) for item, row in zip(items, self._predict(rows).tolist(), strict=True)]

    def score_one(self, value: bytes) -> bytes:
        return self.score([value])[0]

    def _result(self, item: dict[str, Any], shares: list[float]) -> bytes:
        best = max(range(len(shares)), key=shares.__getitem__)
        outputs = {
            "label": LABELS[best],
            "score": shares[best],
            "probabilities": dict(zip(LABELS, shares, strict=True)),
        }
        item.pop("inputs")
        item["status"] = "ok"
        item["outputs"] = outputs
        return orjson.dumps(item)
