"""Models of one trunk in one engine: what they share, what they must not, and that no answer changes by it."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from gpu_worker.backends.base import EngineInput, EngineOutput, ModelRefused
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.decoder.readers import PrefixSums
from gpu_worker.backends.decoder.trunk import TrunkHasher
from gpu_worker.backends.torch_backend import TorchBackend
from sie_stream.trunks import own_bytes
from tests.decoders.families import ask, prompts, save, with_tokenizer
from tests.libraries.backends.launching import FixedClock, launch

EMBEDDING = {"head": "embedding"}
LAST = {"head": "embedding", "pooling": "last"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("base"), eos_token_id=None)


def changed(base: Path, folder: Path, tensor: str) -> Path:
    """A copy of the model in which one tensor is another."""
    shutil.copytree(base, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor] = -tensors[tensor]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def with_letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(save(tmp_path_factory.mktemp("letters"), eos_token_id=None))


@pytest.fixture(scope="module")
def forgetful(with_letters: Path) -> dict[str, DecoderModel]:
    """Models of an engine whose pool finds nothing."""
    load = engine()
    models = {kind: load(with_letters, repeatable=True, **config) for kind, config in KINDS.items()}
    models["lm"]._scheduler._pool.match = lambda digests: []
    return models


def engine() -> Callable[..., DecoderModel]:
    """Loads models into one engine."""
    backend = TorchBackend(FixedClock())

    def load(folder: Path, **config: Any) -> DecoderModel:
        asked = launch(folder, "torch", {"kind": "text_generation", "kv_mb": 4, **config})
        if (folder / "tokenizer.json").exists():
            asked = msgspec.structs.replace(asked, tokenizer=str(folder / "tokenizer.json"))
        model = backend.load(asked)
        assert isinstance(model, DecoderModel)
        return model

    return load


def digest(folder: Path, **config: Any) -> str:
    trunk = engine()(folder, **config).trunk
    assert trunk is not None
    return trunk.digest


def outputs(answers: list[EngineOutput]) -> list[tuple[bytes | None, list[int] | None]]:
    assert not [answer.error_message for answer in answers if answer.error_code]
    return [(answer.outputs, answer.token_ids) for answer in answers]


def vector(answer: EngineOutput) -> list[float]:
    return json.loads(answer.outputs or b"")["embedding"]


def test_the_trunk_is_the_same_under_other_heads_and_settings_that_change_no_key(base: Path, tmp_path: Path) -> None:
    trunk = digest(base)
    for tensor in ("lm_head.weight", "model.norm.weight"):
        assert digest(changed(base, tmp_path / tensor, tensor)) == trunk
    for config in (EMBEDDING, LAST, {"context_tokens": 40}, {"max_tokens": 3}, {"max_num_seqs": 2}):
        assert digest(base, **config) == trunk


@pytest.mark.parametrize(
    "config",
    [{"dtype": "bfloat16"}, {"precision": "int8"}, {"repeatable": True}],
    ids=lambda config: next(iter(config)),
)
def test_precision_and_order_of_sums_are_part_of_the_trunk(config: dict[str, Any], base: Path) -> None:
    plain, other = engine()(base).trunk, engine()(base, **config).trunk
    assert plain is not None
    assert other is not None
    assert plain.digest != other.digest
    assert (plain.weights, plain.network, plain.rope) == (other.weights, other.network, other.rope)
    assert plain.precision != other.precision


def test_other_names_of_the_same_precision_are_the_same_trunk(base: Path) -> None:
    assert digest(base, precision="fp32") == digest(base)
    assert digest(base, precision="bf16") == digest(base, dtype="bfloat16") != digest(base)


@pytest.mark.parametrize(
    "tensor",
    ["model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"],
)
def test_every_tensor_of_the_trunk_counts(tensor: str, base: Path, tmp_path: Path) -> None:
    assert digest(changed(base, tmp_path / "other", tensor)) != digest(base)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [("rope_parameters", {"rope_type": "default", "rope_theta": 500.0}, "rope"), ("rms_norm_eps", 0.1, "network")],
)
def test_constants_count_and_are_told_apart(key: str, value: object, part: str, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    config = json.loads((base / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, other = engine()(base).trunk, engine()(tmp_path).trunk
    assert plain is not None
    assert other is not None
    parts = ("weights", "network", "rope", "precision", "layout")
    assert [name for name in parts if getattr(plain, name) != getattr(other, name)] == [part]
    assert plain.digest != other.digest


def test_the_size_of_a_block_counts(base: Path, tmp_path: Path) -> None:
    load = engine()
    load(save(tmp_path, num_hidden_layers=6))  # its pages hold 32 tokens of the smaller one
    assert load(base).trunk != engine()(base).trunk


def test_a_prefix_of_one_model_serves_the_other_and_no_answer_changes(base: Path, tmp_path: Path) -> None:
    other = changed(base, tmp_path / "other", "lm_head.weight")
    (shared,) = prompts([48])
    items = [ask(str(n), shared + tail, max_tokens=6) for n, tail in enumerate(prompts([3, 7, 5, 9], seed=2))]
    folders = [base, other, base, other]
    alone = [outputs(engine()(folder).run([item])) for folder, item in zip(folders, items, strict=True)]
    load = engine()
    models = {folder: load(folder) for folder in (base, other)}
    assert [outputs(models[folder].run([item])) for folder, item in zip(folders, items, strict=True)] == alone
    assert (models[base].reused_tokens, models[other].reused_tokens) == (48, 2 * 48)
    assert alone[0] != outputs(engine()(other).run(items[:1])), "the heads differ, or this test shows nothing"


def test_other_weights_under_the_same_name_and_path_miss(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    load = engine()
    (prompt,) = prompts([40])
    item = ask("a", prompt, max_tokens=6)
    first = load(tmp_path)
    before = outputs(first.run([item]))
    changed(base, tmp_path, "model.layers.1.self_attn.k_proj.weight")
    second = load(tmp_path)
    after = outputs(second.run([item]))
    assert second.reused_tokens == 0
    assert after == outputs(engine()(tmp_path).run([item]))
    assert before == outputs(first.run([item]))
    assert first.reused_tokens == 32


def test_the_weights_of_a_trunk_are_in_memory_once(base: Path, tmp_path: Path) -> None:
    other = changed(base, tmp_path / "other", "lm_head.weight")
    load = engine()
    lm, same, foreign, embedder = load(base), load(base, max_tokens=3), load(other), load(base, **EMBEDDING)
    networks = [model._runner._network for model in (lm, same, foreign, embedder)]  # type: ignore[attr-defined]
    assert all(network._blocks is networks[0]._blocks for network in networks)
    assert [network._head is networks[0]._head for network in networks] == [True, True, False, False]
    held: dict[str, int] = {}
    added: list[int] = []
    for model in (lm, same, foreign, embedder):
        added.append(own_bytes(model.memory_bytes, model.parts, held))
        held |= model.parts
    tables = 160 * 8 * 4 * 2
    assert added[0] == lm.memory_bytes
    assert added[1] == tables
    assert added[2] == tables + 96 * 32 * 4 + 32 * 4
    assert added[3] == tables + 32 * 4
    apart = load(base, dtype="bfloat16")
    assert own_bytes(apart.memory_bytes, apart.parts, held) == apart.memory_bytes


def test_the_trunk_outlives_the_model_that_brought_it_and_goes_with_the_last(base: Path) -> None:
    load = engine()
    item = ask("a", prompts([20])[0], max_tokens=6)
    first = load(base)
    wanted = outputs(first.run([item]))
    blocks = first._runner._network._blocks  # type: ignore[attr-defined]
    second = load(base)
    del first
    gc.collect()
    assert outputs(second.run([item])) == wanted
    third = load(base)
    assert third._runner._network._blocks is blocks  # type: ignore[attr-defined]
    del second, third
    gc.collect()
    assert load(base)._runner._network._blocks is not blocks  # type: ignore[attr-defined]


def test_a_shorter_context_shares_the_trunk_all_the_same(base: Path) -> None:
    load = engine()
    short, long = load(base, context_tokens=40), load(base)
    item = ask("a", prompts([100])[0], max_tokens=6)
    assert outputs(long.run([item])) == outputs(engine()(base).run([item]))
    assert long._runner._network._blocks is short._runner._network._blocks  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # Gemma-2 caps its logits, but no states
@pytest.mark.parametrize("config", [EMBEDDING, LAST], ids=["mean", "last"])
def test_embeddings_are_those_of_transformers(config: dict[str, Any], family: str, tmp_path: Path) -> None:
    base = save(tmp_path, family)
    network = AutoModel.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    asked = prompts([1, 5, 17, 50])
    answers = engine()(base, step_tokens=33, **config).run([ask(str(n), one) for n, one in enumerate(asked)])
    for prompt, answer in zip(asked, answers, strict=True):
        with torch.inference_mode():
            states = network(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        pooled = states.mean(dim=0) if config is EMBEDDING else states[-1]
        assert vector(answer) == pytest.approx((pooled / pooled.norm()).tolist(), abs=2e-5)
        assert (answer.prompt_tokens, answer.token_ids, answer.finish_reason) == (len(prompt), None, None)


def test_a_mean_uses_only_blocks_whose_sum_is_known(base: Path) -> None:
    load = engine()
    lm, mean, last = load(base), load(base, **EMBEDDING), load(base, **LAST)
    (prompt,) = prompts([50])
    lm.run([ask("a", prompt, max_tokens=1)])
    for model, reused in ((last, 48), (mean, 0), (mean, 48), (lm, 48)):
        before = model.reused_tokens
        model.run([ask("b", prompt)])
        assert model.reused_tokens - before == reused


def test_sums_that_were_kept_first_are_dropped_first() -> None:
    sums = PrefixSums(16, 2)
    digests = [bytes([n]) for n in range(3)]
    for number, name in enumerate(digests):
        sums.keep(name, torch.tensor([float(number)]))
    assert [sums.usable(digests[:count]) for count in range(4)] == [0, 0, 2, 3]
    assert sums.sum_of(digests[2]).item() == 2.0


KINDS: dict[str, dict[str, Any]] = {"lm": {}, "score": {}, "mean": EMBEDDING, "last": LAST}
PARAMETERS: dict[str, dict[str, Any]] = {"lm": {"max_tokens": 4, "logprobs": 2}, "score": {"score": True}}


def request(kind: str, number: int, prompt: list[int]) -> EngineInput:
    return ask(str(number), prompt, **PARAMETERS.get(kind, {}))


@given(
    asked=st.lists(st.tuples(st.sampled_from(list(KINDS)), st.integers(1, 30)), min_size=2, max_size=6),
    shared=st.integers(0, 40),
    step_tokens=st.integers(8, 40),
    pages=st.integers(6, 40),
    seed=st.integers(0, 100),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_repeatable_answers_of_all_heads_have_the_same_bits_with_what_the_others_left_and_without(
    with_letters: Path,
    forgetful: dict[str, DecoderModel],
    asked: list[tuple[str, int]],
    shared: int,
    step_tokens: int,
    pages: int,
    seed: int,
) -> None:
    prefix, *tails = prompts([shared, *(length for _, length in asked)], seed)
    items = [request(kind, n, prefix + tail) for n, ((kind, _), tail) in enumerate(zip(asked, tails, strict=True))]
    options: dict[str, Any] = {"repeatable": True, "step_tokens": step_tokens, "max_num_seqs": 8}
    fresh = [forgetful[kind].run([item])[0].outputs for (kind, _), item in zip(asked, items, strict=True)]
    load = engine()
    models = {kind: load(with_letters, **options, **config) for kind, config in KINDS.items()}
    pool = models["lm"]._scheduler._pool
    pool._empty = pool._empty[:pages]
    for _ in range(2):  # the second time much is cached
        for (kind, _), item, wanted in zip(asked, items, fresh, strict=True):
            assert models[kind].run([item])[0].outputs == wanted, kind
    for kind in KINDS:  # and side by side, so that some are preempted
        mine = [place for place, (one, _) in enumerate(asked) if one == kind]
        together = models[kind].run([items[place] for place in mine])
        assert [answer.outputs for answer in together] == [fresh[place] for place in mine]


def test_an_embedding_head_follows_no_parameters(base: Path) -> None:
    model = engine()(base, **EMBEDDING)
    refused, served = model.run([ask("a", [5, 9], temperature=0.5), ask("b", [5, 9], seed=3)])
    assert refused.error_code == "invalid_parameters"
    assert "temperature" in (refused.error_message or "")
    assert len(vector(served)) == 32
    assert model.run([ask("c", [5] * 161)])[0].error_code == "context_length_exceeded"
    assert model.run([ask("c", [5] * 160)])[0].error_code is None


@pytest.mark.parametrize(("config", "known"), [({"head": "lmm"}, "embedding"), ({**EMBEDDING, "pooling": "x"}, "last")])
def test_heads_and_poolings_are_named(config: dict[str, Any], known: str, base: Path) -> None:
    with pytest.raises(ModelRefused, match=known):
        engine()(base, **config)


def told(value: str) -> Future[str]:
    found: Future[str] = Future()
    found.set_result(value)
    return found


def test_weights_are_hashed_once_and_a_damaged_file_is_refused(base: Path, tmp_path: Path) -> None:
    hasher = TrunkHasher()
    found = hasher.digests(base, told("sha256:base"))
    assert hasher.digests(tmp_path / "nowhere", told("sha256:base")) == found
    whole = (base / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ModelRefused, match="cannot read"):
        hasher.digests(tmp_path, told("sha256:damaged"))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.gguf").write_bytes(b"")
    assert hasher.digests(tmp_path, told("sha256:whole")).trunk == "sha256:whole"
