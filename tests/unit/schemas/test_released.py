"""What is released stays as it is, and what comes after it can be read together with it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from importlib.resources import files

import avro.schema
import msgspec
import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType

from schemas import catalog
from schemas.catalog import CURRENT, NAMES, RELEASED, USER_ID_FIRST, Released, released_text, schema_text, subjects
from schemas.compat import incompatibilities
from sie_stream import records
from sie_stream.ids import TopicNames


@pytest.mark.parametrize("released", RELEASED, ids=lambda released: released.file)
def test_released_files_are_unchanged(released: Released) -> None:
    digest = hashlib.sha256(released_text(released).encode()).hexdigest()
    assert digest == released.sha256, (
        f"{released.file} was changed. A released schema never changes: restore it, and add a new version "
        f"({released.name}/v{released.version + 1}.avsc and a line in catalog.json) instead."
    )


@pytest.mark.parametrize("name", NAMES)
def test_current_is_the_newest_release(name: str) -> None:
    assert schema_text(name) == released_text(CURRENT[name]), (
        f"{name}.avsc differs from {CURRENT[name].file}: release it as v{CURRENT[name].version + 1} in catalog.json"
    )


@pytest.mark.parametrize("name", NAMES)
def test_versions_count_up_and_fit_together(name: str) -> None:
    history = [released for released in RELEASED if released.name == name]
    assert [released.version for released in history] == [*range(1, len(history) + 1)]
    for old, new in itertools.pairwise(history):
        assert old.id < new.id
        assert incompatibilities(released_text(new), released_text(old), "FULL") == ()


def test_the_catalog_is_complete() -> None:
    folder = files("schemas")
    developed = sorted(entry.name.removesuffix(".avsc") for entry in folder.iterdir() if entry.name.endswith(".avsc"))
    assert developed == sorted(NAMES)
    stored = sorted(
        f"{directory.name}/{entry.name}"
        for directory in folder.joinpath("released").iterdir()
        if directory.is_dir()
        for entry in directory.iterdir()
    )
    assert stored == sorted(released.file for released in RELEASED)
    ids = [released.id for released in RELEASED]
    assert ids == [*range(1, len(ids) + 1)], "ids are given in order and never again"
    assert max(ids) < USER_ID_FIRST
    assert {name for _, name in subjects(TopicNames())} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_valid_avro_and_every_field_is_documented(name: str) -> None:
    avro.schema.parse(schema_text(name))
    schema = json.loads(schema_text(name))
    assert f"{schema['namespace']}.{schema['name']}" == f"{catalog.NAMESPACE}.{name}"
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            if "fields" in part or "symbols" in part:
                assert part["doc"], part["name"]
            for field in part.get("fields", ()):
                assert field["doc"], field["name"]
                pending.append(field["type"])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ControlEnvelope"])
def test_schemas_have_the_fields_of_the_structs(name: str) -> None:
    fields = [field["name"] for field in json.loads(schema_text(name))["fields"]]
    assert sorted(fields) == sorted(getattr(records, name).__struct_fields__)


def test_the_result_in_a_raw_output_is_the_result() -> None:
    raw, result = json.loads(schema_text("RawOutput")), json.loads(schema_text("Result"))
    del result["namespace"]
    assert raw["fields"][0]["type"] == result


# ---------------------------------------------------------------- the rules themselves


def record(*fields: Mapping[str, object], name: str = "R") -> str:
    return json.dumps({"type": "record", "name": name, "fields": fields})


A = {"name": "a", "type": "int"}
COLOURS = {"type": "enum", "name": "Colour", "symbols": ["red", "blue"]}
MORE_COLOURS = {**COLOURS, "symbols": ["red", "blue", "green"]}
CASES = [
    (record(A), record(A), "", ""),
    (record(A, {"name": "b", "type": "string"}), record(A), "b: the writer has no such field", ""),
    (record(A, {"name": "b", "type": "string", "default": ""}), record(A), "", ""),
    (record({"name": "a", "type": "long"}), record(A), "", "a: long cannot be read as int"),
    (record({"name": "a", "type": ["null", "int"]}), record(A), "", "a: null cannot be read as int"),
    (record({"name": "b", "type": "int", "aliases": ["a"]}), record(A), "", "a: the writer has no such field"),
    (record(A, name="S"), record(A), "expected to be called 'S'", "expected to be called 'R'"),
    (record({"name": "a", "type": MORE_COLOURS}), record({"name": "a", "type": COLOURS}), "", "symbols green"),
    (
        record({"name": "a", "type": {**MORE_COLOURS, "default": "red"}}),
        record({"name": "a", "type": {**COLOURS, "default": "red"}}),
        "",
        "",
    ),
    (
        record({"name": "a", "type": {"type": "array", "items": "string"}}),
        record({"name": "a", "type": {"type": "array", "items": "int"}}),
        "a[]: int cannot be read as string",
        "a[]: string cannot be read as int",
    ),
    (
        record({"name": "next", "type": ["null", "R"]}),
        record({"name": "next", "type": ["null", "R"]}),
        "",
        "",
    ),
]


@pytest.mark.parametrize(("new", "old", "backward", "forward"), CASES)
def test_compatibility_rules(new: str, old: str, backward: str, forward: str) -> None:
    for level, expected, reader, writer in (("BACKWARD", backward, new, old), ("FORWARD", forward, old, new)):
        found = incompatibilities(new, old, level)  # type: ignore[arg-type]  # a literal in a tuple
        assert (expected == "" and not found) or any(expected and expected in reason for reason in found), found
        # the second opinion of Apache Avro's own library
        verdict = ReaderWriterCompatibilityChecker().get_compatibility(
            avro.schema.parse(reader), avro.schema.parse(writer)
        )
        assert (verdict.compatibility is SchemaCompatibilityType.compatible) == (not found)


def test_full_is_both() -> None:
    new, old = record(A, {"name": "b", "type": "string"}), record({"name": "a", "type": "string"})
    found = incompatibilities(new, old, "FULL")
    assert [reason.partition(":")[0] for reason in found] == ["backward", "backward", "forward"]
    assert incompatibilities(new, old, "NONE") == ()


def test_catalog_is_plain_json() -> None:
    text = files("schemas").joinpath("released", "catalog.json").read_bytes()
    assert tuple(msgspec.json.decode(text, type=list[Released])) == RELEASED
