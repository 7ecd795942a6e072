"""Magika's file-type classifier around its ONNX network: bytes -> features, probabilities -> an answer.

Features are the first and the last `block_size` bytes, stripped of white space at the outer end, cut to `beg_size`
and `end_size` bytes and padded with `padding_token` (version 2 of the published extraction). Contents too short for
the network, and answers below the label's threshold, fall back to `txt` or `unknown`. A golden file holds answers of
the original package, and the tests compare ours with it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu_worker.backends.base import EngineInput, EngineOutput, failed

NO_PREDICTION = "undefined"
"""`raw_label` of contents that the network never saw."""


class FileTypeConfig(msgspec.Struct, frozen=True):
    """config.json beside the weights. Unknown keys are ignored."""

    labels: tuple[str, ...]
    text_labels: frozenset[str]
    thresholds: dict[str, float]
    overwrite_map: dict[str, str]
    medium_confidence_threshold: float
    beg_size: int
    end_size: int
    block_size: int
    min_file_size_for_dl: int
    padding_token: int


class FileTypeInputs(msgspec.Struct, frozen=True):
    """The `inputs` object: exactly one of the two."""

    content_base64: str | None = None
    text: str | None = None


class FileTypeAnswer(msgspec.Struct, frozen=True):
    """The `outputs` object. `raw_label` is the network's own choice, before thresholds."""

    label: str
    score: float
    raw_label: str


_inputs = msgspec.json.Decoder(FileTypeInputs)
_encode = msgspec.json.Encoder().encode


def content_of(item: EngineInput) -> bytes | EngineOutput:
    """The bytes to classify, or the failed answer."""
    try:
        inputs = _inputs.decode(item.inputs)
        match inputs.content_base64, inputs.text:
            case str(encoded), None:
                return base64.b64decode(encoded, validate=True)
            case None, str(text):
                return text.encode()
            case _:
                return failed(item, "invalid_input", "inputs: give exactly one of content_base64 and text.")
    except (msgspec.DecodeError, UnicodeError) as error:
        return failed(item, "invalid_input", f"inputs: {error}")
    except binascii.Error as error:
        return failed(item, "invalid_input", f"inputs.content_base64: {error}")


def features(config: FileTypeConfig, content: bytes) -> NDArray[np.int32] | None:
    """(beg_size + end_size,) int32 for the network, or None when there is too little to look at."""
    if len(content) < config.min_file_size_for_dl:
        return None
    head = content[: config.block_size].lstrip()[: config.beg_size]
    tail = content[-config.block_size :].rstrip()[-config.end_size :]
    if len(head) < config.min_file_size_for_dl:
        return None
    row = np.full(config.beg_size + config.end_size, config.padding_token, np.int32)
    row[: len(head)] = np.frombuffer(head, np.uint8)
    if tail:
        row[-len(tail) :] = np.frombuffer(tail, np.uint8)
    return row


def short_answer(config: FileTypeConfig, content: bytes) -> bytes:
    """The answer for contents without features: empty, text if it decodes as UTF-8, else unknown."""
    if not content:
        return _encode(FileTypeAnswer("empty", 1.0, NO_PREDICTION))
    try:
        content[: config.block_size].decode()
    except UnicodeDecodeError:
        return _encode(FileTypeAnswer("unknown", 1.0, NO_PREDICTION))
    return _encode(FileTypeAnswer("txt", 1.0, NO_PREDICTION))


def answer(config: FileTypeConfig, probabilities: Sequence[float]) -> bytes:
    """The answer for one row of the network's output; a low score keeps only "text" or "unknown"."""
    winner = max(range(len(probabilities)), key=probabilities.__getitem__)
    raw_label, score = config.labels[winner], probabilities[winner]
    label = config.overwrite_map.get(raw_label, raw_label)
    if score < config.thresholds.get(raw_label, config.medium_confidence_threshold):
        label = "txt" if label in config.text_labels else "unknown"
    return _encode(FileTypeAnswer(label, score, raw_label))
