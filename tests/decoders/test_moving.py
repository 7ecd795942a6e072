"""Requests that go on in another engine, on networks of a few thousand weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.backends.base import EngineInput, MovableModel
from gpu_worker.backends.decoder.frozen import FrozenSequence
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.decoding.image import ImageRefused, packed, unpacked
from tests.decoders.families import VOCABULARY, ask, load, prompts, save, with_byte_tokenizer, with_tokenizer
from tests.decoders.moves import RandomMoves, finish, same
from tests.libraries.backends.launching import FixedClock, launch

REGEX = {"type": "regex", "pattern": "[a-z]{2,9} [0-9]{3,9}"}


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never stops by itself."""
    return with_tokenizer(save(tmp_path_factory.mktemp("talkative"), eos_token_id=None))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers can have a form."""
    return with_byte_tokenizer(save(tmp_path_factory.mktemp("writer"), eos_token_id=VOCABULARY - 1))


@functools.cache
def engine(folder: Path, name: str) -> DecoderModel:
    """One that tests share; each leaves it without requests. It keeps prefixes."""
    return load(folder, step_tokens=16, max_num_seqs=8, repeatable=True)


def requests(seed: int) -> list[EngineInput]:
    """Every way to ask, with prompts that come in several chunks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (9,), generator=generator).tolist()
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.5, "top_k": 12, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 1.0, "response_format": REGEX},
        {"response_format": REGEX, "logprobs": 1},
        {"temperature": 1.2, "stop": ["zz", "q"], "min_tokens": 3},
        {"score": True},
        {"min_p": 0.1, "temperature": 0.7},
        {"logprobs": 0},
    ]
    found: list[EngineInput] = []
    for number, (way, prompt) in enumerate(zip(ways, prompts(lengths, seed), strict=True)):
        item = ask(f"r{number}", prompt, seed=seed, max_tokens=14, **way)
        found.append(msgspec.structs.replace(item, stream=number % 3 == 1))
    return found


def test_it_is_movable(writer: Path) -> None:
    assert isinstance(engine(writer, "a"), MovableModel)


@given(seed=st.integers(0, 10_000), often=st.sampled_from([0.1, 0.5, 1.0]))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_have_the_same_bits_however_often_they_were_moved(writer: Path, seed: int, often: float) -> None:
    items = requests(seed)
    wanted, wanted_told = finish([load(writer, repeatable=True)], items, lambda done: None)
    models = [engine(writer, "a"), engine(writer, "b"), engine(writer, "c")]
    moves = RandomMoves(models, len(items), seed, often)
    answers, told = finish(models, items, moves)
    assert moves.moved > 5
    for answer, one in zip(answers, wanted, strict=True):
        assert same(answer, one)
    # In what pieces an answer is told is a matter of time; together they are the answer.
    assert told == wanted_told
    assert all(model._scheduler._pool.free == model._scheduler._pool.count for model in models)


def test_no_token_is_computed_again(talkative: Path) -> None:
    (prompt,) = prompts([41])
    models = [load(talkative, step_tokens=10, max_num_seqs=2) for _ in range(2)]
    computed = 0
    for model in models:
        run = model._runner.run

        def counting(chunks: Any, rows: Any, run: Any = run) -> Any:
            nonlocal computed
            computed += sum(chunk.count for chunk in chunks)
            return run(chunks, rows)

        model._runner.run = counting  # type: ignore[method-assign]
    at = 0
    models[0].submit(7, ask("a", prompt, max_tokens=30))
    ended: list[Any] = []
    while not ended:
        ended = models[at].step()
        if not ended:
            image = models[at].release(7)
            assert image is not None
            at = 1 - at
            models[at].adopt(7, image)
    assert computed == 41 + 30 - 1
    assert ended[0][1].token_ids == load(talkative).run([ask("a", prompt, max_tokens=30)])[0].token_ids


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_goes_on_in_the_middle_of_its_text(talkative: Path, pooling: str) -> None:
    config: dict[str, Any] = {"head": "embedding", "pooling": pooling, "repeatable": True, "max_num_seqs": 2}
    item = ask("e", prompts([70])[0])
    wanted = load(talkative, **config).run([item])[0].outputs
    source, target = (load(talkative, step_tokens=20, **config) for _ in range(2))
    source.submit(1, item)
    source.step()
    image = source.release(1)
    assert image is not None
    target.adopt(1, image)
    ended: list[Any] = []
    while not ended:
        ended = target.step()
    assert ended[0][1].outputs == wanted


def released(folder: Path, item: EngineInput, steps: int = 3, **config: Any) -> bytes:
    model = load(folder, **config)
    assert model.submit(1, item) is None
    for _ in range(steps):
        model.step()
    image = model.release(1)
    assert image is not None
    return image


def refused(model: DecoderModel, image: bytes) -> ImageRefused:
    free = model._scheduler._pool.free
    with pytest.raises(ImageRefused) as found:
        model.adopt(1, image)
    assert not model.busy
    assert model._scheduler._pool.free == free
    return found.value


