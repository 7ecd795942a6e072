"""Our decoder against transformers, and against itself under other loads, on networks of a few thousand weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from gpu_worker.backends.base import ContinuousModel, EngineInput, EngineOutput, ModelRefused
from gpu_worker.backends.decoder.attention import DecodingRows, Layer
from gpu_worker.backends.decoder.compiled import compiled, kernel_for
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.decoder.runner import FastRunner, tiles_of
from gpu_worker.decoding.sequence import Chunk, Sequence
from tests.decoders.families import CONTEXT, FAMILIES, STOP, ask, load, prompts, save, with_tokenizer
from tests.libraries.backends.launching import FixedClock

GREEDY = 24


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never stops by itself."""
    return with_tokenizer(save(tmp_path_factory.mktemp("talkative"), eos_token_id=None))


@functools.cache
def reference(folder: Path) -> Any:
    # Its fused attention leaves out the caps of Gemma.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def expected(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers, up to the stop token."""
    network = reference(folder)
    whole = network.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
    answer = whole[len(prompt) :]
    return answer[: answer.index(STOP)] if STOP in answer else answer


def tokens(answers: list[EngineOutput]) -> list[list[int] | None]:
    assert not [answer.error_message for answer in answers if answer.error_code]
    return [answer.token_ids for answer in answers]


def answers_of(model: DecoderModel, items: list[EngineInput], every: int) -> list[list[int] | None]:
    """Submits one item every few steps, so each runs beside others in another state."""
    done: dict[int, EngineOutput] = {}
    waiting = list(enumerate(items))
    steps = 0
    while waiting or model.busy:
        if waiting and steps % every == 0:
            ticket, item = waiting.pop(0)
            assert model.submit(ticket, item) is None
        done.update(model.step())
        steps += 1
    return tokens([done[ticket] for ticket in range(len(items))])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family)
    asked = prompts([1, 5, 17, 50])
    items = [ask(str(n), prompt, max_tokens=GREEDY) for n, prompt in enumerate(asked)]
    wanted = [expected(folder, prompt, GREEDY) for prompt in asked]
    assert tokens(load(folder).run(items)) == wanted
    assert tokens(load(folder, repeatable=True, step_tokens=32).run(items)) == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3-window", "gemma2", "gemma2-uncapped"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = with_tokenizer(save(tmp_path, family))
    (prompt,) = prompts([60])
    with torch.inference_mode():
        told = torch.log_softmax(reference(folder)(input_ids=torch.tensor([prompt])).logits[0], dim=-1)
    wanted = [float(told[place, token]) for place, token in enumerate(prompt[1:])]
    for config in ({}, {"repeatable": True}, {"step_tokens": 7, "max_num_seqs": 2}):
        (answer,) = load(folder, None, **config).run([ask("a", prompt, score=True)])
        found = [entry["logprob"] for entry in json.loads(answer.outputs or b"")["prompt_logprobs"]]
        assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_without_a_compiler_the_tokens_are_the_same(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family)
    items = [ask(str(n), prompt, max_tokens=GREEDY) for n, prompt in enumerate(prompts([1, 5, 17, 50]))]
    model = load(folder)
    wanted = tokens(model.run(items))
    runner = model._runner
    assert isinstance(runner, FastRunner)
    runner._kernel = None
    assert tokens(model.run(items)) == wanted


