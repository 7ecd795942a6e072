"""Files as people write them: many documents, odd YAML, hostile YAML."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.spec import SpecError, parse_documents
from tests.examples import examples

FLAT = 'model_id: {}\nversion: "1"\nsource: x\nmin_gpu_memory_mb: 1\n'
BODY = {"model_id": "a", "version": "1", "source": "x", "min_gpu_memory_mb": 1}


def names(text: str, filename: str) -> list[str]:
    return [spec.name for spec in parse_documents(text, filename)]


def message(text: str, filename: str = "f.yaml") -> str:
    with pytest.raises(SpecError) as caught:
        parse_documents(text, filename)
    return str(caught.value)


def test_many_documents_in_one_text() -> None:
    first, second = json.dumps(BODY), json.dumps(BODY | {"model_id": "b"})
    assert names(FLAT.format("a") + "---\n" + FLAT.format("b") + "---\n", "f.yaml") == ["a", "b"]
    assert names(f"{first}\n{second}\n", "f.jsonl") == ["a", "b"]
    assert names(f"[{first}, {second}]", "f.json") == ["a", "b"]
    assert names(f"{first}\n{second}", "-") == ["a", "b"]
    assert names("\ufeff" + FLAT.format("a"), "f.yaml") == ["a"]
    listed = {"kind": "List", "items": [BODY, BODY | {"model_id": "b"}]}
    assert names(json.dumps(listed), "f.json") == ["a", "b"]


def test_yaml_that_starts_with_a_brace() -> None:
    assert names("{model_id: a, version: '1', source: x, min_gpu_memory_mb: 1}", "f.yaml") == ["a"]


def test_anchors_and_merge_keys_work() -> None:
    text = "slas: &s {p99_latency_ms: 5}\n" + FLAT.format("a") + "probes: {}\nlabels: {<<: {a: b}}\n"
    (spec,) = parse_documents(text, "f.yaml")
    assert spec.labels == {"a": "b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no declaration"),
        ("---\n---\n", "no declaration"),
        ("[]", "no declaration"),
        ("3", "a declaration is an object"),
        ("- 3\n", "a declaration is an object"),
        ("a: [", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("model_id: a\nmodel_id: b\n", "'model_id' is given twice (line 2)"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("released: 2024-01-01", "reads this as a date"),
        ("x: 2024-99-99", "f.yaml"),
        ("on: 1", "is not text; put it in quotes"),
        ("x: .nan", "not a finite number"),
        ("x: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("x: !!set {a}", "reads this as a set"),
        ("a: &a [1, *a]", "a declaration is small"),
        ("[" * 50_000, "f.yaml"),
        ("- " * 5_000 + "a", "f.yaml"),
        ("kind: Deployment\napiVersion: apps/v1", "Allowed: ModelService"),
    ],
)
def test_texts_that_hold_no_declaration(text: str, words: str) -> None:
    assert words in message(text)


def test_aliases_that_explode_are_refused() -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    assert "a declaration is small" in message("\n".join(lines))


def test_broken_json_names_the_place() -> None:
    assert "line 2 column" in message('{"a": 1,\n "b": }', "f.json")
    assert "nested too deep" in message("[" * 100_000, "f.json")


def test_a_text_without_end_is_refused() -> None:
    assert "larger than 16 MiB" in message("#" * (16 * 1024 * 1024 + 1))


@examples(200)
@given(st.text(st.sampled_from("ab:-[]{}&*#!|>'\"%@`,? \n\t0.~"), max_size=40))
def test_no_text_does_anything_but_parse_or_raise_spec_error(text: str) -> None:
    with pytest.raises(SpecError):
        parse_documents(text, "f.yaml")


def test_where_yaml_breaks_is_told_by_file_and_line_alone() -> None:
    with pytest.raises(SpecError) as caught:
        parse_documents("a: 1\nb: c: 2\n", "broken.yaml")
    text = str(caught.value)
    assert "broken.yaml: not valid YAML: mapping values are not allowed" in text
    assert "at line 2, column 5" in text
    assert "unicode string" not in text
