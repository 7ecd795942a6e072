"""One model on a server of the Open Inference Protocol: rows to requests, answers to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from gpu_worker.backends.base import EngineInput, EngineOutput, ModelRefused, failed
from gpu_worker.backends.served.failures import ServerFailure, ServerTimeout, Unreachable, verdict
from gpu_worker.backends.served.oip import InferenceServer, ModelInfo
from gpu_worker.backends.served.options import choice, names, positive, refused, text
from gpu_worker.backends.served.tensors import (
    Tensor,
    TensorSpec,
    agreed,
    answer_rows,
    declared,
    finite,
    json_value,
    row_tensor,
)
from sie_stream.control import ModelLaunch
from sie_stream.errors import did_you_mean
from sie_stream.ports import Clock


class Place(NamedTuple):
    """Where the model is on its server, and the source it was loaded for."""

    name: str
    version: str
    source: str


class RowPlan(msgspec.Struct, frozen=True):
    """How a request becomes the tensors of one row, and an answer the outputs object."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    columns: tuple[str, ...]
    """Fields that fill the one numeric input; empty: fields are named like tensors."""
    token_input: str
    binary: bool
    plain: frozenset[str]
    """Outputs written as one value instead of a list."""
    batch_max: int
    """0: a request is one row and has no batch dimension."""


class _Schema(msgspec.Struct):
    properties: dict[str, dict[str, object]] = {}
    required: tuple[str, ...] = ()


def row_plan(launch: ModelLaunch, found: ModelInfo) -> RowPlan:
    """Hold the declaration against the server's description. Raises ModelRefused.

    Codes: invalid_model_config, metadata_mismatch, schema_mismatch (input_schema or output_schema name fields that the
    tensors do not have, or the other way round).
    """
    config = launch.config
    batched, batch_max = _batching(launch, found)
    served_in, served_out = (tuple(_row_spec(one, batched) for one in side) for side in (found.inputs, found.outputs))
    inputs = agreed("inputs", declared("inputs", names(config, "inputs")), served_in)
    outputs = agreed("outputs", declared("outputs", names(config, "outputs")), served_out)
    columns, token_input = names(config, "columns"), text(config, "token_input")
    by_name = [spec.name for spec in inputs]
    if token_input and token_input not in by_name:
        raise refused("token_input", f"{token_input!r} is no input.{did_you_mean(token_input, by_name)}")
    if columns:
        _check_columns(columns, inputs)
    wanted = columns or tuple(name for name in by_name if name != token_input)
    _check_inputs(launch, wanted)
    return RowPlan(
        inputs=inputs,
        outputs=outputs,
        columns=columns,
        token_input=token_input,
        binary=choice(config, "bytes", ("utf8", "base64")) == "base64",
        plain=_plain_outputs(launch, outputs),
        batch_max=batch_max if batched else 0,
    )


def _batching(launch: ModelLaunch, found: ModelInfo) -> tuple[bool, int]:
    """Whether requests have a batch dimension, and the most rows in one."""
    if found.batch_max is not None:
        limit = min(positive(launch.config, "batch_max", launch.batch_max), found.batch_max or 1)
        return found.batch_max > 0, limit
    batched = all(spec.shape and spec.shape[0] == -1 for spec in found.inputs)
    return batched, positive(launch.config, "batch_max", launch.batch_max)


def _row_spec(spec: TensorSpec, batched: bool) -> TensorSpec:
    if spec.shape is None or not batched:
        return spec
    return TensorSpec(spec.name, spec.datatype, spec.shape[1:])


def _check_columns(columns: tuple[str, ...], inputs: tuple[TensorSpec, ...]) -> None:
    if len(inputs) != 1 or inputs[0].datatype == "BYTES":
        raise refused(
            "columns", f"fill one numeric input, and the model takes {', '.join(one.name for one in inputs)}."
        )
    shape = inputs[0].shape
    if shape is not None and shape not in ((len(columns),), (-1,)):
        raise ModelRefused(
            "metadata_mismatch",
            f"backend.config.columns: {len(columns)} columns for {inputs[0].name} of shape {list(shape)}.",
        )


def _check_inputs(launch: ModelLaunch, wanted: Sequence[str]) -> None:
    schema = msgspec.json.decode(launch.input_schema, type=_Schema)
    for name in wanted if schema.properties else ():
        if name not in schema.properties:
            guess = did_you_mean(name, schema.properties)
            raise ModelRefused("schema_mismatch", f"input_schema has no {name!r}, which the model needs.{guess}")


def _plain_outputs(launch: ModelLaunch, outputs: tuple[TensorSpec, ...]) -> frozenset[str]:
    schema = msgspec.json.decode(launch.output_schema, type=_Schema)
    by_name = {spec.name: spec for spec in outputs}
    for name in schema.required:
        if name not in by_name:
            guess = did_you_mean(name, by_name)
            raise ModelRefused("schema_mismatch", f"output_schema requires {name!r}, which is no output.{guess}")
    plain: list[str] = []
    for spec in outputs:
        kind = schema.properties.get(spec.name, {}).get("type")
        if kind is None:
            if spec.single:
                plain.append(spec.name)
        elif kind != "array":
            if not spec.single:
                raise ModelRefused(
                    "schema_mismatch", f"output_schema: {spec.name} is {kind!r}, the model answers an array of it."
                )
            plain.append(spec.name)
    return frozenset(plain)


Row = dict[str, Tensor]


