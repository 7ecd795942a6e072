"""Requests that leave one engine's loop over its socket and go on in another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest

from gpu_worker.backends.base import EngineInput, LoadedModel
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.engine_messages import (
    Adopted,
    Answers,
    Deltas,
    Export,
    Exported,
    FromEngine,
    Load,
    Loaded,
    Raised,
    Run,
    Started,
    Unload,
)
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from tests.decoders.families import ask, load, prompts, save, with_tokenizer
from tests.decoders.moves import same
from tests.decoders.test_decoder_in_engine import SLOT, Engine, run
from tests.libraries.backends.launching import launch

LONG = 150
PLENTY = 1 << 30
SLOW_STEP_S = 0.1


class CountingBackend(TorchBackend):
    """Counts the tokens that its networks compute, and computes as slowly as it is asked to."""

    computed = 0
    pause_s = 0.0

    def load(self, launch: ModelLaunch) -> LoadedModel:
        model = super().load(launch)
        assert isinstance(model, DecoderModel)
        compute = model._runner.run

        def counting(chunks: Any, rows: Any) -> Any:
            self.computed += sum(chunk.count for chunk in chunks)
            Event().wait(self.pause_s)
            return compute(chunks, rows)

        model._runner.run = counting  # type: ignore[method-assign]
        return model


def loaded(engine: Engine, folder: Path, **config: Any) -> None:
    settings = {"kind": "text_generation", "kv_mb": 4, "max_num_seqs": 4, "repeatable": True, **config}
    asked = msgspec.structs.replace(launch(folder, "torch", settings), tokenizer=str(folder / "tokenizer.json"))
    engine.tell(Load(SLOT, msgspec.json.encode(asked)))
    answer = engine.hear()
    assert isinstance(answer, Loaded), answer
    assert answer.movable


class Pair:
    def __init__(self) -> None:
        self.backends = [CountingBackend(SystemClock()) for _ in range(2)]
        self.engines = [Engine(backend) for backend in self.backends]
        for engine in self.engines:
            assert isinstance(engine.hear(), Started)

    def load(self, folder: Path, **config: Any) -> None:
        for engine in self.engines:
            loaded(engine, folder, **config)

    def slow_source(self, pause_s: float = SLOW_STEP_S) -> None:
        """So slow that nothing ends while messages are on their way, however long the test's own thread has to wait."""
        self.backends[0].pause_s = pause_s

    @property
    def computed(self) -> int:
        return sum(backend.computed for backend in self.backends)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for engine in made.engines:
        engine.close()


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save(tmp_path_factory.mktemp("talkative"), eos_token_id=None))


def streaming(request_id: str = "a", **changes: Any) -> EngineInput:
    item = ask(request_id, prompts([10])[0], seed=3, max_tokens=LONG, temperature=0.9, logprobs=2)
    return msgspec.structs.replace(item, stream=True, **changes)


def until(engine: Engine, kind: type[FromEngine]) -> tuple[FromEngine, list[int]]:
    """The first message of that kind, and the tokens told before it. What comes of others meanwhile is heard later."""
    told: list[int] = []
    others: list[FromEngine] = []
    while not isinstance(message := engine.hear(), kind):
        if isinstance(message, Deltas):
            told += [token for delta in message.deltas for token in delta.token_ids]
        else:
            others.append(message)
    engine.heard_early[:0] = others
    return message, told


def exported(pair: Pair, item: EngineInput, bytes_max: int = PLENTY) -> tuple[bytes | None, list[int]]:
    """The image of a request that has some tokens, and those told of it."""
    source = pair.engines[0]
    pair.slow_source()
    source.tell(run(1, item))
    early = [until(source, Deltas)[0] for _ in range(2)]
    source.tell(Export([1], bytes_max))
    found, late = until(source, Exported)
    pair.slow_source(0)
    assert isinstance(found, Exported)
    assert found.batch_id == 1
    told = [delta for one in early if isinstance(one, Deltas) for delta in one.deltas]
    return found.image, [*(token for delta in told for token in delta.token_ids), *late]


def test_an_answer_goes_on_bit_for_bit_and_no_token_is_computed_again(pair: Pair, talkative: Path) -> None:
    pair.load(talkative)
    wanted = load(talkative, repeatable=True).run([streaming()])[0]
    image, told = exported(pair, streaming())
    assert image is not None
    target = pair.engines[1]
    before = pair.backends[0].computed
    assert 10 < before < 10 + LONG - 1, "it was in the middle of its answer"
    target.tell(Run(7, SLOT, [streaming()], image))
    adopted, early = until(target, Adopted)
    assert adopted == Adopted(7)
    # The source may have let go between a token and its telling: those are told first, and no new one before Adopted.
    assert len(told + early) <= before - 10 + 1
    answers, more = until(target, Answers)
    assert isinstance(answers, Answers)
    assert same(answers.outputs[0], wanted)
    assert told + early + more == wanted.token_ids
    assert told
    assert more
    assert pair.backends[0].computed == before, "the source let go of it"
    assert pair.computed == 10 + LONG - 1


