"""A continuous backend that says as many words as its inputs ask for, one per step. Found by path in tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpu_worker.backends.base import EngineDelta, EngineInput, EngineOutput, LoadedModel, failed
from sie_stream.control import ModelLaunch
from sie_stream.ports import Clock

STEP_S = 0.02


class Asked(msgspec.Struct):
    words: int
    pause_at: int = 0
    """So many words are said before `file` exists, and the others after that."""
    file: str = ""


@dataclass(slots=True)
class Talk:
    item: EngineInput
    asked: Asked
    said: int = 0
    told: int = 0

    @property
    def ended(self) -> bool:
        return self.said >= self.asked.words

    @property
    def pauses(self) -> bool:
        return bool(self.asked.file) and self.said >= self.asked.pause_at and not os.path.exists(self.asked.file)

    def text(self, start: int = 0) -> str:
        return "".join(f"word{number} " for number in range(start, self.said))


class TalkerModel:
    memory_bytes = 1
    weights_digest = "sha256:talker"
    sequences_max = 8

    def __init__(self) -> None:
        self._talks: dict[int, Talk] = {}
        self._ended: dict[int, Talk] = {}

    @property
    def busy(self) -> bool:
        return bool(self._talks)

    def submit(self, ticket: int, item: EngineInput) -> EngineOutput | None:
        self._talks[ticket] = Talk(item, msgspec.json.decode(item.inputs, type=Asked))
        return None

    def step(self) -> list[tuple[int, EngineOutput]]:
        threading.Event().wait(STEP_S)
        for talk in self._talks.values():
            talk.said += not talk.pauses
        self._ended = {ticket: talk for ticket, talk in self._talks.items() if talk.ended}
        for ticket in self._ended:
            del self._talks[ticket]
        return [
            (ticket, EngineOutput(talk.item.request_id, msgspec.json.encode({"text": talk.text()})))
            for ticket, talk in self._ended.items()
        ]

    def deltas(self) -> list[tuple[int, EngineDelta]]:
        told: list[tuple[int, EngineDelta]] = []
        for ticket, talk in [*self._talks.items(), *self._ended.items()]:
            if talk.item.stream and talk.told < talk.said:
                told.append((ticket, EngineDelta(list(range(talk.told, talk.said)), talk.text(talk.told))))
                talk.told = talk.said
        self._ended = {}
        return told

    def cancel(self, ticket: int) -> EngineOutput | None:
        talk = self._talks.pop(ticket, None)
        return None if talk is None else failed(talk.item, "cancelled", "asked to cancel")

    def reset(self) -> list[int]:
        tickets = list(self._talks)
        self._talks.clear()
        return tickets

    def run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        raise AssertionError("this model is stepped")


class TalkerBackend:
    name = "talker"

    def __init__(self, clock: Clock) -> None:
        pass

    def load(self, launch: ModelLaunch) -> LoadedModel:
        return TalkerModel()

    def unload(self, model: LoadedModel) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {"talker": "1"}
