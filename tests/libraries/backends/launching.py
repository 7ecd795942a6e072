"""Launches and inputs for backend tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu_worker.backends.base import EngineInput
from sie_stream.control import ModelLaunch

FEATURES = ("width", "height", "weight")


class FixedClock:
    """Implements ports.Clock: stands at `now` and steps by `step_ms` each time it is read."""

    def __init__(self, now: int = 1_000_000, step_ms: int = 0) -> None:
        self.now = now
        self.step_ms = step_ms

    def now_ms(self) -> int:
        self.now += self.step_ms
        return self.now

    def monotonic_ms(self) -> float:
        return float(self.now)


def launch(source: Path, backend: str, config: dict[str, Any], digest: str = "") -> ModelLaunch:
    return ModelLaunch(
        model="m",
        version="1",
        instance="mi-1",
        backend=backend,
        source=str(source),
        weights_digest=digest,
        config=config,
        service_type="classification",
        priority=1,
        memory_bytes=0,
        batch_max=64,
    )


def row(request_id: str, inputs: object, **more: Any) -> EngineInput:
    raw = inputs if isinstance(inputs, bytes) else json.dumps(inputs).encode()
    return EngineInput(request_id, raw, **more)


def classifier_config(labels: tuple[str, ...] = ("no", "yes"), **more: Any) -> dict[str, Any]:
    return {"kind": "classifier", "features": list(FEATURES), "labels": list(labels), **more}
