"""Paths of a declared adapter: where its base is, and whose tokenizer it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from sie_stream.cli import declare as declare_module
from sie_stream.cli.declare import load_specs, with_absolute_paths
from sie_stream.commands import ApplyModel
from sie_stream.edge.connection import Connection
from sie_stream.spec.model import BackendSpec, ModelSpec


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


@pytest.mark.parametrize(
    ("base", "backend"),
    [("org/model-8b", "vllm"), ("s3://models/base", "torch"), ("model:chat", "torch"), ("model:chat@1.0.0", "torch")],
)
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


def test_what_names_a_model_as_its_base_is_applied_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else it would depend on the names of files whether a folder can be applied."""
    asked: list[str] = []

    def ask(_connection: object, records: Sequence[ApplyModel], subjects: Sequence[str], *_rest: object) -> list[None]:
        asked.extend(json.loads(bytes(record.spec))["name"] for record in records)
        assert asked == subjects
        return []

    monkeypatch.setattr(declare_module, "ask", ask)
    base = declared(tmp_path, "model:chat").model_copy(update={"name": "chat", "lora": None, "backend": BackendSpec()})
    specs = [(declared(tmp_path, "model:chat"), tmp_path), (base, tmp_path)]
    declare_module.declare(cast("Connection", None), specs, 1.0, lambda: None)
    assert asked == ["chat", "support"]


def test_over_a_declared_model_a_tokenizer_that_is_not_beside_the_adapter_is_left_to_the_base(tmp_path: Path) -> None:
    """As where the base is a folder: PEFT writes none."""
    assert path_of(declared(tmp_path, "model:chat")) == "tokenizer.json", "nobody can say from here"
    (tmp_path / "here/adapter").mkdir(parents=True)
    assert declared(tmp_path, "model:chat").tokenizer is None
    (tmp_path / "here/adapter/tokenizer.json").write_text("{}")
    assert path_of(declared(tmp_path, "model:chat")) == "tokenizer.json"
