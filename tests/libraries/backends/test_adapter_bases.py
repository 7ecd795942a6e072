"""What `backend.config.base` may be, and what is said of everything else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.bases import base_of, refuse_adapter
from tests.libraries.backends.launching import launch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base as a folder and as a file, an adapter, and what is neither."""
    for name, file in (("base", "config.json"), ("gguf", "model.gguf"), ("adapter", "adapter_config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.safetensors").write_text("")
    os.symlink(tmp_path / "base", tmp_path / "link")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    return tmp_path


@pytest.mark.parametrize("name", ["base", "gguf", "link", "gguf/model.gguf"])
@pytest.mark.parametrize("form", [str, "file://{}".format])
def test_folders_files_of_gguf_links_and_uris_of_files_are_bases(
    name: str, form: Callable[[object], str], folder: Path
) -> None:
    asked = launch(folder / "adapter", "torch", {"base": form(folder / name), "base_digest": "sha256:0"})
    assert base_of(asked) == folder / name


def test_a_model_without_base_is_no_adapter(folder: Path) -> None:
    assert base_of(launch(folder, "torch", {})) is None
    assert base_of(launch(folder, "torch", {"base": None})) is None


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (
            "smollm2",
            "by an absolute path; a declared model is named as `model:NAME`.",
        ),
        ("model:chat", "'model:chat': the declaration of that model is not known"),
        ("{}/gone", "gone': there is no such folder on this worker. Expected is the folder of the model that"),
        ("{}/loop", "there is no such folder"),
        ("a\0b", "there is no such folder"),
        ("{}/adapter", "it is an adapter itself, and an adapter over another one is not followed"),
        ("{}/empty", "neither a config.json nor a *.gguf"),
        ("{}/weights.safetensors", "it is a file. Expected is the folder"),
        ("s3://models/base", "s3://models/base: weights are not fetched from s3://"),
    ],
)
def test_everything_else_is_refused_by_the_name_of_the_field(base: str, said: str, folder: Path) -> None:
    with pytest.raises(ModelRefused) as refused:
        base_of(launch(folder / "adapter", "torch", {"base": base.format(folder)}))
    assert refused.value.message.startswith("backend.config.base: ")
    assert said in refused.value.message


def test_a_digest_of_a_base_that_is_not_named_is_refused(folder: Path) -> None:
    """It would be compared with nothing."""
    with pytest.raises(ModelRefused, match=r"and there is no backend\.config\.base"):
        base_of(launch(folder, "torch", {"base_digest": "sha256:0"}))


def test_an_adapter_that_is_declared_as_a_whole_model_is_told_what_it_lacks(folder: Path) -> None:
    with pytest.raises(ModelRefused, match=r"Declare its base, too: .lora: \{base: MODEL") as refused:
        refuse_adapter(folder / "adapter")
    assert "backend.config.base" in refused.value.message
    refuse_adapter(folder / "base")
    refuse_adapter(folder / "gone")
