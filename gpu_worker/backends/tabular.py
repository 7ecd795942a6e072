"""Rows in, scores out: the JSON side of every tabular model, shared by the sklearn and the onnx backend.

The hot path of the whole pipeline for classical models, so a batch is decoded by msgspec into generated structs, laid
out as one float64 matrix, predicted with one call, and encoded from generated structs again. Measured on two Zen 4
cores with 30 features and batch 256: about 3.5 us per row for decoding and layout, 0.6 us for encoding.

`launch.config` of a tabular model:
  kind              classifier | regressor | anomaly
  features          list[str]: columns of the matrix, in the order the model was trained with
  optional_features list[str]: may be absent from a request; the model sees NaN (only models that accept missing values)
  labels            list[str]: classifier: names of its classes, in the order of its probabilities
  targets           list[str]: regressor: names of its outputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu_worker.backends.base import EngineInput, EngineOutput, ModelRefused, failed
from sie_stream.backend_facts import TABULAR_KINDS, TabularKind
from sie_stream.errors import did_you_mean

Kind = TabularKind
KINDS = TABULAR_KINDS

Matrix = NDArray[np.float64]
Predict = Callable[[Matrix], Matrix]
"""(rows, features) -> (rows, classes) probabilities, (rows, targets) values, or (rows, 1) anomaly scores."""

BLOCK_ROWS = 8
"""Rows a matrix product takes at a time on every processor that NumPy and ONNX Runtime have kernels for; rows left over
go through other kernels, which add in another order."""

FLOAT32_MAX = float(np.finfo(np.float32).max)
"""Trees and ONNX compute in float32; beyond this an input would become infinite inside them."""


class TabularConfig(msgspec.Struct, frozen=True):
    """The checked form of a tabular model's config."""

    kind: Kind
    features: tuple[str, ...]
    optional_features: frozenset[str]
    names: tuple[str, ...]
    """Classes of a classifier, targets of a regressor, empty for an anomaly score."""


def tabular_config(config: Mapping[str, object]) -> TabularConfig:
    """Check `launch.config`. Raises ModelRefused that names the key and what is allowed."""
    kind = config.get("kind")
    if kind not in KINDS:
        raise ModelRefused(
            "invalid_model_config",
            f"backend.config.kind: {kind!r} is not one of {', '.join(KINDS)}.{did_you_mean(str(kind), KINDS)}",
        )
    features = _names(config, "features")
    if not features:
        raise ModelRefused("invalid_model_config", "backend.config.features: needs at least one column name.")
    optional = _names(config, "optional_features")
    strangers = [name for name in optional if name not in features]
    if strangers:
        guess = did_you_mean(strangers[0], features)
        raise ModelRefused(
            "invalid_model_config", f"backend.config.optional_features: {strangers[0]!r} is no feature.{guess}"
        )
    key = {"classifier": "labels", "regressor": "targets", "anomaly": ""}[kind]
    names = _names(config, key) if key else ()
    if key and not names:
        raise ModelRefused("invalid_model_config", f"backend.config.{key}: a {kind} needs at least one name.")
    return TabularConfig(kind=cast(Kind, kind), features=features, optional_features=frozenset(optional), names=names)


