"""`backend.config.kind`: what a model of a built-in backend is fed with and answers."""

from __future__ import annotations

from typing import Literal, get_args

TabularKind = Literal["classifier", "regressor", "anomaly"]
TABULAR_KINDS: tuple[TabularKind, ...] = get_args(TabularKind)
KINDS_OF_BACKEND: dict[str, tuple[str, ...]] = {
    "sklearn": TABULAR_KINDS,
    "onnx": (*TABULAR_KINDS, "embedding", "file_type"),
    "torch": ("text_generation", "embedding"),
}
"""Backends that are not here decide themselves what the key means."""