@pytest.mark.skipif(compiled() is None, reason="no C compiler here")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("width", "window", "cap"), [(8, None, None), (64, None, None), (64, 20, None), (128, 5, None), (64, 20, 1.5)]
)
def test_the_compiled_kernel_attends_as_torch_does(
    width: int, window: int | None, cap: float | None, threads: int
) -> None:
    generator = torch.Generator().manual_seed(width)
    pages = torch.randn((40, 3, 2, 16, 2, width), generator=generator)
    layer = Layer(pages[:, 1, 0], pages[:, 1, 1], window, width**-0.5, cap)
    table = torch.randperm(40, generator=generator)[:30].view(6, 5)
    lengths = torch.tensor([1, 16, 17, 80, 33, 64])
    queries = torch.randn((6, 6, width), generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernel = kernel_for("cpu", torch.float32)
        assert kernel is not None
        by_kernel = DecodingRows(slice(0, 6), table, lengths, kernel)(queries, layer)
    finally:
        torch.set_num_threads(before)
    by_torch = DecodingRows(slice(0, 6), table, lengths)(queries, layer)
    assert torch.allclose(by_kernel, by_torch, atol=2e-6)


def test_it_is_a_continuous_model(llama: Path) -> None:
    assert isinstance(load(llama), ContinuousModel)


def test_requests_that_come_while_others_run_and_prompts_in_chunks_change_nothing(llama: Path) -> None:
    items = [ask(str(n), prompt, max_tokens=12) for n, prompt in enumerate(prompts([40, 3, 25, 60, 9, 33]))]
    alone = [tokens(load(llama).run([item]))[0] for item in items]
    assert answers_of(load(llama, max_num_seqs=3, step_tokens=7), items, every=2) == alone
    assert answers_of(load(llama, max_num_seqs=6, step_tokens=64), items, every=3) == alone


def test_a_pool_that_is_too_small_for_all_preempts_and_changes_nothing(talkative: Path) -> None:
    items = [ask(str(n), prompt, max_tokens=30) for n, prompt in enumerate(prompts([40, 38, 25, 44], seed=3))]
    alone = tokens(load(talkative).run(items))
    model = load(talkative, max_num_seqs=4)
    pool = model._scheduler._pool
    pool._empty = pool._empty[:9]  # nine pages of 16 tokens; all four need 17 in the end
    assert tokens(model.run(items)) == alone
    assert model.preemptions > 0


def test_what_others_left_in_the_pool_changes_nothing(talkative: Path) -> None:
    items = [ask(str(n), prompt, max_tokens=20) for n, prompt in enumerate(prompts([1, 5, 17, 50]))]
    clean = tokens(load(talkative).run(items))
    model = load(talkative)
    runner = model._runner
    assert isinstance(runner, FastRunner)
    runner._pages._memory.fill_(255)  # NaNs
    assert tokens(model.run(items)) == clean


def test_a_shared_prefix_is_computed_once_and_changes_nothing(llama: Path) -> None:
    (shared,) = prompts([48])
    items = [ask(str(n), shared + tail, max_tokens=8) for n, tail in enumerate(prompts([3, 7, 1, 12], seed=5))]
    alone = [tokens(load(llama).run([item]))[0] for item in items]
    model = load(llama)
    assert [tokens(model.run([item]))[0] for item in items] == alone
    assert model.reused_tokens == 3 * 48


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    shared=st.integers(0, 40),
    step_tokens=st.integers(8, 40),
    seed=st.integers(0, 100),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_repeatable_answers_have_the_same_bits_with_a_shared_prefix_and_without(
    llama: Path, lengths: list[int], shared: int, step_tokens: int, seed: int
) -> None:
    prefix, *tails = prompts([shared, *lengths], seed)
    items = [ask(str(n), prefix + tail, max_tokens=5, logprobs=2) for n, tail in enumerate(tails)]
    fresh = [load(llama, repeatable=True).run([item])[0].outputs for item in items]
    model = load(llama, repeatable=True, step_tokens=step_tokens, max_num_seqs=8)
    for _ in range(2):  # the second time everything is cached
        assert [answer.outputs for answer in model.run(items)] == fresh


def test_a_repeatable_answer_has_the_same_bits_alone_and_among_31_others(llama: Path) -> None:
    lengths = [1 + 3 * n for n in range(32)]
    items = [
        ask(str(n), prompt, n, max_tokens=6, temperature=0.8, logprobs=3) for n, prompt in enumerate(prompts(lengths))
    ]
    alone = [load(llama, repeatable=True).run([item])[0].outputs for item in items[::5]]
    together = load(llama, repeatable=True, max_num_seqs=32).run(items)
    assert [answer.outputs for answer in together[::5]] == alone


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_tiles_hold_every_token_once_in_its_row_and_in_order(spans: list[tuple[int, int]]) -> None:
    chunks = [Chunk(Sequence(n, [0] * (start + count), 1), start, count) for n, (start, count) in enumerate(spans)]
    tiles = tiles_of(chunks)
    places = [place for tile in tiles for place in tile]
    assert sorted((place.chunk, place.position) for place in places) == [
        (n, position) for n, chunk in enumerate(chunks) for position in range(chunk.start, chunk.end)
    ]
    for tile in tiles:
        assert len({place.row for place in tile}) == len(tile)
    for number in range(len(chunks)):
        positions = [
            (index, place.position) for index, tile in enumerate(tiles) for place in tile if place.chunk == number
        ]
        by_position = sorted(positions, key=lambda entry: entry[1])
        assert [index for index, _ in by_position] == sorted(index for index, _ in positions)
    assert all(place.row == place.position % 16 for place in places)


def test_a_stop_text_ends_the_answer_before_it_wherever_tokens_are_cut(llama: Path) -> None:
    model = load(llama)
    (whole,) = model.run([ask("a", [5, 9], max_tokens=20)])
    text = "".join(chr(32 + token) for token in whole.token_ids or [])
    (cut,) = model.run([ask("a", [5, 9], max_tokens=20, stop=["never this", text[7:10]])])
    assert json.loads(cut.outputs or b"") == {"text": text[: text.index(text[7:10])], "finish_reason": "stop"}
    assert cut.completion_tokens < whole.completion_tokens
    (same,) = model.run([ask("a", [5, 9], max_tokens=20, stop=text[7:10])])
    assert same.outputs == cut.outputs


def test_log_probabilities_are_those_of_transformers(llama: Path) -> None:
    (prompt,) = prompts([20])
    network = reference(llama)
    (answer,) = load(llama).run([ask("a", prompt, max_tokens=5, logprobs=3)])
    told = json.loads(answer.outputs or b"")["logprobs"]
    ids = [*prompt, *(answer.token_ids or [])]
    with torch.inference_mode():
        by_hand = torch.log_softmax(network(input_ids=torch.tensor([ids])).logits[0], dim=-1)
    assert [entry["token_id"] for entry in told] == answer.token_ids
    for place, entry in enumerate(told, len(prompt) - 1):
        best = by_hand[place].topk(3)
        assert entry["logprob"] == pytest.approx(float(by_hand[place, ids[place + 1]]), abs=1e-4)
        assert [top["token_id"] for top in entry["top"]] == best.indices.tolist()
        assert [top["logprob"] for top in entry["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("step_tokens", [8, 256])
def test_a_prompt_is_scored(step_tokens: int, llama: Path) -> None:
    (prompt,) = prompts([30])
    network = reference(llama)
    model = load(llama, step_tokens=step_tokens, max_num_seqs=8)
    model.run([ask("before", prompt)])  # what is cached must not shorten the score
    (answer,) = model.run([ask("a", prompt, score=True)])
    told = json.loads(answer.outputs or b"")
    with torch.inference_mode():
        by_hand = torch.log_softmax(network(input_ids=torch.tensor([prompt])).logits[0, :-1], dim=-1)
    wanted = by_hand.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [entry["logprob"] for entry in told["prompt_logprobs"]] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert told["log_likelihood"] == pytest.approx(float(wanted.sum()), abs=1e-3)
    assert (answer.prompt_tokens, answer.completion_tokens) == (30, 0)


def test_penalties_are_followed(talkative: Path) -> None:
    asked = [5, 9, 11, 5, 9, 11]
    free, varied, never = load(talkative).run(
        [
            ask("a", asked, max_tokens=40),
            ask("b", asked, max_tokens=40, presence_penalty=2.0, frequency_penalty=2.0),
            ask("c", asked, max_tokens=40, repetition_penalty=10.0),
        ]
    )
    different = [len(set(answer.token_ids or [])) for answer in (free, varied, never)]
    assert different[0] < different[1] <= 40
    assert different[0] < different[2]
    assert not {5, 9, 11} & set((never.token_ids or [])[:8])


def test_an_answer_has_at_least_min_tokens(llama: Path) -> None:
    (prompt,) = prompts([38], seed=3)
    model = load(llama)
    (free,) = model.run([ask("a", prompt, max_tokens=12)])
    (long,) = model.run([ask("a", prompt, max_tokens=12, min_tokens=12)])
    assert free.finish_reason == "stop"
    assert (long.completion_tokens, long.finish_reason) == (12, "length")
    assert STOP not in (long.token_ids or [])
    assert (long.token_ids or [])[: free.completion_tokens] == free.token_ids


def test_an_urgent_request_is_answered_before_those_that_came_first(llama: Path) -> None:
    model = load(llama, max_num_seqs=2)
    for ticket, priority in enumerate((2, 2, 2, 0)):
        model.submit(ticket, ask(str(ticket), [5, 9 + ticket], max_tokens=8, priority=priority))
    order: list[int] = []
    while model.busy:
        order += [ticket for ticket, _ in model.step()]
    assert order[0] == 3


def test_a_cancelled_request_ends_at_once_and_frees_its_blocks(llama: Path) -> None:
    model = load(llama)
    free = model._scheduler._pool.free
    model.submit(7, ask("a", [5, 9], max_tokens=100))
    model.submit(8, ask("b", [5, 9], max_tokens=3))
    model.step()
    ended = model.cancel(7)
    assert ended is not None
    assert ended.error_code == "cancelled"
    assert model.cancel(7) is None
    while model.busy:
        model.step()
    assert model._scheduler._pool.free == free


def test_after_a_reset_nothing_runs_and_the_model_serves_again(llama: Path) -> None:
    model = load(llama)
    item = ask("a", [5, 9], max_tokens=4)
    wanted = model.run([item])
    model.submit(1, item)
    model.submit(2, item)
    model.step()
    assert model.reset() == [1, 2]
    assert not model.busy
    assert tokens(model.run([item])) == tokens(wanted)


def test_a_late_request_ends_while_it_waits(llama: Path) -> None:
    clock = FixedClock(now=1_000, step_ms=10)
    model = load(llama, clock, max_num_seqs=1)
    model.submit(1, ask("a", [5, 9], max_tokens=30))
    late = ask("b", [5, 9])
    model.submit(2, EngineInput(late.request_id, late.inputs, late.token_ids, None, None, 1_020))
    ended: list[tuple[int, EngineOutput]] = []
    while not ended:
        ended = model.step()
    assert [(ticket, answer.error_code) for ticket, answer in ended] == [(2, "deadline_exceeded")]


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [({"top_k": -1}, "top_k"), ({"stop": [""]}, "stop"), ({"logprobs": 21}, "logprobs"), ({"beams": 4}, "beams")],
)
def test_parameters_that_cannot_be_followed_are_refused(
    parameters: dict[str, Any], complaint: str, llama: Path
) -> None:
    (answer,) = load(llama).run([ask("a", [5], **parameters)])
    assert answer.error_code == "invalid_parameters"
    assert complaint in (answer.error_message or "")


def test_stop_texts_need_a_tokenizer(tmp_path: Path) -> None:
    (answer,) = load(save(tmp_path)).run([ask("a", [5], stop=["x"])])
    assert "names no tokenizer" in (answer.error_message or "")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"precision": "int7"}, "dense, fp32, bf16, fp16, int8, int4"),
        ({"step_tokens": 4}, "step_tokens"),
        ({"repeatable": "yes"}, "repeatable"),
        ({"kv_mb": 0}, "kv_mb"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(config: dict[str, Any], complaint: str, llama: Path) -> None:
    with pytest.raises(ModelRefused, match=complaint):
        load(llama, **config)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelRefused, match=r"gpt2.*llama, mistral, qwen2, qwen3, phi3, gemma2"):
        load(tmp_path)


def test_a_request_longer_than_the_pool_is_refused(llama: Path) -> None:
    model = load(llama)
    model._scheduler._pool.count = 2
    (answer,) = model.run([ask("a", [5] * 20, max_tokens=CONTEXT - 20)])
    assert answer.error_code == "context_length_exceeded"
    assert "kv_mb" in (answer.error_message or "")