def _names(config: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ModelRefused("invalid_model_config", f"backend.config.{key}: {value!r} is not a list of names.")
    if len(set(value)) != len(value):
        raise ModelRefused("invalid_model_config", f"backend.config.{key}: names must differ, got {value!r}.")
    awkward = [name for name in value if any(mark in '"\\' or mark < " " for mark in name)]
    if awkward:
        raise ModelRefused(
            "invalid_model_config",
            f"backend.config.{key}: {awkward[0]!r} holds a quote, a backslash or a control character; rename it.",
        )
    return tuple(value)


class RowDecoder:
    """JSON objects -> one float64 matrix, columns in the model's order. Unknown fields are ignored."""

    def __init__(self, config: TabularConfig) -> None:
        self._features = config.features
        fields = [
            (f"f{column}", float, msgspec.field(name=name, default=np.nan))
            if name in config.optional_features
            else (f"f{column}", float, msgspec.field(name=name))
            for column, name in enumerate(config.features)
        ]
        row_type = msgspec.defstruct("Row", fields, kw_only=True, gc=False)
        assert row_type.__struct_fields__ == tuple(f"f{column}" for column in range(len(fields)))
        self._one = msgspec.json.Decoder(row_type)
        self._optional = np.array([name in config.optional_features for name in config.features])

    def decode(self, batch: Sequence[EngineInput]) -> tuple[Matrix, list[int], dict[int, EngineOutput]]:
        """Returns (matrix, places, failures): row i of the matrix is `batch[places[i]]`, failures are by place."""
        rows: list[msgspec.Struct] = []
        places: list[int] = []
        failures: dict[int, EngineOutput] = {}
        decode = self._one.decode
        for place, item in enumerate(batch):
            try:
                rows.append(decode(item.inputs))
                places.append(place)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                failures[place] = failed(item, "invalid_input", f"inputs: {error}")
        width = len(self._features)
        cells = chain.from_iterable(map(msgspec.structs.astuple, rows))
        matrix = np.fromiter(cells, np.float64, count=len(rows) * width).reshape(len(rows), width)
        if rows and not np.abs(matrix).max() <= FLOAT32_MAX:
            return self._drop_extreme(batch, matrix, places, failures)
        return matrix, places, failures

    def _drop_extreme(
        self, batch: Sequence[EngineInput], matrix: Matrix, places: list[int], failures: dict[int, EngineOutput]
    ) -> tuple[Matrix, list[int], dict[int, EngineOutput]]:
        """Called when the matrix holds a NaN or a huge number: an absent optional feature may be NaN, nothing else."""
        bad = ~(np.abs(matrix) <= FLOAT32_MAX) & ~(np.isnan(matrix) & self._optional)
        keep = np.logical_not(bad.any(axis=1, keepdims=True)).ravel()
        for row in np.flatnonzero(~keep).tolist():
            column = int(np.flatnonzero(bad[row])[0])
            message = f"inputs.{self._features[column]}: {matrix[row, column]!r} does not fit a 32-bit float."
            failures[places[row]] = failed(batch[places[row]], "invalid_input", message)
        return matrix[keep], [place for place, kept in zip(places, keep.tolist(), strict=True) if kept], failures


Encode = Callable[[Matrix], list[bytes]]


def output_encoder(config: TabularConfig) -> Encode:
    """The function that turns a matrix of predictions (all finite) into JSON objects by the output_schema."""
    encode = msgspec.json.Encoder().encode
    match config.kind:
        case "classifier":
            return _classifier_encoder(config.names, encode)
        case "regressor":
            values_type = _struct_of("Values", config.names)
            return lambda scores: [encode(values_type(*row)) for row in scores.tolist()]
        case "anomaly":
            anomaly_type = msgspec.defstruct("Anomaly", [("score", float), ("is_anomaly", bool)], gc=False)
            return lambda scores: [encode(anomaly_type(row[0], row[0] > 0.0)) for row in scores.tolist()]


def _classifier_encoder(labels: tuple[str, ...], encode: Callable[[object], bytes]) -> Encode:
    probabilities_type = _struct_of("Probabilities", labels)
    answer_type = msgspec.defstruct(
        "Answer", [("label", str), ("score", float), ("probabilities", probabilities_type)], gc=False
    )

    def encode_all(scores: Matrix) -> list[bytes]:
        scores = np.clip(scores, 0.0, 1.0)  # ONNX Runtime sums trees in 32 bits and lands on 1.0000004
        winners = scores.argmax(axis=1).tolist()
        return [
            encode(answer_type(labels[winner], row[winner], probabilities_type(*row)))
            for row, winner in zip(scores.tolist(), winners, strict=True)
        ]

    return encode_all


def _struct_of(name: str, keys: tuple[str, ...]) -> type[msgspec.Struct]:
    fields = [(f"f{column}", float, msgspec.field(name=key)) for column, key in enumerate(keys)]
    return msgspec.defstruct(name, fields, gc=False)


def whole_blocks(matrix: NDArray[Any]) -> NDArray[Any]:
    """The matrix with its last row repeated up to a whole number of blocks, so that an answer is the same bits whatever
    the size of its batch and its place in it: a replay forms other batches than the traffic did.
    """
    missing = -len(matrix) % BLOCK_ROWS
    if not missing:
        return matrix
    padded = np.empty((len(matrix) + missing, *matrix.shape[1:]), matrix.dtype)
    padded[: len(matrix)] = matrix
    padded[len(matrix) :] = matrix[-1]
    return padded


class TabularModel:
    """A loaded tabular model: any `predict` between a decoder and an encoder. Implements LoadedModel."""

    def __init__(self, config: TabularConfig, predict: Predict, memory_bytes: int, weights_digest: str) -> None:
        self._decoder = RowDecoder(config)
        self._encode = output_encoder(config)
        self._predict = predict
        self._width = max(1, len(config.names))
        self.memory_bytes = memory_bytes
        self.weights_digest = weights_digest

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        matrix, places, failures = self._decoder.decode(batch)
        answers = failures
        if places:
            scores, refused = self._scores(matrix)
            finite = np.isfinite(scores).all(axis=1, keepdims=True).ravel()
            if finite.all():
                for place, outputs in zip(places, self._encode(scores), strict=True):
                    answers[place] = EngineOutput(batch[place].request_id, outputs)
            else:
                self._answer_some(batch, places, scores, finite, refused, answers)
        return [answers[place] for place in range(len(batch))]

    def _scores(self, matrix: Matrix) -> tuple[Matrix, dict[int, str]]:
        """Predict all rows at once; when the model refuses the batch, row by row, so one row cannot fail others.

        A refused row is NaN in the matrix, and its reason is in the dict.
        """
        try:
            scores = self._predict(whole_blocks(matrix))[: len(matrix)]
        except ValueError as error:
            if len(matrix) == 1:
                return np.full((1, self._width), np.nan), {0: str(error)}
            alone = [self._scores(matrix[row : row + 1]) for row in range(len(matrix))]
            refused = {row: reasons[0] for row, (_, reasons) in enumerate(alone) if reasons}
            return np.concatenate([scores for scores, _ in alone]), refused
        assert scores.shape == (len(matrix), self._width), (scores.shape, len(matrix), self._width)
        return scores, {}

    def _answer_some(
        self,
        batch: Sequence[EngineInput],
        places: list[int],
        scores: Matrix,
        finite: NDArray[np.bool_],
        refused: Mapping[int, str],
        answers: dict[int, EngineOutput],
    ) -> None:
        encoded = iter(self._encode(scores[finite]))
        for row, (place, usable) in enumerate(zip(places, finite.tolist(), strict=True)):
            if usable:
                answers[place] = EngineOutput(batch[place].request_id, next(encoded))
            elif row in refused:
                answers[place] = failed(batch[place], "inference_failed", refused[row])
            else:
                answers[place] = failed(batch[place], "output_not_finite", "the model answered NaN or infinity.")
