"""Requests of an engine that was killed go on in the next one from what lies outside both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_worker.backends.base import EngineDelta, EngineInput, EngineOutput, KeepsBlocks
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.decoding.kv_tier import BEGIN
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.engine_port import (
    BatchCompleted,
    EngineDied,
    EngineEvent,
    EngineKey,
    LoadFailed,
    ModelLoaded,
    TokensStreamed,
)
from sie_stream.control import ModelLaunch
from tests.decoders.families import ask, prompts, save, with_byte_tokenizer
from tests.decoders.moves import same
from tests.libraries.backends.launching import FixedClock, launch

TIER_BYTES = 4 * 1024 * 1024
ANSWER = 60


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers never end by themselves, and can have a form."""
    return with_byte_tokenizer(save(tmp_path_factory.mktemp("writer"), eos_token_id=None))


def asked(folder: Path, **config: Any) -> ModelLaunch:
    settings = {"kind": "text_generation", "kv_mb": 4, "max_num_seqs": 8, "repeatable": True, **config}
    return msgspec.structs.replace(launch(folder, "torch", settings), tokenizer=str(folder / "tokenizer.json"))


class Counting(TorchBackend):
    """Of an engine whose memory outlives it. Counts the tokens that the network runs for."""

    def __init__(self, memory: bytearray) -> None:
        super().__init__(FixedClock())
        assert isinstance(self, KeepsBlocks)
        self.keep_in(memoryview(memory))
        self.computed = 0

    def decoder(self, asked: ModelLaunch) -> DecoderModel:
        model = self.load(asked)
        assert isinstance(model, DecoderModel)
        run = model._runner.run

        def counting(chunks: Any, rows: Any) -> Any:
            self.computed += sum(chunk.count for chunk in chunks)
            return run(chunks, rows)

        model._runner.run = counting  # type: ignore[method-assign]
        return model


def requests(seed: int = 0) -> list[EngineInput]:
    form = {"type": "regex", "pattern": "[a-z ]{70,90}"}
    ways: list[dict[str, Any]] = [
        {"temperature": 0.9, "logprobs": 2},
        {},
        {"temperature": 1.1, "response_format": form},
        {"temperature": 0.8, "repetition_penalty": 1.2, "stop": ["~~~~"]},
    ]
    made = [
        ask(f"r{n}", prompt, seed=n, max_tokens=ANSWER, **way)
        for n, (prompt, way) in enumerate(zip(prompts([50, 40, 7, 33], seed), ways, strict=True))
    ]
    return [msgspec.structs.replace(item, stream=n != 1) for n, item in enumerate(made)]


def begun(model: DecoderModel, items: list[EngineInput], steps: int) -> None:
    for ticket, item in enumerate(items):
        assert model.submit(ticket, item) is None
    for _ in range(steps):
        assert not model.step(), "the case needs all of them under way"


def ended(model: DecoderModel) -> tuple[dict[int, EngineOutput], dict[int, list[EngineDelta]]]:
    done: dict[int, EngineOutput] = {}
    told: dict[int, list[EngineDelta]] = {}
    while model.busy:
        done.update(model.step())
        for ticket, delta in model.deltas():
            told.setdefault(ticket, []).append(delta)
    return done, told


def again(items: list[EngineInput]) -> list[EngineInput]:
    return [msgspec.structs.replace(item, resume=True) for item in items]


@pytest.fixture(scope="module")
def wanted(writer: Path) -> list[EngineOutput]:
    """Each alone, by an engine that never dies."""
    model = Counting(bytearray(TIER_BYTES)).decoder(asked(writer))
    return [model.run([item])[0] for item in requests()]


