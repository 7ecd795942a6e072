"""What both language servers have to do with the real SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_worker.backends.base import Backend, LoadedModel, ModelRefused
from sie_stream.edge.tokenizer import TokenizerStore
from tests.backends_real.adapter import write_adapter
from tests.libraries.backends.launching import launch, row

QUESTIONS = ("Who wrote Hamlet?", "Count from one to five.", "Say only: yes")
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
    """Greedy tokens equal transformers'; logprobs are of the chosen tokens; texts and chats work."""
    asked = prompts(weights)
    items = [row(str(n), {}, token_ids=ids, parameters=parameters(max_tokens=TOKENS)) for n, ids in enumerate(asked)]
    answers = model.run(items)
    assert [one.error_message for one in answers] == [None] * len(asked)
    assert [one.token_ids for one in answers] == greedy(weights, asked)
    assert [one.prompt_tokens for one in answers] == [len(ids) for ids in asked]

    (told,) = model.run([row("r", {}, token_ids=asked[0], parameters=parameters(max_tokens=4, logprobs=2))])
    logprobs = json.loads(told.outputs or b"")["logprobs"]
    assert [one["token_id"] for one in logprobs] == told.token_ids
    assert all(one["top"][0] == [one["token_id"], one["logprob"]] for one in logprobs), "greedy takes the likeliest"

    ends, cut = model.run(
        [
            row("ends", {}, token_ids=asked[-1], parameters=parameters(max_tokens=60)),
            row("cut", {}, token_ids=asked[-1], parameters=parameters(max_tokens=60, stop=["e"])),
        ]
    )
    assert ends.finish_reason == "stop"
    assert ends.completion_tokens == len(ends.token_ids or ())
    assert 2 not in (ends.token_ids or ()), "SmolLM2's stop token is no part of the answer"
    assert "e" not in json.loads(cut.outputs or b"")["text"]

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


def check_seeds(model: LoadedModel, weights: Path) -> None:
    """The same seed draws the same tokens."""
    (ids, *_) = prompts(weights)
    warm = parameters(max_tokens=8, temperature=1.0)
    drawn = [model.run([row("r", {}, token_ids=ids, parameters=warm, seed=seed)])[0].token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def check_adapters(backend: Backend, url: str, weights: Path, folder: Path) -> None:
    """Another adapter under the same name is another model, and the base is the same before and after."""
    config = {"url": url, "timeout_ms": 300_000}
    (ids, *_) = prompts(weights)
    item = row("r", {}, token_ids=ids, parameters=parameters(max_tokens=8))
    base = backend.load(launch(Path("m"), backend.name, config))
    plain = base.run([item])[0].token_ids
    answers = []
    for seed in (1, 2, 1):
        source = write_adapter(folder / f"{len(answers)}", weights, seed)
        adapter = backend.load(launch(source, backend.name, {**config, "base": str(weights), "model": "small"}))
        answers.append(adapter.run([item])[0].token_ids)
        backend.unload(adapter)
    assert answers[0] == answers[2]
    assert plain not in answers
    assert answers[0] != answers[1]
    assert base.run([item])[0].token_ids == plain
    with pytest.raises(ModelRefused) as refusal:
        backend.load(launch(weights, backend.name, {**config, "base": str(weights), "model": "none"}))
    assert refusal.value.code in ("server_refused", "server_error")
    backend.unload(base)
