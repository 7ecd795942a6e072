"""What both language servers have to do with the real SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_worker.backends.base import LoadedModel
from sie_stream.edge.tokenizer import TokenizerStore
from tests.libraries.backends.launching import row

QUESTIONS = ("Who wrote Hamlet?", "Count from one to five.", "Name a colour of the sky.")
TOKENS = 12


def prompts(model: Path) -> list[list[int]]:
    tokenizer = TokenizerStore().get(str(model / "tokenizer.json"))
    return [
        tokenizer.encode_plain(tokenizer.render_chat([{"role": "user", "content": question}])) for question in QUESTIONS
    ]


def greedy(model: Path, asked: list[list[int]]) -> list[list[int]]:
    """What transformers answers in float32, without stop tokens."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, local_files_only=True)
    answers: list[list[int]] = []
    for ids in asked:
        out = network.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0, len(ids) :].tolist()
        answers.append([token for token in out if token != network.generation_config.eos_token_id])
    return answers


def parameters(**chosen: Any) -> bytes:
    return json.dumps(chosen).encode()


def check_answers(model: LoadedModel, weights: Path) -> None:
    """Greedy tokens equal transformers'; seeds repeat; logprobs are of the chosen tokens; texts and chats work."""
    asked = prompts(weights)
    items = [row(str(n), {}, token_ids=ids, parameters=parameters(max_tokens=TOKENS)) for n, ids in enumerate(asked)]
    answers = model.run(items)
    assert [one.error_message for one in answers] == [None] * len(asked)
    assert [one.token_ids for one in answers] == greedy(weights, asked)
    assert [one.prompt_tokens for one in answers] == [len(ids) for ids in asked]

    warm = parameters(max_tokens=8, temperature=1.0)
    drawn = [
        model.run([row("r", {}, token_ids=asked[0], parameters=warm, seed=seed)])[0].token_ids for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]

    (told,) = model.run([row("r", {}, token_ids=asked[0], parameters=parameters(max_tokens=4, logprobs=2))])
    logprobs = json.loads(told.outputs or b"")["logprobs"]
    assert [one["token_id"] for one in logprobs] == told.token_ids
    assert all(one["top"][0] == [one["token_id"], one["logprob"]] for one in logprobs), "greedy takes the likeliest"

    chat, text, long = model.run(
        [
            row(
                "chat",
                {"messages": [{"role": "user", "content": QUESTIONS[0]}]},
                parameters=parameters(max_tokens=TOKENS),
            ),
            row("text", {"prompt": "The capital of France is"}, parameters=parameters(max_tokens=3)),
            row("long", {}, token_ids=[5] * 2_000),
        ]
    )
    assert "Shakespeare" in json.loads(chat.outputs or b"")["text"]
    assert json.loads(text.outputs or b"")["text"]
    assert long.error_code == "context_length_exceeded"
