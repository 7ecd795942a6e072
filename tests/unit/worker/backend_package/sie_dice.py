"""A backend that draws a number: by the item's seed where there is one, else by chance. Found by path in tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from gpu_worker.backends.base import EngineInput, EngineOutput, LoadedModel
from sie_stream.control import ModelLaunch
from sie_stream.ports import Clock


class DiceModel:
    memory_bytes = 1
    weights_digest = "sha256:dice"

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        return [self._one(item) for item in batch]

    def _one(self, item: EngineInput) -> EngineOutput:
        asked = msgspec.json.decode(item.parameters or b"{}")
        source = random.Random(item.seed) if item.seed is not None else random.SystemRandom()
        number = source.random() if asked.get("temperature") else 0.5
        return EngineOutput(item.request_id, msgspec.json.encode({"number": number}))


class DiceBackend:
    name = "dice"

    def __init__(self, clock: Clock) -> None:
        pass

    def load(self, launch: ModelLaunch) -> LoadedModel:
        return DiceModel()

    def unload(self, model: LoadedModel) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {"dice": "1"}
