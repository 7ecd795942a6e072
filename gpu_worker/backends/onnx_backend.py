"""ONNX models through ONNX Runtime on the CPU: tabular scorers, sentence embedders, and the file-type classifier.

`launch.config.kind` says which adapter feeds the network: `classifier` and `regressor` as in `tabular`, `embedding` as
in `embedding`, `file_type` as in `filetype`. Other keys: `threads` (intra-op, default 1, so that many models share a
machine without fighting over its cores), and for embedders `pad_token_id` and `max_tokens` (longest text, default 256;
less where the network has fewer positions).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, InvalidProtobuf
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplementedByRuntime

from gpu_worker.backends import filetype
from gpu_worker.backends.base import EngineInput, EngineOutput, LoadedModel, ModelRefused
from gpu_worker.backends.embedding import EmbeddingModel, Forward, Hidden, StepRefused, Tokens, TokensRefused
from gpu_worker.backends.tabular import Kind, Matrix, Predict, TabularModel, tabular_config, whole_blocks
from gpu_worker.backends.weights import local_source, only_file, verified_digest, whole_number
from sie_stream.backend_facts import KINDS_OF_BACKEND
from sie_stream.control import ModelLaunch
from sie_stream.errors import did_you_mean
from sie_stream.ports import Clock

ADAPTERS = KINDS_OF_BACKEND["onnx"]
UNREADABLE = (Fail, InvalidGraph, InvalidProtobuf, NotImplementedByRuntime)


class OnnxBackend:
    """Serves ONNX files. The clock is not needed."""

    name = "onnx"

    def __init__(self, clock: Clock) -> None:
        onnxruntime.disable_telemetry_events()

    def load(self, launch: ModelLaunch) -> LoadedModel:
        source = local_source(launch.source)
        digest = verified_digest(source, launch.weights_digest)
        kind = launch.config.get("kind")
        if kind not in ADAPTERS:
            guess = did_you_mean(str(kind), ADAPTERS)
            allowed = ", ".join(ADAPTERS)
            raise ModelRefused("invalid_model_config", f"backend.config.kind: {kind!r} is not one of {allowed}.{guess}")
        file = only_file(source, ".onnx")
        size = file.stat().st_size
        session = open_session(file, whole_number(launch.config, "threads", 1))
        if kind == "embedding":
            tokens_max = whole_number(launch.config, "max_tokens", 256) or 256
            return EmbeddingModel(
                hidden_states(session), tokens_max, whole_number(launch.config, "pad_token_id", 0), size, digest
            )
        if kind == "file_type":
            return FileTypeModel(session, file_type_config(file.parent / "config.json"), size, digest)
        config = tabular_config(launch.config)
        return TabularModel(config, tabular_predictor(session, config.kind), size, digest)

    def unload(self, model: LoadedModel) -> None:
        """The session frees its memory with the last reference to it."""

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__, "onnxruntime": onnxruntime.__version__}


def open_session(file: Path, threads: int) -> onnxruntime.InferenceSession:
    """One session on the CPU. Raises ModelRefused when the file is no ONNX graph that this runtime can run."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Memory goes back after each run: a hundred idle models must not each keep the arena of their largest batch.
    options.enable_cpu_mem_arena = False
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except UNREADABLE as error:
        raise ModelRefused("weights_unreadable", f"ONNX Runtime cannot open {file}: {error}") from error


def tabular_predictor(session: onnxruntime.InferenceSession, kind: Kind) -> Predict:
    """float64 rows -> float64 scores through a float32 graph. A classifier answers its (rows, classes) output."""
    rows_in = session.get_inputs()[0].name
    outputs = session.get_outputs()
    if kind == "classifier":
        outputs = [output for output in outputs if output.type == "tensor(float)"]
    if kind == "anomaly" or len(outputs) != 1:
        found = ", ".join(f"{output.name}: {output.type}" for output in session.get_outputs())
        raise ModelRefused("invalid_model_config", f"backend.config.kind: {kind} does not fit the outputs ({found}).")
    wanted = [outputs[0].name]

    def predict(matrix: Matrix) -> Matrix:
        scores = session.run(wanted, {rows_in: matrix.astype(np.float32)})[0]
        return np.asarray(scores, np.float64).reshape(len(matrix), -1)

    return predict


def hidden_states(session: onnxruntime.InferenceSession) -> Forward:
    """The encoder as a function. Raises TokensRefused: a session does not tell how large its tables are."""
    inputs = {given.name for given in session.get_inputs()}

    def forward(ids: Tokens, mask: Tokens) -> Hidden:
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        try:
            return np.asarray(session.run(None, {name: feed[name] for name in feed if name in inputs})[0])
        except InvalidArgument as error:  # how a Gather says that an index lies outside its table
            raise TokensRefused(str(error)) from error
        except Fail as error:  # how an Add says that there are fewer positions than tokens
            raise StepRefused(str(error)) from error

    return forward


def file_type_config(file: Path) -> filetype.FileTypeConfig:
    try:
        return msgspec.json.decode(file.read_bytes(), type=filetype.FileTypeConfig)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise ModelRefused("invalid_model_config", f"{file}: {error}") from error


class FileTypeModel:
    """Magika's network between our feature extraction and its thresholds. Implements LoadedModel."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        config: filetype.FileTypeConfig,
        memory_bytes: int,
        weights_digest: str,
    ) -> None:
        self._session = session
        self._config = config
        self._rows_in = session.get_inputs()[0].name
        self._wanted = [session.get_outputs()[0].name]
        self.memory_bytes = memory_bytes
        self.weights_digest = weights_digest

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        answers: dict[int, EngineOutput] = {}
        rows, places = [], []
        for place, item in enumerate(batch):
            content = filetype.content_of(item)
            if isinstance(content, EngineOutput):
                answers[place] = content
                continue
            row = filetype.features(self._config, content)
            if row is None:
                answers[place] = EngineOutput(item.request_id, filetype.short_answer(self._config, content))
            else:
                rows.append(row)
                places.append(place)
        if rows:
            scores = np.asarray(self._session.run(self._wanted, {self._rows_in: whole_blocks(np.stack(rows))})[0])
            for place, probabilities in zip(places, scores[: len(rows)].tolist(), strict=True):
                outputs = filetype.answer(self._config, probabilities)
                answers[place] = EngineOutput(batch[place].request_id, outputs)
        return [answers[place] for place in range(len(batch))]
