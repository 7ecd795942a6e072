"""Our decoder and transformers on the real SmolLM2. Needs `make models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.decoders.families import ask, load
from zoo.texts import chats, sentences

SMOLLM2 = Path(__file__).resolve().parents[2] / ".models" / "smollm2-135m-instruct"
PROMPTS = 100
CHATS = 8
TOKENS = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SMOLLM2 / "build.json").exists(), reason="make models has not built SmolLM2"),
]


@pytest.mark.timeout(400)  # half a minute of processor time; much longer beside other work
def test_greedy_tokens_are_those_of_transformers_over_100_prompts() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    texts = [sentence.text for sentence in sentences()]
    texts = (texts * 2)[: PROMPTS - CHATS]
    prompts = [tokenizer.encode(text)[place % 7 : 12 + place % 7] for place, text in enumerate(texts)]
    prompts += [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats(CHATS)]
    assert len({tuple(prompt) for prompt in prompts}) == PROMPTS
    model = load(SMOLLM2, threads=1, max_num_seqs=32, kv_mb=180)
    answers = model.run([ask(str(n), prompt, max_tokens=TOKENS) for n, prompt in enumerate(prompts)])
    network: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, local_files_only=True, dtype=torch.float32).eval()
    stop = network.generation_config.eos_token_id
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer.token_ids or []
        # Every token is the likeliest after those before it, so the whole answer is the greedy one: one forward pass of
        # transformers says as much as its generate() would, in a tenth of the time.
        with torch.inference_mode():
            logits = network(input_ids=torch.tensor([prompt + tokens]), logits_to_keep=len(tokens) + 1).logits[0]
        greedy = logits.argmax(dim=-1).tolist()
        wanted = tokens if answer.finish_reason == "length" else [*tokens, stop]
        assert greedy[: len(wanted)] == wanted, (prompt, tokens)


@pytest.mark.timeout(400)
def test_20_prompts_are_answered_with_valid_json_by_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "topic": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["question", "statement", "order"]},
            "words": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
            "certain": {"type": "boolean"},
        },
        "required": ["topic", "kind", "words", "tags", "certain"],
        "additionalProperties": False,
    }
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Describe this text as JSON: {sentence.text}"}], add_generation_prompt=True
        )["input_ids"]
        for sentence in sentences()[:20]
    ]
    form = {"type": "json_schema", "schema": schema}
    asked = [
        ask(str(n), prompt, seed=n, max_tokens=160, temperature=0.8 * (n % 2), response_format=form)
        for n, prompt in enumerate(prompts)
    ]
    assert len(asked) == 20
    model = load(SMOLLM2, threads=1, max_num_seqs=20, kv_mb=180)
    for answer in model.run(asked):
        assert answer.finish_reason == "stop"
        text = tokenizer.decode(answer.token_ids)
        value = json.loads(text)
        assert list(value) == ["topic", "kind", "words", "tags", "certain"]
        assert value["kind"] in ("question", "statement", "order"), text
        assert 0 <= value["words"] <= 99
        assert len(value["tags"]) <= 2
        assert len(value["topic"]) <= 20
        assert isinstance(value["certain"], bool)
