"""LoRA adapters over a decoder: the answers of merged weights, and whose keys and values they may use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from gpu_worker.backends.base import EngineInput, EngineOutput, ModelRefused
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.decoding.image import ImageRefused
from sie_stream.adapter_digests import own_and_base
from sie_stream.trunks import own_bytes
from tests.decoders.adapters import MODULES, merged, write_adapter
from tests.decoders.families import ask, prompts, save, with_tokenizer
from tests.decoders.gguf_files import write_gguf
from tests.decoders.moves import RandomMoves, finish
from tests.libraries.backends.launching import FixedClock, launch

CALL = [7, 11, 13]
"""Invokes the activated adapters here."""
EMBEDDING = {"head": "embedding"}
Load = Callable[..., DecoderModel]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save(tmp_path_factory.mktemp("base"), eos_token_id=None))


def engine(backend: TorchBackend | None = None) -> Load:
    """Loads models, and adapters over `base`, into one engine."""
    backend = backend or TorchBackend(FixedClock())

    def load(folder: Path, base: Path | None = None, digest: str = "", **config: Any) -> DecoderModel:
        over = {} if base is None else {"base": str(base)}
        model = backend.load(launch(folder, "torch", {"kind": "text_generation", "kv_mb": 4, **over, **config}, digest))
        assert isinstance(model, DecoderModel)
        return model

    return load


def answer(model: DecoderModel, prompt: list[int], **parameters: Any) -> list[int]:
    (output,) = model.run([ask("a", prompt, **({"max_tokens": 8} | parameters))])
    assert output.error_code is None, output.error_message
    return output.token_ids or []


def greedy(network: Any, prompt: list[int], count: int, cache: Any = None) -> list[int]:
    """By transformers; `cache` has the keys and values of the first tokens of the prompt."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            known = 0 if cache is None else cache.get_seq_length()
            out = network(input_ids=torch.tensor([ids[known:]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            ids.append(int(out.logits[0, -1].argmax()))
    return ids[len(prompt) :]


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("family", "targets", "changes"),
    [
        ("llama", MODULES, {}),
        ("llama", MODULES, {"use_rslora": True}),
        ("llama-tied-biased", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), {}),
        ("qwen3", ("k_proj", "up_proj"), {}),
        ("phi3", ("qkv_proj", "gate_up_proj"), {}),
        ("gemma2", ("o_proj", "gate_proj"), {"target_modules": ["self_attn.o_proj", "gate_proj"]}),
        ("mistral", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
         {"target_modules": "all-linear"}),
    ],
)  # fmt: skip
def test_answers_are_those_of_transformers_over_merged_weights(
    family: str, targets: tuple[str, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    base = save(tmp_path / "base", family, eos_token_id=None)
    adapter = write_adapter(tmp_path / "adapter", base, targets=targets, **changes)
    network = reference(merged(tmp_path / "merged", base, adapter))
    load = engine()
    plain, model = load(base), load(adapter, base)
    asked = prompts([3, 17, 40])
    wanted = [greedy(network, prompt, 8) for prompt in asked]
    assert [answer(model, prompt) for prompt in asked] == wanted
    together = model.run([ask(str(n), prompt, max_tokens=8) for n, prompt in enumerate(asked)])
    assert [one.token_ids for one in together] == wanted
    assert [answer(plain, prompt) for prompt in asked] != wanted, "the adapter changes nothing, or this shows nothing"


def test_some_layers_only(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, layers_to_transform=[1])
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".layers.1." in n}, adapter / "adapter_model.safetensors")
    (prompt,) = prompts([20])
    wanted = greedy(reference(merged(tmp_path / "merged", base, adapter)), prompt, 8)
    assert answer(engine()(adapter, base), prompt) == wanted


def test_an_embedding_head_over_an_adapter(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    network = AutoModel.from_pretrained(merged(tmp_path / "merged", base, adapter), dtype=torch.float32)
    (prompt,) = prompts([20])
    with torch.inference_mode():
        pooled = network(input_ids=torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
    (output,) = engine()(adapter, base, **EMBEDDING).run([ask("a", prompt)])
    vector = json.loads(output.outputs or b"")["embedding"]
    assert vector == pytest.approx((pooled / pooled.norm()).tolist(), abs=2e-5)


def test_a_base_in_a_gguf_file_is_the_same_base(tmp_path: Path) -> None:
    base = save(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj", "k_proj", "down_proj"))
    file = write_gguf(base, tmp_path / "base.gguf")
    (prompt,) = prompts([20])
    assert answer(engine()(adapter, file), prompt) == answer(engine()(adapter, base), prompt)


@pytest.mark.parametrize("precision", ["int8", "int4", "bf16"])
def test_an_adapter_acts_over_narrow_weights_too(precision: str, base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    load = engine()
    plain, model = load(base, precision=precision), load(adapter, base, precision=precision)
    (prompt,) = prompts([20])
    assert answer(plain, prompt) != answer(model, prompt)
    silent = write_adapter(tmp_path / "silent", base, strength=0.0)
    assert answer(load(silent, base, precision=precision), prompt) == answer(plain, prompt)


# ---------------------------------------------------------------- memory


def test_the_weights_of_the_base_are_in_memory_once(base: Path, tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / str(seed), base, seed) for seed in range(2)]
    load = engine()
    models = [load(adapters[0], base), load(base), load(adapters[1], base)]
    networks = [model._runner._network for model in models]  # type: ignore[attr-defined]
    assert all(network._blocks is networks[0]._blocks for network in networks)
    assert all(network._head is networks[0]._head for network in networks)
    held: dict[str, int] = {}
    added = []
    for model in models:
        added.append(own_bytes(model.memory_bytes, model.parts, held))
        held |= model.parts
    tables = 160 * 8 * 4 * 2
    # rank 4 on three layers: q 32 + 32, v 32 + 16, down 64 + 32 numbers for each of it
    matrices = 3 * 4 * (64 + 48 + 96) * 4
    assert added == [models[0].memory_bytes, tables, tables + matrices]
    assert models[0].memory_bytes == models[1].memory_bytes + matrices
    alone = load(adapters[0], base, lora_sharing=False)
    assert alone._runner._network._blocks is not networks[0]._blocks  # type: ignore[attr-defined]
    assert own_bytes(alone.memory_bytes, alone.parts, held) == alone.memory_bytes


def test_where_models_take_turns_an_adapter_has_all_its_weights_and_shares_blocks(base: Path, tmp_path: Path) -> None:
    backend = TorchBackend(FixedClock())
    backend.keep_weights_apart()
    load = engine(backend)
    plain, model = load(base), load(activated(tmp_path / "adapter", base), base)
    assert model.parts == {}
    assert sum(weight.size_bytes for weight in model.weights()) >= model.memory_bytes
    (head,) = without_call([40])
    answer(plain, head)
    answer(model, head + CALL)
    assert model.reused_tokens == 32


# ---------------------------------------------------------------- keys and values


def test_a_plain_adapter_uses_no_block_of_its_base_and_none_of_another_adapter(base: Path, tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / str(seed), base, seed) for seed in range(2))
    (prompt,) = prompts([48])
    alone = [answer(engine()(*folders), prompt) for folders in ((base,), (first, base), (second, base))]
    load = engine()
    models = [load(*folders) for folders in ((base,), (first, base), (second, base))]
    assert [answer(model, prompt) for model in models] == alone
    assert [model.reused_tokens for model in models] == [0, 0, 0]
    assert len({model.trunk.digest for model in models if model.trunk}) == 3
    same = load(shutil.copytree(first, tmp_path / "copy"), base)
    assert answer(same, prompt) == alone[1]
    assert same.reused_tokens == 32, "equal adapters share, whatever their names"


@pytest.mark.parametrize("invocation", [None, CALL])
def test_an_adapter_of_the_same_name_and_path_with_other_weights_misses(
    invocation: list[int] | None, base: Path, tmp_path: Path
) -> None:
    prompt = CALL + prompts([40])[0]
    load = engine()
    adapter = write_adapter(tmp_path / "adapter", base, 1, alora_invocation_tokens=invocation)
    first = load(adapter, base)
    before = answer(first, prompt)
    for seed, alpha in ((2, 6), (1, 12)):
        write_adapter(tmp_path / "adapter", base, seed, lora_alpha=alpha, alora_invocation_tokens=invocation)
        second = load(adapter, base)
        assert answer(second, prompt) == answer(engine()(adapter, base), prompt) != before
        assert second.reused_tokens == 0
        assert second.weights_digest != first.weights_digest


def test_a_digest_that_was_declared_covers_scale_and_targets(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base)
    digest, beneath = own_and_base(found := engine()(adapter, base).weights_digest)
    assert beneath == engine()(base).weights_digest, "results name both"
    assert engine()(adapter, base, digest, base_digest=beneath).weights_digest == found
    write_adapter(tmp_path / "adapter", base, lora_alpha=60)
    with pytest.raises(ModelRefused, match="not the declared ones"):
        engine()(adapter, base, digest)
    with pytest.raises(ModelRefused, match="not the declared ones"):
        engine()(adapter, base, base_digest="sha256:other")


# ---------------------------------------------------------------- activated adapters


def activated(folder: Path, base: Path, seed: int = 0) -> Path:
    return write_adapter(folder, base, seed, alora_invocation_tokens=CALL)


def without_call(lengths: list[int], seed: int = 0) -> list[list[int]]:
    return [[token if token != CALL[0] else 5 for token in one] for one in prompts(lengths, seed)]


@pytest.mark.parametrize("before", [0, 1, 20, 33])
def test_an_activated_adapter_acts_from_its_last_invocation_on(before: int, base: Path, tmp_path: Path) -> None:
    adapter = activated(tmp_path / "adapter", base)
    networks = reference(base), reference(merged(tmp_path / "merged", base, adapter))
    head, tail = without_call([before, 9])
    earlier = CALL + head if before else []  # an earlier invocation acts on nothing
    prompt = earlier + CALL + tail
    with torch.inference_mode():
        cache = networks[0](input_ids=torch.tensor([earlier]), use_cache=True).past_key_values if earlier else None
    wanted = greedy(networks[1], prompt, 8, cache)
    load = engine()
    assert answer(load(adapter, base), prompt) == wanted
    assert wanted != answer(load(base), prompt)


def test_without_an_invocation_the_answer_is_the_bases(base: Path, tmp_path: Path) -> None:
    load = engine()
    plain, model = load(base), load(activated(tmp_path / "adapter", base), base)
    for prompt in without_call([1, 2, 20, 48]):
        wanted = answer(plain, prompt)
        assert answer(model, prompt) == wanted
    assert model.reused_tokens == 16 + 32, "all full blocks of the base"


def test_blocks_before_the_invocation_are_the_bases_and_those_from_it_on_are_not(base: Path, tmp_path: Path) -> None:
    shared, tail = without_call([40, 30])
    load = engine()
    plain = load(base)
    first, second = (load(activated(tmp_path / str(seed), base, seed), base) for seed in range(2))
    prompt = shared + CALL + tail
    models = (plain, first, second)
    wanted = [answer(engine()(base), prompt)]
    wanted += [answer(engine()(tmp_path / str(seed), base), prompt) for seed in range(2)]
    assert [answer(model, prompt) for model in models] == wanted
    assert len({tuple(one) for one in wanted}) == 3
    assert [model.reused_tokens for model in models] == [0, 32, 32], "blocks of 16: the third has the invocation in it"
    assert [answer(model, prompt) for model in models] == wanted
    assert [model.reused_tokens for model in models] == [64, 32 + 64, 32 + 64]
    assert [model.trunk.opening if model.trunk else "" for model in models] == [plain.trunk.digest] * 3  # type: ignore[union-attr]


def test_a_prefix_that_a_later_invocation_leaves_to_the_base_is_not_taken_from_the_adapter(
    base: Path, tmp_path: Path
) -> None:
    """The same tokens under an adapter that began at the first call, and under one that begins at the second."""
    load = engine()
    model = load(activated(tmp_path / "adapter", base), base)
    head, middle, tail = without_call([5, 45, 4])
    once = head + CALL + middle
    twice = once + CALL + tail
    wanted = [answer(engine()(tmp_path / "adapter", base), prompt) for prompt in (once, twice)]
    assert [answer(model, prompt) for prompt in (once, twice)] == wanted
    assert model.reused_tokens == 0


def test_two_invocations_that_begin_in_the_same_block_are_told_apart(base: Path, tmp_path: Path) -> None:
    """The first block ends within what is an invocation in one prompt and is none in the other."""
    load = engine()
    model = load(activated(tmp_path / "adapter", base), base)
    head, middle, tail = without_call([5, 7, 20])
    first = head + CALL + middle + CALL[:1]
    assert len(first) == 16
    asked = [first + tail, first + CALL[1:] + tail]
    wanted = [answer(engine()(tmp_path / "adapter", base), prompt) for prompt in asked]
    assert [answer(model, prompt) for prompt in asked] == wanted
    assert model.reused_tokens == 0


def test_a_request_goes_on_in_another_engine_under_the_same_adapter_only(base: Path, tmp_path: Path) -> None:
    adapter = activated(tmp_path / "adapter", base)
    models = [engine()(adapter, base, repeatable=True) for _ in range(2)]
    prompts_of = [head + CALL + tail for head, tail in zip(without_call([20, 40]), without_call([9, 3]), strict=True)]
    items = [ask(str(n), prompt, max_tokens=10) for n, prompt in enumerate([*prompts_of, *without_call([30])])]
    wanted = [said(output) for output in engine()(adapter, base, repeatable=True).run(items)]
    moves = RandomMoves(models, len(items), 5, 0.5)
    answers, _ = finish(models, items, moves)
    assert moves.moved > 3
    assert [said(output) for output in answers] == wanted
    assert models[0].submit(9, items[0]) is None
    models[0].step()
    image = models[0].release(9)
    assert image is not None
    for other in ((base,), (activated(tmp_path / "other", base, 1), base)):
        with pytest.raises(ImageRefused, match="trunk adapter of the image"):
            engine()(*other, repeatable=True).adopt(1, image)


PARTS: dict[str, dict[str, Any]] = {
    "base": {}, "first": {}, "second": {}, "plain": {}, "base mean": EMBEDDING, "first mean": EMBEDDING
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ...]]:
    at = tmp_path_factory.mktemp("adapters")
    first, second = (activated(at / str(seed), base, seed) for seed in range(2))
    plain = write_adapter(at / "plain", base, 3)
    return {
        "base": (base,), "first": (first, base), "second": (second, base), "plain": (plain, base),
        "base mean": (base,), "first mean": (first, base),
    }  # fmt: skip


@pytest.fixture(scope="module")
def forgetful(folders: dict[str, tuple[Path, ...]]) -> dict[str, DecoderModel]:
    """Models of an engine whose pool finds nothing."""
    load = engine()
    models = {name: load(*folders[name], repeatable=True, **config) for name, config in PARTS.items()}
    models["base"]._scheduler._pool.match = lambda digests: []
    return models


def request(name: str, number: int, prompt: list[int]) -> EngineInput:
    return ask(str(number), prompt) if "mean" in name else ask(str(number), prompt, max_tokens=4, score=number % 3 == 0)


def said(output: EngineOutput) -> tuple[bytes | None, list[int] | None]:
    assert output.error_code is None, output.error_message
    return output.outputs, output.token_ids


@given(
    asked=st.lists(
        st.tuples(st.sampled_from(list(PARTS)), st.lists(st.sampled_from(["call", 1, 3, 8, 17]), min_size=1)),
        min_size=2,
        max_size=6,
    ),
    shared=st.integers(0, 40),
    step_tokens=st.integers(8, 40),
    pages=st.integers(8, 60),
    seed=st.integers(0, 100),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_repeatable_answers_have_the_same_bits_with_what_base_and_adapters_left_and_without(
    folders: dict[str, tuple[Path, ...]],
    forgetful: dict[str, DecoderModel],
    asked: list[tuple[str, list[Any]]],
    shared: int,
    step_tokens: int,
    pages: int,
    seed: int,
) -> None:
    (prefix, pool) = without_call([shared, 17], seed)
    items = []
    for number, (name, pieces) in enumerate(asked):
        prompt = list(prefix)
        for piece in pieces:
            prompt += CALL if piece == "call" else pool[:piece]
        items.append(request(name, number, (prompt or CALL)[:110]))
    fresh = [said(forgetful[name].run([item])[0]) for (name, _), item in zip(asked, items, strict=True)]
    load = engine()
    options: dict[str, Any] = {"repeatable": True, "step_tokens": step_tokens, "max_num_seqs": 8}
    models = {name: load(*folders[name], **options, **config) for name, config in PARTS.items()}
    blocks = models["base"]._scheduler._pool
    blocks._empty = blocks._empty[:pages]
    for _ in range(2):  # the second time much is cached
        for (name, _), item, wanted in zip(asked, items, fresh, strict=True):
            assert said(models[name].run([item])[0]) == wanted, name
    for name in PARTS:  # and side by side, so that some are preempted
        mine = [place for place, (one, _) in enumerate(asked) if one == name]
        together = models[name].run([items[place] for place in mine])
        assert [said(output) for output in together] == [fresh[place] for place in mine]
