"""A backend of a third party: classifies texts by the words in them. `pip install .` beside workers, then declare

    backend: {name: rules, config: {default_label: other}}
    source: models/topics  # a folder with config.json: {"sports": ["goal", "match"], "money": ["bank"]}

One answer for each input, in order. A wrong input is an answer with an error code; an exception is the engine's fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpu_worker.backends.base import EngineInput, EngineOutput, ModelRefused, failed
from gpu_worker.backends.weights import verified_digest
from sie_stream.control import ModelLaunch
from sie_stream.ports import Clock


class RulesModel:
    def __init__(self, rules: dict[str, list[str]], default: str, weights_digest: str, memory_bytes: int) -> None:
        self._labels = {word: label for label, words in rules.items() for word in words}
        self._default = default
        self.weights_digest = weights_digest  # goes into every result
        self.memory_bytes = memory_bytes  # measured, not declared

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        return [self._one(item) for item in batch]

    def _one(self, item: EngineInput) -> EngineOutput:
        try:
            words = msgspec.json.decode(item.inputs, type=dict[str, str])["text"].lower().split()
        except (msgspec.DecodeError, KeyError) as error:
            return failed(item, "invalid_input", f"inputs: {error}")
        label = next((self._labels[word] for word in words if word in self._labels), self._default)
        return EngineOutput(item.request_id, msgspec.json.encode({"label": label}))


class RulesBackend:
    name = "rules"

    def __init__(self, clock: Clock) -> None:
        """Once in each engine process. The clock is for backends that keep deadlines."""

    def load(self, launch: ModelLaunch) -> RulesModel:
        digest = verified_digest(Path(launch.source), launch.weights_digest)  # refuses other weights than declared
        file = Path(launch.source, "config.json")
        try:
            rules = msgspec.json.decode(file.read_bytes(), type=dict[str, list[str]])
        except (OSError, msgspec.DecodeError) as error:
            raise ModelRefused("weights_unreadable", f"{file}: {error}") from error
        return RulesModel(rules, str(launch.config.get("default_label", "other")), digest, file.stat().st_size)

    def unload(self, model: object) -> None:
        """Nothing beyond the reference the caller drops."""

    def versions(self) -> dict[str, str]:
        return {"sie-rules": "1.0"}
