"""Paths of a declared adapter: where its base is, and whose tokenizer it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_stream.cli.declare import load_specs, with_absolute_paths
from sie_stream.spec.model import ModelSpec


def declared(
    folder: Path, base: str = "../base", backend: str = "torch", tokenizer: object = "tokenizer.json"
) -> ModelSpec:
    """The declaration lies beside the adapter's folder; its base is elsewhere."""
    (folder / "here").mkdir(exist_ok=True)
    file = folder / "here" / "support.yaml"
    lines = [
        "model_id: support",
        "version: 1.0.0",
        "service_type: text-generation",
        "min_gpu_memory_mb: 60",
        "source: {uri: ./adapter}",
        "lora: {base: chat, rank: 4}",
        f"backend: {{name: {backend}, config: {{kind: text_generation, base: '{base}'}}}}",
        f"tokenizer: {{path: '{tokenizer}'}}",
    ]
    file.write_text("\n".join(lines))
    [(spec, at)] = load_specs(file, None)
    return with_absolute_paths(spec, at)


def path_of(spec: ModelSpec) -> str:
    assert spec.tokenizer is not None
    return spec.tokenizer.path


def test_a_relative_base_starts_at_the_folder_of_the_declaration(tmp_path: Path) -> None:
    spec = declared(tmp_path)
    assert spec.source.uri == str(tmp_path / "here/adapter")
    assert spec.backend.config["base"] == str(tmp_path / "base")
    assert declared(tmp_path, f"file://{tmp_path}/base").backend.config["base"] == str(tmp_path / "base")
    assert declared(tmp_path, str(tmp_path / "base")).backend.config["base"] == str(tmp_path / "base")


@pytest.mark.parametrize(("base", "backend"), [("org/model-8b", "vllm"), ("s3://models/base", "torch")])
def test_what_is_no_path_stays_as_it_is(base: str, backend: str, tmp_path: Path) -> None:
    assert declared(tmp_path, base, backend).backend.config["base"] == base


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(tmp_path: Path) -> None:
    for folder in ("base", "here/adapter"):
        (tmp_path / folder).mkdir(parents=True)
    assert path_of(declared(tmp_path)) == "tokenizer.json", "nobody has one: what was said is what is missed"
    (tmp_path / "base/tokenizer.json").write_text("{}")
    assert path_of(declared(tmp_path)) == str(tmp_path / "base/tokenizer.json")
    own = tmp_path / "own.json"
    assert path_of(declared(tmp_path, tokenizer=own)) == str(own)
    (tmp_path / "here/adapter/tokenizer.json").write_text("{}")
    assert path_of(declared(tmp_path)) == "tokenizer.json", "beside the adapter"
