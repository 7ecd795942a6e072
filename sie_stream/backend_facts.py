"""What built-in backends serve, as declarations and backends both need to know it.

`backend.config.kind` says what a model is fed with and answers; `preferred_precision`, what its weights are loaded in.
"""

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

WHOLE_PRECISIONS = ("fp32", "bf16", "fp16")
"""Weights as they are, in the type that the arithmetic has."""
PRECISIONS_OF_KIND: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"text_generation": (*WHOLE_PRECISIONS, "int8", "int4"), "embedding": WHOLE_PRECISIONS},
}
"""{backend: {kind: precisions it loads}}. Other backends run their weights as they are stored, or as their own options
say."""