def test_an_engine_that_would_compute_otherwise_refuses_and_says_why(talkative: Path, tmp_path: Path) -> None:
    item = ask("a", prompts([30])[0], max_tokens=20)
    image = released(talkative, item)
    other = with_tokenizer(save(tmp_path / "other", eos_token_id=None, initializer_range=0.3))
    cases = {
        "trunk precision": load(talkative, repeatable=True),
        "trunk precision of the image: 'float32, dense, fast', of this engine: 'bfloat16": load(
            talkative, precision="bf16"
        ),
        "trunk weights": load(other),
        "head of the image: 'lm', of this engine: 'embedding mean'": load(talkative, head="embedding"),
        "allows 40": load(talkative, context_tokens=40),
    }
    for why, model in cases.items():
        assert why in refused(model, image).message
    assert refused(cases["allows 40"], image).code == "image_unfit"
    assert refused(cases["trunk weights"], image).code == "image_foreign"


def test_a_request_that_needs_text_is_refused_without_a_tokenizer(talkative: Path) -> None:
    bare = TorchBackend(FixedClock()).load(launch(talkative, "torch", {"kind": "text_generation", "kv_mb": 4}))
    assert isinstance(bare, DecoderModel)
    item = msgspec.structs.replace(ask("a", [5, 6, 7], max_tokens=9), stream=True)
    told = refused(bare, released(talkative, item))
    assert told.code == "image_unfit"
    assert "tokenizer" in told.message


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("of 22 tokens are computed", {"computed": 22}),
    ("of 22 tokens are computed", {"computed": -1}),
    ("pages", {"computed": 3}),
    ("it has ended", {"tokens_max": 2}),
    ("outside the vocabulary", {"answer": [5, 96]}),
    ("told", {"told_tokens": 3}),
    ("RNG state", {"generator": b"no state"}),
    ("transcript", {"place": msgspec.UNSET}),
]


@pytest.mark.parametrize(("why", "changes"), CHANGES, ids=[f"{n}" for n in range(len(CHANGES))])
def test_a_whole_image_with_a_state_that_is_none_is_refused(talkative: Path, why: str, changes: dict[str, Any]) -> None:
    item = msgspec.structs.replace(ask("a", prompts([20])[0], max_tokens=9), stream="place" in changes)
    image = unpacked(released(talkative, item, steps=2))
    state = msgspec.msgpack.decode(image.state)
    for name, value in changes.items():
        state[name] = None if value is msgspec.UNSET else value
    msgspec.convert(state, FrozenSequence)
    told = refused(engine(talkative, "plain"), packed(msgspec.msgpack.encode(state), image.page_bytes, image.pages))
    assert "precision" in told.message
    told = refused(load(talkative), packed(msgspec.msgpack.encode(state), image.page_bytes, image.pages))
    assert why in told.message
    assert told.code == "image_damaged"


def test_a_damaged_image_is_refused_and_the_whole_one_still_goes_on(talkative: Path) -> None:
    item = ask("a", prompts([20])[0], max_tokens=9)
    wanted = load(talkative).run([item])[0].token_ids
    image = released(talkative, item)
    model = load(talkative)
    for place in range(0, len(image), 97):
        altered = bytearray(image)
        altered[place] ^= 16
        refused(model, bytes(altered))
    for length in range(0, len(image), 101):
        refused(model, image[:length])
    for garbage in (b"", b"x" * 1000, packed(b"no state", 0, b""), packed(json.dumps({}).encode(), 0, b"")):
        refused(model, garbage)
    model.adopt(1, image)
    ended: list[Any] = []
    while not ended:
        ended = model.step()
    assert ended[0][1].token_ids == wanted


def test_what_lies_behind_the_last_token_of_a_page_does_not_travel(talkative: Path) -> None:
    """It is another request's."""
    model = load(talkative, repeatable=True)
    model._pages._memory.fill_(255)  # type: ignore[attr-defined]
    model.submit(1, ask("a", prompts([20])[0], max_tokens=9))
    model.step()
    image = model.release(1)
    assert image is not None
    last = bytes(unpacked(image).pages)[-unpacked(image).page_bytes :]
    assert b"\xff" * 16 not in last


def test_a_pool_that_is_too_small_for_all_swaps_and_changes_nothing(writer: Path) -> None:
    items = requests(3)
    wanted = [load(writer, repeatable=True).run([item])[0] for item in items]
    found: dict[int, tuple[int, int]] = {}
    for swap_mb in (0, 4):
        model = load(writer, repeatable=True, max_num_seqs=9, swap_mb=swap_mb)
        pool = model._scheduler._pool
        pool._empty = pool._empty[:9]
        for answer, one in zip(model.run(items), wanted, strict=True):
            assert same(answer, one)
        assert model._scheduler.swap.used == 0
        found[swap_mb] = (model.preemptions, model._scheduler.swap.swaps)
    assert found[0][0] > 0
    assert found[0][1] == 0
    assert found[4][1] > 0


def test_a_request_that_gives_way_where_no_memory_is_left_for_it_is_computed_again(
    writer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = requests(3)
    wanted = [load(writer, repeatable=True).run([item])[0] for item in items]
    model = load(writer, repeatable=True, max_num_seqs=9, swap_mb=4)
    pool = model._scheduler._pool
    pool._empty = pool._empty[:9]

    def none_left(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(model._pages, "read", none_left)
    for answer, one in zip(model.run(items), wanted, strict=True):
        assert same(answer, one)
    assert model._scheduler.swap.swaps > 0
    assert model._scheduler.swap.used == 0
