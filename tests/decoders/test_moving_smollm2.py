"""Requests of the real SmolLM2 that go on in another engine. Needs `make models`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from gpu_worker.backends.base import EngineInput
from tests.decoders.families import ask, load
from tests.decoders.moves import RandomMoves, finish, same
from zoo.texts import sentences

SMOLLM2 = Path(__file__).resolve().parents[2] / ".models" / "smollm2-135m-instruct"
TOKENS = 10
SCHEMA = {
    "type": "object",
    "properties": {"topic": {"type": "string", "maxLength": 9}, "sure": {"type": "boolean"}},
    "required": ["topic", "sure"],
    "additionalProperties": False,
}
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 4},
    {"temperature": 1.1, "top_k": 40, "repetition_penalty": 1.2, "logprobs": 0},
    {"temperature": 0.8, "response_format": {"type": "json_schema", "schema": SCHEMA}},
    {"response_format": {"type": "regex", "pattern": "[A-Z][a-z ]{5,40}[.]"}, "logprobs": 2},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5, "stop": ["the", "."]},
    {"score": True},
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SMOLLM2 / "build.json").exists(), reason="make models has not built SmolLM2"),
]


def requests(seed: int) -> list[EngineInput]:
    """Prompts of up to 40 tokens, which come in chunks of 16 and fewer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    texts = [sentence.text for sentence in sentences()[8 * seed : 8 * seed + len(WAYS) + 1]]
    pairs = [f"{one} {next_one}" for one, next_one in itertools.pairwise(texts)]
    prompts = [tokenizer.encode(pair)[: 40 - 4 * place] for place, pair in enumerate(pairs)]
    items = [
        ask(f"r{n}", prompt, seed=seed + n, max_tokens=TOKENS, **way)
        for n, (prompt, way) in enumerate(zip(prompts, WAYS, strict=True))
    ]
    return [msgspec.structs.replace(item, stream=n in (1, 3, 5)) for n, item in enumerate(items)]


@pytest.mark.parametrize(("seed", "often"), [(0, 0.25), (1, 1.0)])
def test_answers_have_the_same_bits_however_often_they_were_moved(seed: int, often: float) -> None:
    items = requests(seed)
    config: dict[str, Any] = {"repeatable": True, "threads": 1, "kv_mb": 64, "context_tokens": 128}
    wanted, wanted_told = finish([load(SMOLLM2, **config)], items, lambda done: None)
    models = [load(SMOLLM2, step_tokens=16, max_num_seqs=8, **config) for _ in range(2)]
    moves = RandomMoves(models, len(items), seed, often)
    answers, told = finish(models, items, moves)
    assert moves.moved >= 10
    assert [one.error_code for one in wanted] == [None] * len(items)
    for answer, one in zip(answers, wanted, strict=True):
        assert same(answer, one), (answer, one)
    assert told == wanted_told


def test_a_pool_that_is_too_small_swaps_and_changes_no_answer() -> None:
    items = requests(2)
    config: dict[str, Any] = {"repeatable": True, "threads": 1, "context_tokens": 128}
    wanted = load(SMOLLM2, kv_mb=64, **config).run(items)
    # Five pages of 16 tokens, one request needs up to four.
    model = load(SMOLLM2, kv_mb=4, swap_mb=16, step_tokens=16, max_num_seqs=8, **config)
    for answer, one in zip(model.run(items), wanted, strict=True):
        assert same(answer, one), (answer, one)
    assert model.preemptions > 0
    assert model._scheduler.swap.swaps > 0
