"""Training, saving and packaging of classical models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from sie_stream.input_schema import compile_schema
from sie_stream.spec import parse_documents
from zoo import classical
from zoo.datasets import BY_LABEL, BY_MEDIAN, cohort, snake, split, table
from zoo.recipes import MATRIX, catalogue, matching


def build(name: str, folder: Path) -> Path:
    (recipe,) = matching(catalogue(), f"{name}*")[:1]
    assert recipe.name == name
    folder.mkdir()
    classical.build(recipe, folder)
    return folder


@pytest.mark.parametrize("name", ["iris-logreg", "iris-nb-petal", "linnerud-ridge", "diabetes-lasso-high-bmi"])
def test_a_model_folder_is_complete_and_its_parts_agree(name: str, tmp_path: Path) -> None:
    folder = build(name, tmp_path / name)
    text = (folder / "model-spec.yaml").read_text()
    (spec,) = parse_documents(text)
    assert spec.name == name
    assert spec.source.digest
    assert len(spec.baselines) == 3
    assert spec.min_gpu_memory_mb >= max(baseline.memory_mb for baseline in spec.baselines)
    assert "&id" not in text, "YAML anchors are hard to read"
    takes, gives = compile_schema(spec.input_schema or {}), compile_schema(spec.output_schema or {})
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    golden = [json.loads(line) for line in (folder / "golden.jsonl").read_text().splitlines()]
    assert len(golden) == 5 <= len(samples)
    for inputs in (*samples, *(line["inputs"] for line in golden)):
        takes.check(json.dumps(inputs).encode())
    for line in golden:
        gives.check(json.dumps(line["outputs"]).encode())
    card = (folder / "MODEL_CARD.md").read_text()
    assert all(heading in card for heading in ("## Data", "## Quality", "## Licence", "## Limits"))
    assert yaml.safe_load(text)["source"]["uri"] == "."


@pytest.mark.parametrize("name", ["iris-logreg", "iris-tree", "wine-nb-high-ash"])
def test_the_same_recipe_gives_the_same_weights(name: str, tmp_path: Path) -> None:
    first, second = build(name, tmp_path / "first"), build(name, tmp_path / "second")
    weights = next(file.name for file in first.iterdir() if file.suffix in (".skops", ".onnx"))
    assert (first / weights).read_bytes() == (second / weights).read_bytes()
    assert (first / "golden.jsonl").read_text() == (second / "golden.jsonl").read_text()


def test_served_answers_that_differ_stop_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = classical.expected
    monkeypatch.setattr(classical, "expected", lambda *arguments: right(*arguments) + 0.01)
    with pytest.raises(AssertionError, match="iris-nb: served and trained answers differ"):
        build("iris-nb", tmp_path / "iris-nb")


def test_held_out_rows_are_not_trained_on_and_every_class_is_in_both() -> None:
    for dataset, cohorts in MATRIX.items():
        for which in cohorts:
            data = cohort(dataset, which)
            parts = split(data, 7)
            assert len(parts.train_rows) + len(parts.held_rows) == len(data.rows)
            assert set(data.features) <= set(table(dataset).features)
            if data.labels:
                assert len(np.unique(parts.train_answers)) == len(np.unique(parts.held_answers)) == len(data.labels)


def test_two_sides_of_a_median_are_the_whole() -> None:
    by_feature: dict[tuple[str, str], int] = {}
    for (dataset, which), (feature, _) in BY_MEDIAN.items():
        key = (dataset, feature)
        by_feature[key] = by_feature.get(key, 0) + len(cohort(dataset, which).rows)
    assert by_feature == {key: len(table(key[0]).rows) for key in by_feature}


def test_cohorts_of_labels_renumber_their_classes() -> None:
    for (dataset, which), labels in BY_LABEL.items():
        data = cohort(dataset, which)
        assert data.labels == labels
        whole = table(dataset)
        place = int(np.flatnonzero((whole.rows == data.rows[0]).all(axis=1))[0])
        assert whole.labels[whole.answers[place]] == data.labels[data.answers[0]]


def test_names_of_columns_become_snake_case() -> None:
    assert snake("mean radius (cm)") == "mean_radius_cm"


@pytest.mark.parametrize(("low", "high"), [(0.0, 3.0), (-2.0, 5.0), (0.04371, 0.05), (1e-9, 1e9)])
def test_ranges_only_grow_when_they_are_rounded(low: float, high: float) -> None:
    data = table("iris")
    rows = np.full((2, len(data.features)), low)
    rows[1] = high
    schema = classical.input_schema(type(data)(**{**_fields(data), "rows": rows}), data.features)
    limits = schema["properties"][data.features[0]]
    assert limits["minimum"] <= low <= high <= limits["maximum"]
    assert limits["minimum"] >= 0 or low < 0


def _fields(data: object) -> dict[str, object]:
    return {name: getattr(data, name) for name in type(data).__struct_fields__}  # type: ignore[attr-defined]