@pytest.mark.parametrize("steps", [3, 20, 45])
def test_they_go_on_from_their_full_blocks_with_the_same_bits(
    writer: Path, steps: int, wanted: list[EngineOutput]
) -> None:
    items = requests()
    memory = bytearray(TIER_BYTES)
    begun(Counting(memory).decoder(asked(writer)), items, steps)
    # Killed here: nothing of the first engine is asked any more.
    backend = Counting(memory)
    model = backend.decoder(asked(writer))
    begun(model, again(items), 0)
    done, told = ended(model)
    for ticket, one in enumerate(wanted):
        assert same(done[ticket], one)
    for ticket in (0, 2, 3):
        tokens = [token for delta in told[ticket] for token in delta.token_ids]
        assert tokens == done[ticket].token_ids, "whoever follows is told all of it again"
    whole = sum(len(item.token_ids or ()) + ANSWER - 1 for item in items)
    blocks = sum((len(item.token_ids or ()) + steps - 1) // 16 for item in items)
    assert backend.computed == whole - 16 * blocks


def test_without_the_word_of_the_host_a_request_begins_anew_and_its_prompt_is_copied(writer: Path) -> None:
    items = requests()[:1]
    memory = bytearray(TIER_BYTES)
    begun(Counting(memory).decoder(asked(writer)), items, 30)
    backend = Counting(memory)
    model = backend.decoder(asked(writer))
    assert model.submit(0, items[0]) is None
    done, _ = ended(model)
    assert done[0].completion_tokens == ANSWER
    assert backend.computed == 50 - 48 + ANSWER - 1


def test_what_runs_before_a_model_serves_is_computed(writer: Path) -> None:
    """A golden request says nothing about this engine if another one computed it."""
    items = requests()[:1]
    memory = bytearray(TIER_BYTES)
    begun(Counting(memory).decoder(asked(writer)), items, 30)
    backend = Counting(memory)
    backend.decoder(asked(writer)).run(items)
    assert backend.computed == 50 + ANSWER - 1


@pytest.mark.parametrize("change", [{"repeatable": False}, {"precision": "bf16"}])
def test_blocks_of_another_arithmetic_are_not_taken(writer: Path, change: dict[str, Any]) -> None:
    items = requests()
    memory = bytearray(TIER_BYTES)
    begun(Counting(memory).decoder(asked(writer)), items, 30)
    backend = Counting(memory)
    model = backend.decoder(asked(writer, **change))
    begun(model, again(items), 0)
    done, _ = ended(model)
    assert all(one.error_code is None for one in done.values())
    assert backend.computed == sum(len(item.token_ids or ()) + ANSWER - 1 for item in items)


def test_damaged_blocks_are_computed_again(writer: Path, wanted: list[EngineOutput]) -> None:
    items = requests()
    memory = bytearray(TIER_BYTES)
    begun(Counting(memory).decoder(asked(writer)), items, 30)
    for place in range(BEGIN, len(memory), 20_011):
        memory[place] ^= 1
    backend = Counting(memory)
    model = backend.decoder(asked(writer))
    begun(model, again(items), 0)
    done, _ = ended(model)
    for ticket, one in enumerate(wanted):
        assert same(done[ticket], one)


def test_a_ring_that_is_too_small_costs_only_computing(writer: Path, wanted: list[EngineOutput]) -> None:
    items = requests()
    memory = bytearray(60_000)
    begun(Counting(memory).decoder(asked(writer)), items, 40)
    model = Counting(memory).decoder(asked(writer))
    begun(model, again(items), 0)
    done, _ = ended(model)
    for ticket, one in enumerate(wanted):
        assert same(done[ticket], one)


# ------------------------------------------------------------ a real process

ENGINE = EngineKey("cpu:0", "torch")


@pytest.fixture
def engines() -> Iterator[EngineLinks]:
    made = EngineLinks(threads=1, kv_tier_bytes=TIER_BYTES, spares=["torch"])
    yield made
    made.close()


def events_until(engines: EngineLinks, kind: type[EngineEvent], count: int = 1) -> list[EngineEvent]:
    found: list[EngineEvent] = []
    for _ in range(4_000):
        found += engines.poll(100)
        assert not any(isinstance(event, LoadFailed) for event in found), found
        if sum(isinstance(event, kind) for event in found) >= count:
            return found
    raise AssertionError(f"no {kind.__name__}: {found}")


def test_an_engine_that_is_killed_and_its_requests_go_on(writer: Path, engines: EngineLinks) -> None:
    items = [
        msgspec.structs.replace(ask(f"r{n}", prompt, seed=n, max_tokens=100, temperature=0.9), stream=True)
        for n, prompt in enumerate(prompts([30, 5, 50, 41], 5))
    ]
    launched = asked(writer)
    wanted = Counting(bytearray(TIER_BYTES)).decoder(launched).run(items)
    engines.load(ENGINE, 1, launched)
    events_until(engines, ModelLoaded)
    for number, item in enumerate(items):
        engines.submit(ENGINE, number, 1, [item])
    told: dict[int, int] = {}
    while len(told) < len(items) or min(told.values()) < 20:
        for event in events_until(engines, TokensStreamed):
            assert not isinstance(event, BatchCompleted), "too late for this case"
            for delta in event.deltas if isinstance(event, TokensStreamed) else ():
                told[delta.batch_id] = told.get(delta.batch_id, 0) + len(delta.token_ids)
    os.kill(engines.pids()[ENGINE], signal.SIGKILL)
    (died,) = [event for event in events_until(engines, EngineDied) if isinstance(event, EngineDied)]
    assert died.cause == "SIGKILL"
    engines.load(ENGINE, 2, launched)
    events_until(engines, ModelLoaded)
    for number, item in enumerate(again(items)):
        engines.submit(ENGINE, 10 + number, 2, [item])
    events = events_until(engines, BatchCompleted, len(items))
    answers = {event.batch_id: event.outputs[0] for event in events if isinstance(event, BatchCompleted)}
    assert [answers[10 + number].token_ids for number in range(len(items))] == [one.token_ids for one in wanted]
    first = {}
    for event in events:
        for delta in event.deltas if isinstance(event, TokensStreamed) else ():
            first.setdefault(delta.batch_id, len(delta.token_ids))
    assert all(count >= 5 for count in first.values()), "each began where it stood, not with its first token"
    assert len(first) == len(items)
