"""The torch backend against transformers itself, on networks of a few thousand random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaModel,
)

from gpu_worker.backends.base import EngineInput, EngineOutput, LoadedModel, ModelRefused
from gpu_worker.backends.decoder.choice import next_token
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.backends.weights import weights_digest
from gpu_worker.decoding.parameters import Sampling
from tests.libraries.backends.launching import FixedClock, launch, row
from tests.libraries.backends.misshapen import each_misshapen, with_another_size
from tests.waiting import PATIENCE_S

VOCABULARY = 64
STOP = 2
CONTEXT = 48
PROMPTS = [[5, 9, 11], [7], [3, 3, 8, 1, 30, 41, 12], [60, 4]]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=STOP,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path, clock: FixedClock | None = None, **config: Any) -> LoadedModel:
    settings = {"kind": "text_generation", "max_tokens": 10, **config}
    return TorchBackend(clock or FixedClock()).load(launch(folder, "torch", settings, weights_digest(folder)))


def ask(request_id: str, prompt: list[int] | None, seed: int | None = None, **parameters: Any) -> EngineInput:
    raw = json.dumps(parameters).encode() if parameters else None
    return row(request_id, {"prompt": "?"}, token_ids=prompt, parameters=raw, seed=seed)


def tokens_of(answers: list[EngineOutput]) -> list[list[int] | None]:
    return [answer.token_ids for answer in answers]


def test_greedy_tokens_are_those_of_transformers(language_model: Path) -> None:
    network: Any = LlamaForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    answers = load(language_model).run([ask(str(place), prompt) for place, prompt in enumerate(PROMPTS)])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        whole = network.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0].tolist()
        expected = whole[len(prompt) :]
        stopped = STOP in expected
        assert answer.token_ids == (expected[: expected.index(STOP)] if stopped else expected)
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert answer.prompt_tokens == len(prompt)
        assert answer.completion_tokens == len(answer.token_ids or [])


def test_an_answer_does_not_depend_on_its_neighbours(language_model: Path) -> None:
    model = load(language_model)
    batch = [
        ask(str(place), prompt, place, temperature=1.0, top_p=0.9, max_tokens=6 + place)
        for place, prompt in enumerate(PROMPTS)
    ]
    together = tokens_of(model.run(batch))
    assert together == [tokens_of(model.run([item]))[0] for item in batch]
    assert together[::-1] == tokens_of(model.run(batch[::-1]))


def test_a_seed_repeats_and_another_seed_differs(language_model: Path) -> None:
    model = load(language_model)
    first, again, other = model.run([ask(f"{n}", [5, 9], seed, temperature=2.0) for n, seed in enumerate((4, 4, 5))])
    assert first.token_ids == again.token_ids != other.token_ids


def test_without_a_seed_the_request_id_decides(language_model: Path) -> None:
    model = load(language_model)
    first, other = model.run([ask("one", [5, 9], temperature=2.0), ask("two", [5, 9], temperature=2.0)])
    (again,) = model.run([ask("one", [5, 9], temperature=2.0)])
    assert first.token_ids == again.token_ids != other.token_ids


def test_stop_tokens_of_the_request_end_it_and_are_left_out(language_model: Path) -> None:
    model = load(language_model)
    (whole,) = model.run([ask("a", PROMPTS[0])])
    assert whole.token_ids
    stop = whole.token_ids[2]
    (cut,) = model.run([ask("a", PROMPTS[0], stop_token_ids=[stop])])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop)]
    assert cut.finish_reason == "stop"


def test_the_context_limits_prompt_and_answer(language_model: Path) -> None:
    model = load(language_model, context_tokens=8)
    fits, ends, too_long = model.run(
        [ask("a", [5], max_tokens=3), ask("b", [5, 9, 11, 4, 4, 4], max_tokens=30), ask("c", [5] * 8)]
    )
    assert len(fits.token_ids or []) <= 3
    assert len(ends.token_ids or []) <= 2
    assert too_long.error_code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("item", "code", "complaint"),
    [
        (ask("x", None), "tokens_missing", "Stage 0"),
        (ask("x", [VOCABULARY]), "invalid_input", "vocabulary"),
        (ask("x", [5], temperature=-1), "invalid_parameters", "temperature"),
        (ask("x", [5], max_tokens=0), "invalid_parameters", "max_tokens"),
        (ask("x", [5], top_p=0), "invalid_parameters", "top_p"),
        (row("x", {}, token_ids=[5], parameters=b"[]"), "invalid_parameters", "parameters"),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone(
    item: EngineInput, code: str, complaint: str, language_model: Path
) -> None:
    bad, good = load(language_model).run([item, ask("good", [5])])
    assert (bad.error_code, good.error_code) == (code, None)
    assert complaint in (bad.error_message or "")


def test_a_passed_deadline_ends_one_request_and_no_other(language_model: Path) -> None:
    clock = FixedClock(now=1_000, step_ms=10)
    model = load(language_model, clock)
    late = row("late", {}, token_ids=[5, 9, 11], deadline_at_ms=1_035)
    answers = model.run([late, ask("patient", [5, 9, 11])])
    assert answers[0].error_code == "deadline_exceeded"
    assert answers[1].error_code is None
    assert answers[1].completion_tokens > 3


def test_the_first_token_is_timed(language_model: Path) -> None:
    clock = FixedClock(now=1_000, step_ms=10)
    (answer,) = load(language_model, clock).run([row("a", {}, token_ids=[5], deadline_at_ms=2_000)])
    assert answer.first_token_ms == 10.0  # the clock steps when a deadline is looked at, once a step


def test_top_p_keeps_only_the_likeliest() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    narrow = Sampling(temperature=1.0, top_p=0.6)
    generator = torch.Generator().manual_seed(0)
    drawn = [next_token(logits, narrow, generator) for _ in range(400)]
    assert sorted(dict.fromkeys(drawn)) == [1, 2]
    assert drawn.count(1) / len(drawn) == pytest.approx(0.5 / 0.8, abs=0.08)


def test_temperature_sharpens() -> None:
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3]))
    generator = torch.Generator().manual_seed(0)
    cold = Sampling(temperature=0.1)
    assert [next_token(logits, cold, generator) for _ in range(50)].count(1) >= 45


def test_a_missing_tensor_is_refused(language_model: Path, tmp_path: Path) -> None:
    config = json.loads((language_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").write_bytes((language_model / "model.safetensors").read_bytes())
    with pytest.raises(ModelRefused, match="lacks tensors"):
        load(tmp_path)


def test_weights_that_are_a_pickle_are_refused(language_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((language_model / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="cannot read"):
        load(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("kind", "text-generation"), ("dtype", "float8"), ("threads", "two")])
def test_a_config_that_cannot_be_followed_is_refused(key: str, value: str, language_model: Path) -> None:
    with pytest.raises(ModelRefused, match=f"backend.config.{key}"):
        load(language_model, None, **{key: value})


BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": CONTEXT,
}
TEXTS = [[5, 6], [7] * 12, [9, 10, 11], [4] * 17, *([[place, 5, 6] for place in range(1, 10)])]


def bert(folder: Path, **changes: Any) -> Any:
    """Random weights, norms and biases too."""
    torch.manual_seed(2)
    network: Any = BertModel(BertConfig(**{**BERT, **changes}), add_pooling_layer=False).eval()
    with torch.no_grad():
        for tensor in network.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.2)
    network.save_pretrained(folder)
    return network


def embedded(folder: Path, texts: list[list[int]]) -> tuple[LoadedModel, list[EngineOutput]]:
    model = TorchBackend(FixedClock()).load(launch(folder, "torch", {"kind": "embedding", "max_tokens": 16}))
    return model, model.run([row(str(place), {}, token_ids=ids) for place, ids in enumerate(texts)])


def assert_embeds(network: Any, texts: list[list[int]], answers: list[EngineOutput]) -> None:
    for ids, answer in zip(texts, answers, strict=True):
        if answer.error_code is None:
            with torch.inference_mode():
                hidden = network(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
            mean = hidden.mean(axis=0)
            served = json.loads(answer.outputs or b"")["embedding"]
            assert np.allclose(served, mean / np.linalg.norm(mean), atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"hidden_act": "gelu_new", "layer_norm_eps": 0.1}, {"hidden_act": "relu"}])
def test_an_embedding_is_the_normalised_mean_whatever_its_neighbours(changes: dict[str, Any], tmp_path: Path) -> None:
    network = bert(tmp_path, **changes)
    model, answers = embedded(tmp_path, TEXTS)
    assert answers[3].error_code == "context_length_exceeded"
    assert_embeds(network, TEXTS, answers)
    assert model.memory_bytes >= sum(tensor.numel() for tensor in network.parameters()) * 4


def test_an_embedder_with_the_tensor_names_of_old_files_is_read(tmp_path: Path) -> None:
    network = bert(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {f"bert.{name}": tensor for name, tensor in load_file(file).items()}
    for new, ancient in old.items():
        renamed = {name.replace(new, ancient): tensor for name, tensor in renamed.items()}
    save_file(renamed, file)
    assert_embeds(network, TEXTS[:3], embedded(tmp_path, TEXTS[:3])[1])


@pytest.mark.parametrize("family", ["distilbert", "roberta"])
def test_an_encoder_that_is_no_bert_is_run_by_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    if family == "distilbert":
        sizes = {"dim": 24, "hidden_dim": 32, "n_layers": 2, "n_heads": 3}
        network: Any = DistilBertModel(DistilBertConfig(vocab_size=VOCABULARY, **sizes)).eval()
    else:
        network = RobertaModel(RobertaConfig(**BERT), add_pooling_layer=False).eval()
    network.save_pretrained(tmp_path)
    _, answers = embedded(tmp_path, TEXTS)
    assert_embeds(network, TEXTS, answers)


def test_an_encoder_without_a_tensor_is_refused(tmp_path: Path) -> None:
    bert(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelRefused, match=r"lacks tensors.*layer\.1\.output\.dense"):
        embedded(tmp_path, TEXTS)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
@pytest.mark.parametrize("wrong", [VOCABULARY, 1 << 40, -1])
def test_a_token_that_is_none_of_the_encoder_s_fails_alone(family: str, wrong: int, tmp_path: Path) -> None:
    if family == "bert":
        network = bert(tmp_path)
    else:
        sizes = {"dim": 24, "hidden_dim": 32, "n_layers": 1, "n_heads": 3}
        network = DistilBertModel(DistilBertConfig(vocab_size=VOCABULARY, **sizes)).eval()
        network.save_pretrained(tmp_path)
    texts = [[5, 6], [7, wrong, 8], [VOCABULARY - 1, 0]]
    _, answers = embedded(tmp_path, texts)
    assert [answer.error_code for answer in answers] == [None, "invalid_input", None]
    assert f"token id {wrong} lies outside the vocabulary of {VOCABULARY}" in (answers[1].error_message or "")
    assert_embeds(network, texts, answers)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_text_has_no_more_tokens_than_the_network_has_positions(family: str, tmp_path: Path) -> None:
    if family == "bert":
        network = bert(tmp_path, max_position_embeddings=8)
    else:  # counts positions from the padding's id on
        config = RobertaConfig(**{**BERT, "max_position_embeddings": 10}, pad_token_id=1)
        network = RobertaModel(config, add_pooling_layer=False).eval()
        network.save_pretrained(tmp_path)
    texts = [[5] * 8, [5] * 9]
    _, answers = embedded(tmp_path, texts)
    assert [answer.error_code for answer in answers] == [None, "context_length_exceeded"]
    assert_embeds(network, texts, answers)


def test_a_tensor_of_another_size_is_refused_when_the_encoder_is_loaded(tmp_path: Path) -> None:
    bert(tmp_path)
    for name in each_misshapen(tmp_path / "model.safetensors"):
        with pytest.raises(ModelRefused, match=rf"the size of {name} is .* by its config\.json") as refused:
            embedded(tmp_path, [])
        assert refused.value.code == "weights_unreadable"


def test_transformers_refusing_a_size_is_told_as_weights_that_do_not_fit(tmp_path: Path) -> None:
    RobertaModel(RobertaConfig(**BERT), add_pooling_layer=False).save_pretrained(tmp_path)
    with_another_size(tmp_path / "model.safetensors", "embeddings.LayerNorm.weight", 0)
    with pytest.raises(ModelRefused) as refused:
        embedded(tmp_path, [])
    assert refused.value.code == "weights_unreadable"


def test_other_stop_tokens_are_other_weights(language_model: Path, tmp_path: Path) -> None:
    for file in language_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    digest = weights_digest(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 9}))
    with pytest.raises(ModelRefused) as refused:
        TorchBackend(FixedClock()).load(launch(tmp_path, "torch", {"kind": "text_generation"}, digest))
    assert refused.value.code == "weights_digest_mismatch"


LOADS_BOTH = """
import sys
from gpu_worker.backends.torch_backend import TorchBackend
from tests.libraries.backends.launching import FixedClock, launch, row
backend = TorchBackend(FixedClock())
for folder, kind in zip(sys.argv[1:], ("text_generation", "embedding")):
    (answer,) = backend.load(launch(folder, "torch", {"kind": kind})).run([row("a", {}, token_ids=[5, 9])])
    assert answer.error_code is None
print([name for name in ("transformers", "torch._dynamo", "sklearn") if name in sys.modules])
"""


def test_decoders_and_bert_are_served_without_importing_transformers(language_model: Path, tmp_path: Path) -> None:
    bert(tmp_path)
    command = [sys.executable, "-c", LOADS_BOTH, str(language_model), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]"


def test_wrong_weights_are_told_before_what_is_wrong_in_them(language_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((language_model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    for digest, code in (("sha256:00", "weights_digest_mismatch"), ("", "weights_unreadable")):
        with pytest.raises(ModelRefused) as refused:
            TorchBackend(FixedClock()).load(launch(tmp_path, "torch", {"kind": "text_generation"}, digest))
        assert refused.value.code == code
