"""The build as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.waiting import PATIENCE_S
from zoo.build import remove_strangers

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.integration]


def zoo_build(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zoo.build", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)


def test_a_second_build_does_nothing_and_a_damaged_model_is_built_again(tmp_path: Path) -> None:
    wanted = ("--out", str(tmp_path), "--only", "iris-nb-*", "--jobs", "1")
    first = zoo_build(*wanted)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "2 models built" in first.stdout
    assert "building 2 models" in first.stdout, "in a pipe, too, a build is not silent until its end"
    assert "2 of 2 models: iris is done" in first.stdout
    assert sorted(folder.name for folder in tmp_path.glob("iris*")) == ["iris-nb-petal", "iris-nb-sepal"]
    assert "up to date" in zoo_build(*wanted).stdout
    (tmp_path / "iris-nb-petal" / "model.onnx").write_bytes(b"")
    assert "1 models built" in zoo_build(*wanted).stdout
    assert (tmp_path / "iris-nb-petal" / "model.onnx").stat().st_size > 0


def test_a_pattern_without_a_match_is_wrong_use(tmp_path: Path) -> None:
    done = zoo_build("--out", str(tmp_path), "--only", "no-such-model")
    assert done.returncode == 2
    assert "--list" in done.stdout


def test_the_list_builds_and_removes_nothing(tmp_path: Path) -> None:
    assert len(zoo_build("--list", "--out", str(tmp_path)).stdout.splitlines()) >= 117
    assert list(tmp_path.iterdir()) == []


def test_what_left_the_catalogue_is_removed_and_foreign_folders_stay(tmp_path: Path) -> None:
    for name, file in (("old-model", "build.json"), ("my-own", "model-spec.yaml"), ("iris-nb", "build.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    remove_strangers(tmp_path, {"iris-nb"}, Console(quiet=True))
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["iris-nb", "my-own"]
