"""The base of an adapter by the name of a declared model: `backend.config.base: model:NAME` or `model:NAME@VERSION`."""

from __future__ import annotations

from sie_stream.spec.model import ModelSpec

MODEL_BASE = "model:"


def named_base(spec: ModelSpec) -> tuple[str, str] | None:
    """Name and version (empty: the one in force) of the model that is the base; None: it is no model by name.

    Backends of served models have names of their own for bases.
    """
    base = spec.backend.config.get("base")
    if spec.backend.name != "torch" or not isinstance(base, str) or not base.startswith(MODEL_BASE):
        return None
    name, _, version = base.removeprefix(MODEL_BASE).partition("@")
    return name, version
