"""Schema diff and golden answers: what refuses a new version before anything starts."""

from __future__ import annotations

import msgspec
import pytest

from sie_stream.golden import golden_differences
from sie_stream.input_schema.breaking import schema_breaks

OLD = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "income": {"type": "number"},
        "plan": {"enum": ["basic", "gold"]},
        "note": {"type": "string"},
    },
    "required": ["age"],
}


def changed(required: list[str] | None = None, without: str = "", **properties: object) -> bytes:
    body = {**OLD["properties"], **properties}
    body.pop(without, None)
    return msgspec.json.encode(
        {"type": "object", "properties": body, "required": ["age"] if required is None else required}
    )


@pytest.mark.parametrize(
    ("side", "new", "breaks"),
    [
        ("input", changed(), []),
        ("input", changed(city={"type": "string"}), []),
        ("input", changed(age={"type": "number", "minimum": 0, "maximum": 120}), []),
        ("input", changed(plan={"enum": ["basic", "gold", "new"]}), []),
        ("input", changed(required=["age", "income"]), ["input.income: it was optional and is required now"]),
        ("input", changed(required=["age", "x"], x={"type": "number"}), ["input.x: a new required field"]),
        ("input", changed(required=[], without="age"), ["input.age: a required field was removed"]),
        ("input", changed(income={"type": "integer"}), ["input.income: its type narrowed from number to integer"]),
        ("input", changed(age={"type": "integer", "minimum": 0, "maximum": 100}), ["input.age: its range changed"]),
        ("input", changed(plan={"enum": ["gold"]}), ["input.plan: values basic were allowed"]),
        ("input", changed(note={"type": "string", "pattern": "x"}), ["input.note: its pattern changed"]),
        ("output", changed(without="note"), []),
        ("output", changed(required=[], without="age"), ["output.age: a required field was removed"]),
        ("output", changed(required=[]), ["output.age: it was always there"]),
        ("output", changed(income={"type": "string"}), ["output.income: its type changed from number to string"]),
        ("output", changed(plan={"enum": ["basic", "gold", "x"]}), ["output.plan: values x are new"]),
        ("output", changed(note={"type": "string", "nullable": True}), ["output.note: it was never null"]),
    ],
)
def test_breaks(side: str, new: bytes, breaks: list[str]) -> None:
    found = [str(one) for one in schema_breaks(msgspec.json.encode(OLD), new, "input" if side == "input" else "output")]
    assert len(found) == len(breaks), found
    for one, start in zip(found, breaks, strict=True):
        assert one.startswith(start)


@pytest.mark.parametrize(
    ("expected", "answered", "tolerance", "count"),
    [
        ({"score": 0.5}, {"score": 0.5004, "more": 1}, 0.001, 0),
        ({"score": 0.5}, {"score": 0.502}, 0.001, 1),
        ({"score": 0.5}, {}, 0.1, 1),
        ({"a": [1, {"b": "x"}]}, {"a": [1, {"b": "y"}]}, 0.0, 1),
        ({"flag": True}, {"flag": 1}, 0.0, 1),
        ({"a": [1, 2]}, {"a": [1]}, 0.0, 1),
    ],
)
def test_golden(expected: object, answered: object, tolerance: float, count: int) -> None:
    found = golden_differences(msgspec.json.encode(expected), msgspec.json.encode(answered), tolerance)
    assert len(found) == count, found