def test_a_prompt_goes_on_in_its_middle(pair: Pair, talkative: Path) -> None:
    pair.load(talkative, step_tokens=4, max_num_seqs=2)
    item = ask("a", prompts([60])[0], max_tokens=5)
    wanted = load(talkative, repeatable=True).run([item])[0]
    source, target = pair.engines
    pair.slow_source()
    source.tell(run(1, item), Export([1], PLENTY))
    moved = source.hear()
    assert isinstance(moved, Exported)
    assert moved.image is not None
    target.tell(Run(2, SLOT, [item], moved.image))
    assert target.hear() == Adopted(2)
    answers = target.hear()
    assert isinstance(answers, Answers)
    assert same(answers.outputs[0], wanted)
    assert pair.computed == 60 + 5 - 1


@pytest.mark.parametrize("case", ["damaged", "another request", "asked otherwise", "other weights"])
def test_an_image_that_is_refused_costs_the_computing_and_nothing_else(
    pair: Pair, talkative: Path, tmp_path: Path, case: str
) -> None:
    pair.load(talkative)
    image, _ = exported(pair, streaming())
    assert image is not None
    item, folder, target = streaming(), talkative, pair.engines[1]
    if case == "damaged":
        image = image[:-1] + bytes([image[-1] ^ 1])
    elif case == "another request":
        item = streaming("b")
    elif case == "asked otherwise":
        item = streaming(parameters=b'{"max_tokens":9}')
    else:
        folder = with_tokenizer(save(tmp_path, eos_token_id=None, initializer_range=0.3))
        target.tell(Unload(SLOT))
        loaded(target, folder)
    neighbour = ask("n", [5, 6], max_tokens=40)
    target.tell(run(8, neighbour), Run(9, SLOT, [item], image))
    refused, _ = until(target, Adopted)
    assert isinstance(refused, Adopted)
    assert refused.refused.startswith("image_damaged" if case == "damaged" else "image_foreign")
    answers = {}
    for _ in range(2):
        one, _ = until(target, Answers)
        assert isinstance(one, Answers)
        answers[one.batch_id] = one.outputs[0]
    for batch_id, asked in ((8, neighbour), (9, item)):
        assert same(answers[batch_id], load(folder, repeatable=True).run([asked])[0])


def test_what_is_larger_than_it_may_be_runs_to_its_end(pair: Pair, talkative: Path) -> None:
    pair.load(talkative)
    image, _ = exported(pair, streaming(), bytes_max=100)
    assert image is None
    answers, _ = until(pair.engines[0], Answers)
    assert isinstance(answers, Answers)
    assert answers.outputs[0].completion_tokens == LONG


def test_of_several_those_go_that_fit_and_the_rest_stays(pair: Pair, talkative: Path) -> None:
    pair.load(talkative)
    source = pair.engines[0]
    items = [msgspec.structs.replace(ask(f"r{n}", [5 + n], max_tokens=LONG), stream=True) for n in range(2)]
    pair.slow_source()
    source.tell(run(1, items[0]), run(2, items[1]), run(3, *(ask(f"s{n}", [7], max_tokens=LONG) for n in range(2))))
    until(source, Deltas)
    # 99 was never there. 3 are two requests in one batch: the host makes none such of a movable model.
    source.tell(Export([99, 3, 1, 2], PLENTY))
    kept: dict[int, bool] = {}
    for _ in range(4):
        one, _ = until(source, Exported)
        assert isinstance(one, Exported)
        kept[one.batch_id] = one.image is None
    assert kept == {99: True, 3: True, 1: False, 2: False}
    pair.slow_source(0)
    answers, _ = until(source, Answers)
    assert isinstance(answers, Answers)
    assert answers.batch_id == 3


def test_a_model_that_is_to_go_goes_when_its_last_request_was_moved(pair: Pair, talkative: Path) -> None:
    pair.load(talkative)
    source = pair.engines[0]
    pair.slow_source()
    source.tell(run(1, streaming()), Unload(SLOT), Export([1], PLENTY))
    found, _ = until(source, Exported)
    assert isinstance(found, Exported)
    assert found.image is not None
    source.tell(run(2, streaming()))
    gone = source.hear()
    assert isinstance(gone, Raised)
    assert "holds no model" in gone.message
