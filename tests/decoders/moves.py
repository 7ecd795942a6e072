"""Requests that run in several engines by turns."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from gpu_worker.backends.base import EngineDelta, EngineInput, EngineOutput
from gpu_worker.backends.decoder.model import DecoderModel

Told = dict[str, tuple[list[int], str]]


def _note(told: Told, name: str, delta: EngineDelta) -> None:
    tokens, text = told.get(name, ([], ""))
    told[name] = (tokens + delta.token_ids, text + delta.text)


Move = Callable[[dict[int, EngineOutput]], None]


def finish(models: list[DecoderModel], items: list[EngineInput], move: Move) -> tuple[list[EngineOutput], Told]:
    """All items begin in the first engine; `move` is called between steps, with what has ended."""
    for ticket, item in enumerate(items):
        assert models[0].submit(ticket, item) is None
    done: dict[int, EngineOutput] = {}
    told: Told = {}
    while len(done) < len(items):
        for model in models:
            done.update(model.step())
            for ticket, delta in model.deltas():
                _note(told, items[ticket].request_id, delta)
        move(done)
    assert not any(model.busy for model in models)
    return [done[ticket] for ticket in range(len(items))], told


def same(one: EngineOutput, other: EngineOutput) -> bool:
    """All but how long it took."""
    times = {"first_token_ms": None}
    return msgspec.structs.replace(one, **times) == msgspec.structs.replace(other, **times)


class RandomMoves:
    """Moves a request with a chance of `often` between any two steps, to any of the engines."""

    def __init__(self, models: list[DecoderModel], count: int, seed: int, often: float) -> None:
        self._models = models
        self._chance = random.Random(seed)
        self._often = often
        self._home = dict.fromkeys(range(count), 0)
        self.moved = 0

    def __call__(self, done: dict[int, EngineOutput]) -> None:
        for ticket, home in self._home.items():
            if ticket in done or self._chance.random() > self._often:
                continue
            told = self._models[home].image_bytes(ticket)
            image = self._models[home].release(ticket)
            assert image is not None
            assert len(image) == told, "what is kept room for is what comes"
            assert self._models[home].release(ticket) is None, "it is gone"
            self._home[ticket] = self._chance.randrange(len(self._models))
            self._models[self._home[ticket]].adopt(ticket, image)
            self.moved += 1
