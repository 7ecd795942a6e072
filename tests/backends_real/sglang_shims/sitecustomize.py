"""Loaded by Python at its start: lets PyPI's torchvision (a CUDA build) be imported beside a CPU build of torch.

At import torchvision describes operators of its compiled part, which does not load here. Their schemas are defined the
moment torchvision is imported, so that torch starts no earlier than it would.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
kept: list[Any] = []
"""The library lives as long as this object."""


class BeforeTorchvision(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            library = importlib.import_module("torch").library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                library.define(schema)
            kept.append(library)
        return None


sys.meta_path.insert(0, BeforeTorchvision())
