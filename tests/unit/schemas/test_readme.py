"""The field tables of schemas/README.md are those of the schemas."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest

from schemas.catalog import CURRENT, NAMES, USER_ID_FIRST, schema_text, subjects
from sie_stream.ids import TopicNames

README = files("schemas").joinpath("README.md").read_text(encoding="utf-8")


def type_text(schema: Any) -> str:
    match schema:
        case str():
            return schema
        case list():
            return " or ".join(type_text(branch) for branch in schema)
        case {"type": "array", "items": items}:
            return f"array of {type_text(items)}"
        case {"type": "enum", "symbols": symbols}:
            return f"enum {', '.join(symbols)}"
        case _:
            return str(schema["name"])


def table(fields: list[dict[str, Any]]) -> str:
    """Markdown table of the fields of one record."""
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        default = f"`{json.dumps(field['default'])}`" if "default" in field else ""
        rows.append(f"| `{field['name']}` | {type_text(field['type'])} | {default} | {field['doc']} |")
    return "\n".join(rows)


def records_in(schema: Any) -> list[dict[str, Any]]:
    """A record and the records inside it, outermost first."""
    match schema:
        case list():
            return [record for branch in schema for record in records_in(branch)]
        case {"type": "record", "fields": fields}:
            return [schema, *(record for field in fields for record in records_in(field["type"]))]
        case _:
            return []


SECTIONS = {record["name"]: record for name in NAMES for record in records_in(json.loads(schema_text(name)))}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_record_has_its_table(name: str) -> None:
    record = SECTIONS[name]
    expected = f"{record['doc']}\n\n{table(record['fields'])}\n"
    heading = f"### {name}\n\n"
    assert heading in README, f"schemas/README.md needs:\n\n{heading}{expected}"
    found = README.partition(heading)[2]
    assert found.startswith(expected), f"the section {name} of schemas/README.md should be:\n\n{heading}{expected}"


def test_ids_and_subjects() -> None:
    for name in NAMES:
        where = ", ".join(f"`{subject}`" for subject, found in subjects(TopicNames()) if found == name)
        assert f"| {CURRENT[name].id} | {name} | {CURRENT[name].version} | {where} |\n" in README
    assert re.search(rf"\b{USER_ID_FIRST}\b", README)
