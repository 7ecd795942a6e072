"""Finding backends, and the identity of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from gpu_worker.backends.base import ModelRefused, backend_names, load_backend
from gpu_worker.backends.weights import local_source, only_file, verified_digest, weights_digest
from sie_stream.errors import ConfigError
from tests.libraries.backends.launching import FixedClock, launch


def test_the_embedded_backends_are_found_by_name() -> None:
    assert {"onnx", "sklearn", "torch"} <= set(backend_names())
    backend = load_backend("sklearn", FixedClock())
    assert backend.name == "sklearn"
    assert {"scikit-learn", "skops"} <= set(backend.versions())


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'sklearn'"):
        load_backend("sklern", FixedClock())


def files(folder: Path, **contents: str) -> Path:
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def test_the_digest_covers_weights_and_network_but_no_papers(tmp_path: Path) -> None:
    files(tmp_path, model__safetensors="a", config__json="{}", README__md="hello")
    before = weights_digest(tmp_path)
    files(tmp_path, README__md="changed", samples__jsonl="{}")
    assert weights_digest(tmp_path) == before
    files(tmp_path, config__json="{ }")
    network_changed = weights_digest(tmp_path)
    files(tmp_path, config__json="{}", model__safetensors="b")
    assert len({before, network_changed, weights_digest(tmp_path)}) == 3


def test_a_file_has_the_digest_of_a_folder_with_only_it(tmp_path: Path) -> None:
    files(tmp_path, model__onnx="graph")
    assert weights_digest(tmp_path / "model.onnx") == weights_digest(tmp_path)


def test_renaming_and_moving_bytes_between_files_change_the_digest(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = files(tmp_path / "one", a__safetensors="12", b__safetensors="3")
    two = files(tmp_path / "two", a__safetensors="1", b__safetensors="23")
    assert weights_digest(one) != weights_digest(two)


def test_a_mismatch_is_refused_and_an_empty_digest_accepts(tmp_path: Path) -> None:
    files(tmp_path, model__onnx="graph")
    digest = weights_digest(tmp_path)
    assert verified_digest(tmp_path, "") == verified_digest(tmp_path, digest) == digest
    with pytest.raises(ModelRefused, match="not the declared ones"):
        verified_digest(tmp_path, f"sha256:{'0' * 64}")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="make models"):
        weights_digest(tmp_path)
    with pytest.raises(ModelRefused, match="make models"):
        weights_digest(tmp_path / "absent")


def test_two_files_of_a_kind_are_refused(tmp_path: Path) -> None:
    files(tmp_path, a__onnx="1", b__onnx="2")
    with pytest.raises(ModelRefused, match=r"a\.onnx, b\.onnx"):
        only_file(tmp_path, ".onnx")


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("sklearn", {"kind": "classifier", "features": ["age"], "classes": ["no", "yes"]}),
        ("onnx", {"kind": "classifier", "features": ["age"], "classes": ["no", "yes"]}),
        ("torch", {"kind": "embedding"}),
        ("torch", {"kind": "text_generation"}),
    ],
)
def test_a_source_that_nobody_fetches_is_named_as_it_was_declared(backend: str, config: dict[str, object]) -> None:
    declared = structs.replace(launch(Path(), backend, config), source="s3://models/churn")
    with pytest.raises(ModelRefused, match="s3://models/churn") as refused:
        load_backend(backend, FixedClock()).load(declared)
    assert refused.value.code == "source_not_fetched"


def test_a_path_may_be_written_as_a_file_uri() -> None:
    assert local_source("file:///models/churn") == local_source("/models/churn") == Path("/models/churn")
