"""GGUF files: every quantisation against the package `gguf`, every family against its own safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from gpu_worker.backends.base import EngineOutput, ModelRefused
from gpu_worker.backends.decoder.files import files_of
from gpu_worker.backends.decoder.gguf_names import gguf_config
from gpu_worker.backends.gguf_file import GgufFile, widened
from tests.decoders.families import STOP, ask, load, prompts, save, with_tokenizer
from tests.decoders.gguf_files import write_gguf

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"]
"""Those that the package can write; the K types it can only read, from bytes that any will do for."""
READ_ONLY = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
FAMILIES = {
    "llama": {},
    "llama-tied-biased": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {},
    "qwen3": {},
    "phi3-window": {},
    "gemma2": {"query_pre_attn_scalar": 16},
}
"""The scale of Gemma's scores is not in a GGUF file: it is the width of a head."""


def one_tensor(file: Path, kind: str, raw: np.ndarray[Any, Any]) -> Path:
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("t", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", [*QUANTISED, *READ_ONLY])
def test_tensors_are_dequantised_as_the_package_does(kind: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    told = GGMLQuantizationType[kind]
    if kind in READ_ONLY:
        raw = generator.integers(0, 60, (4, 2 * READ_ONLY[kind]), dtype=np.uint8)
    else:
        raw = quantize(generator.normal(size=(4, 512)).astype(np.float32), told)
    found = GgufFile(one_tensor(tmp_path / "a.gguf", kind, raw)).tensor("t")
    assert found.shape == (4, 512)
    assert np.array_equal(found.float().numpy(), dequantize(raw, told))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_blocks_say_the_same_as_they_are(kind: str, tmp_path: Path) -> None:
    raw = quantize(np.random.default_rng(4).normal(size=(6, 96)).astype(np.float32), GGMLQuantizationType[kind])
    file = GgufFile(one_tensor(tmp_path / "a.gguf", kind, raw))
    blocks = file.blocks("t")
    assert blocks is not None
    assert blocks.shape == (6, 3, 20)
    assert torch.equal(widened(blocks).flatten(1), file.tensor("t"))


def told(answers: list[EngineOutput]) -> list[tuple[list[int] | None, str | None]]:
    assert not [answer.error_message for answer in answers if answer.error_code]
    return [(answer.token_ids, answer.finish_reason) for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_tokens_of_the_safetensors_it_was_made_from(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", family, **FAMILIES[family])
    file = write_gguf(folder, tmp_path / "model.gguf")
    items = [ask(str(n), prompt, max_tokens=24) for n, prompt in enumerate(prompts([1, 5, 17, 50]))]
    assert told(load(file).run(items)) == told(load(folder).run(items))
    assert files_of(file).stop_tokens == {STOP}


def test_a_folder_with_one_gguf_is_read_and_safetensors_go_first(tmp_path: Path) -> None:
    folder = save(tmp_path / "folder")
    alone = tmp_path / "alone"
    alone.mkdir()
    write_gguf(folder, alone / "model.gguf")
    assert files_of(alone).config.hidden_size == 32
    (folder / "other.gguf").write_bytes(b"not looked at")
    assert files_of(folder).config.hidden_size == 32
    (alone / "second.gguf").write_bytes(b"")
    with pytest.raises(ModelRefused, match=r"exactly one \*\.gguf"):
        files_of(alone)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_int4_straight_from_blocks_is_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "folder", hidden_size=64, head_dim=16, initializer_range=0.25)
    alone = tmp_path / "alone"
    alone.mkdir()
    file = write_gguf(folder, with_tokenizer(alone) / "model.gguf", kind)
    (prompt,) = prompts([60])
    scores: list[list[float]] = []
    configs: list[dict[str, Any]] = [{}, {"step_tokens": 16, "max_num_seqs": 4}, {"step_tokens": 512}]
    for config in configs:
        config["precision"] = "int4" if config else "dense"
        (answer,) = load(file.parent, **config).run([ask("a", prompt, score=True)])
        scores.append([one["logprob"] for one in msgspec.json.decode(answer.outputs or b"")["prompt_logprobs"]])
    for narrow in scores[1:]:
        likeness = np.corrcoef(narrow, scores[0])[0, 1]
        assert likeness > 0.95  # with rows of q and k out of order it is 0.4


@pytest.mark.parametrize("cut", [3, 20, 200, 5_000, 20_000])
def test_a_file_that_is_cut_short_is_refused(cut: int, tmp_path: Path) -> None:
    file = write_gguf(save(tmp_path / "folder"), tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelRefused, match="cannot read"):
        GgufFile(file)


def test_what_is_no_gguf_and_what_is_not_followed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGML" + bytes(60))
    with pytest.raises(ModelRefused, match="no GGUF file"):
        GgufFile(tmp_path / "a.gguf")
    file = GgufFile(write_gguf(save(tmp_path / "folder"), tmp_path / "b.gguf"))
    for key, value in (("rope.scaling.type", "yarn"), ("expert_count", 8)):
        changed = dict(file.metadata)
        file.metadata[f"llama.{key}"] = value
        with pytest.raises(ModelRefused, match=r"RoPE scaling 'yarn'|mixture of experts"):
            gguf_config(file)
        file.metadata = changed
    file.metadata["general.architecture"] = "falcon"
    with pytest.raises(ModelRefused, match="model_type 'falcon'"):
        gguf_config(file)
