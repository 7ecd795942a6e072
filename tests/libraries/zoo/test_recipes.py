"""The catalogue, and what makes a built model current."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from zoo import fingerprint as fingerprints
from zoo.fingerprint import Built, fingerprint, is_current, sizes
from zoo.recipes import MATRIX, ONNX_COHORTS, catalogue, matching
from zoo.weights import pins

RECIPES = catalogue()


def test_there_are_more_than_a_hundred_models_of_every_kind() -> None:
    assert len(RECIPES) >= 117
    forms = Counter(recipe.form for recipe in RECIPES if recipe.builder == "classical")
    assert 0.25 <= forms["onnx"] / forms.total() <= 0.45
    assert {recipe.builder for recipe in RECIPES} >= {"language_model", "embedder_torch", "embedder_onnx", "file_type"}


def test_names_are_names_of_models_and_sorted() -> None:
    names = [recipe.name for recipe in RECIPES]
    assert names == sorted(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}", name) for name in names)


def test_tables_and_pins_name_only_what_exists() -> None:
    assert all(cohort in MATRIX[dataset] for dataset, cohort in ONNX_COHORTS)
    assert {name for recipe in RECIPES for name in recipe.weights} == set(pins())
    for pin in pins().values():
        assert pin.licence
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pin.files.values())


def test_patterns_choose_models() -> None:
    assert [recipe.name for recipe in matching(RECIPES, "iris-nb*")] == ["iris-nb", "iris-nb-petal", "iris-nb-sepal"]
    assert matching(RECIPES, "minilm") == matching(RECIPES, "*minilm*") != []
    assert matching(RECIPES, "no such model") == []


def test_a_changed_recipe_changes_its_own_fingerprint_only() -> None:
    recipe, other = matching(RECIPES, "wine-knn*")[:2]
    reseeded = msgspec.structs.replace(recipe, seed=recipe.seed + 1)
    assert fingerprint(reseeded) != fingerprint(recipe) == fingerprint(recipe)
    assert fingerprint(other) != fingerprint(recipe)
    assert fingerprint(msgspec.structs.replace(recipe, cost=99)) == fingerprint(recipe)


def test_changed_code_reaches_only_the_builders_that_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    for file in fingerprints.ZOO.glob("*.py"):
        (zoo / file.name).write_text(file.read_text())
    monkeypatch.setattr(fingerprints, "ZOO", zoo)

    def digests() -> dict[str, str]:
        for cached in (fingerprints.code_digest, fingerprints._imports, fingerprints._tree):
            cached.cache_clear()
        return {name: fingerprints.code_digest(name) for name in ("classical", "language_model", "file_type")}

    try:
        before = digests()
        with (zoo / "algorithms.py").open("a") as file:
            file.write("# a comment\n")
        assert digests() == before
        with (zoo / "algorithms.py").open("a") as file:
            file.write("MORE = 1\n")
        after = digests()
        assert after["classical"] != before["classical"]
        assert {**after, "classical": ""} == {**before, "classical": ""}
        with (zoo / "package.py").open("a") as file:
            file.write("MORE = 1\n")
        shared = digests()
        assert all(shared[name] != after[name] for name in shared)
    finally:
        monkeypatch.undo()
        digests()


def test_a_folder_is_current_only_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert not is_current(folder, "f1")
    folder.mkdir()
    (folder / "model.skops").write_bytes(b"weights")
    assert not is_current(folder, "f1")
    (folder / "build.json").write_bytes(msgspec.json.encode(Built("f1", 0.1, sizes(folder))))
    assert is_current(folder, "f1")
    assert not is_current(folder, "f2")
    (folder / "model.skops").write_bytes(b"cut")
    assert not is_current(folder, "f1")
    (folder / "model.skops").unlink()
    assert not is_current(folder, "f1")