def decode_row(item: EngineInput, plan: RowPlan) -> Row:
    """The tensors of one request. Raises ValueError that names the field."""
    try:
        body = msgspec.json.decode(item.inputs, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"inputs: {error}") from error
    if plan.columns:
        spec = plan.inputs[0]
        cells = [_field(body, name) for name in plan.columns]
        return {spec.name: _tensor(spec, cells, "columns", plan.binary)}
    row: Row = {}
    for spec in plan.inputs:
        if spec.name == plan.token_input:
            if not item.token_ids:
                raise ValueError("tokens: Stage 0 must tokenise the text for this model")
            row[spec.name] = _tensor(spec, item.token_ids, "tokens", plan.binary)
        else:
            row[spec.name] = _tensor(spec, _field(body, spec.name), spec.name, plan.binary)
    return row


def _field(body: Mapping[str, object], name: str) -> object:
    if name not in body:
        raise ValueError(f"inputs.{name}: is missing")
    return body[name]


def _tensor(spec: TensorSpec, value: object, field: str, binary: bool) -> Tensor:
    try:
        return row_tensor(spec, value, binary)
    except ValueError as error:
        raise ValueError(f"inputs.{field}: {error}") from error


class OipModel:
    """Implements LoadedModel. `memory_bytes` is what the declaration reserves: the server does not say."""

    def __init__(
        self,
        link: InferenceServer,
        place: Place,
        plan: RowPlan,
        timeout_ms: int,
        memory_bytes: int,
        weights_digest: str,
        clock: Clock,
        alive: Callable[[], bool],
        last_words: Callable[[], str],
    ) -> None:
        self.link = link
        self.place = place
        self.plan = plan
        self.memory_bytes = memory_bytes
        self.weights_digest = weights_digest
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._alive = alive
        self._last_words = last_words

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        """Raises ServerDied when the server is gone, Unreachable when it is there and refuses connections."""
        answers: dict[int, EngineOutput] = {}
        rows: dict[int, Row] = {}
        now_ms = self._clock.now_ms()
        for place, item in enumerate(batch):
            if item.deadline_at_ms is not None and item.deadline_at_ms <= now_ms:
                answers[place] = failed(item, "deadline_exceeded", "the deadline passed before the server was asked.")
                continue
            try:
                rows[place] = decode_row(item, self.plan)
            except ValueError as error:
                answers[place] = failed(item, "invalid_input", str(error))
        for places in chunks(rows, max(1, self.plan.batch_max)):
            self._ask(batch, places, rows, answers)
        return [answers[place] for place in range(len(batch))]

    def _ask(
        self, batch: Sequence[EngineInput], places: list[int], rows: Mapping[int, Row], answers: dict[int, EngineOutput]
    ) -> None:
        """One request; when it fails, one for each row, so that no row fails its neighbours."""
        items = [batch[place] for place in places]
        try:
            outputs = self._exchange([rows[place] for place in places], self._patience_ms(items) / 1000)
        except ServerFailure as failure:
            judged = verdict(failure, self._alive, self._last_words)
            if isinstance(judged, Unreachable):
                raise judged from failure
            if len(places) > 1 and not isinstance(judged, ServerTimeout):
                for place in places:
                    self._ask(batch, [place], rows, answers)
                return
            now_ms = self._clock.now_ms()
            for place, item in zip(places, items, strict=True):
                late = item.deadline_at_ms is not None and item.deadline_at_ms <= now_ms
                answers[place] = failed(item, "deadline_exceeded" if late else judged.code, str(judged))
            return
        for place, item, output in zip(places, items, outputs, strict=True):
            answers[place] = self._answer(item, output)

    def _patience_ms(self, items: Sequence[EngineInput]) -> int:
        """Until the last deadline of the items, at most timeout_ms."""
        deadlines = [item.deadline_at_ms for item in items if item.deadline_at_ms is not None]
        if len(deadlines) < len(items):
            return self._timeout_ms
        return max(1, min(self._timeout_ms, max(deadlines) - self._clock.now_ms()))

    def _exchange(self, rows: Sequence[Row], timeout_s: float) -> list[dict[str, Tensor]]:
        """The outputs of each row. Raises a ServerFailure."""
        batched = self.plan.batch_max > 0
        tensors = {
            spec.name: (spec, np.stack([row[spec.name] for row in rows]) if batched else rows[0][spec.name])
            for spec in self.plan.inputs
        }
        wanted = [spec.name for spec in self.plan.outputs]
        found = self.link.infer(self.place.name, self.place.version, tensors, wanted, timeout_s)
        by_output = {spec.name: answer_rows(spec, found[spec.name], len(rows), batched) for spec in self.plan.outputs}
        return [{name: by_output[name][number] for name in wanted} for number in range(len(rows))]

    def _answer(self, item: EngineInput, outputs: Mapping[str, Tensor]) -> EngineOutput:
        body: dict[str, object] = {}
        for spec in self.plan.outputs:
            if not finite(outputs[spec.name]):
                return failed(item, "output_not_finite", f"the model answered NaN or infinity in {spec.name}.")
            try:
                body[spec.name] = json_value(spec, outputs[spec.name], spec.name in self.plan.plain, self.plan.binary)
            except UnicodeDecodeError as error:
                message = f"output {spec.name} is not UTF-8 ({error.reason}); set backend.config.bytes to base64."
                return failed(item, "server_bad_answer", message)
        return EngineOutput(item.request_id, msgspec.json.encode(body))


def chunks(rows: Mapping[int, Row], most: int) -> Iterator[list[int]]:
    """Places of rows with equal shapes, in order, at most `most` together: only those can be stacked."""
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for place, row in rows.items():
        alike.setdefault(tuple(np.shape(tensor) for tensor in row.values()), []).append(place)
    for places in alike.values():
        for start in range(0, len(places), most):
            yield places[start : start + most]
