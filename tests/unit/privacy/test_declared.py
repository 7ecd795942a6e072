"""How protection is declared, and what is wrong with a declaration that would not protect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scheduler.launches import launch_of
from sie_stream.input_schema import InvalidInput, compile_schema
from sie_stream.input_schema.breaking import schema_breaks
from sie_stream.privacy.rules import rules_of
from sie_stream.problems import SpecError
from sie_stream.spec import Problem, parse_object

MINIMAL: dict[str, Any] = {"model_id": "m", "version": "1.0", "source": "m.skops", "min_gpu_memory_mb": 64}
NAMED: dict[str, Any] = {"properties": {"customer": {"type": "string"}, "age": {"type": "integer"}}}
SEALED: dict[str, Any] = {"properties": {"reason": {"type": "string", "pii": "encrypt"}}}


def problems(**fields: Any) -> list[Problem]:
    with pytest.raises(SpecError) as caught:
        parse_object(MINIMAL | fields)
    return list(caught.value.problems)


def test_marks_say_which_fields_and_how() -> None:
    schema = compile_schema(
        {
            "properties": {
                "a": {"pii": True},
                "b": {"pii": "hash"},
                "c": {"type": "array", "items": {"type": "object", "properties": {"d": {"pii": "encrypt"}}}},
                "e": {"pii": False},
            }
        }
    )
    assert schema.pii_fields == ("a", "b", "c[].d")
    assert schema.protected == {"b": "hash", "c[].d": "encrypt"}


def test_true_alone_protects_nothing_in_results() -> None:
    schema = json.dumps({"properties": {"a": {"pii": True}}}).encode()
    assert rules_of(schema, schema, "") is None


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"pii": "encrpt"}}}, "properties.a.pii"),
        ({"properties": {"a": {"type": "array", "items": {"pii": "hash"}}}}, "properties.a.items.pii"),
        ({"properties": {}, "additionalProperties": {"pii": "hash"}}, "additionalProperties.pii"),
        (
            {"additionalProperties": {"type": "object", "properties": {"b": {"pii": "hash"}}}},
            "additionalProperties.b.pii",
        ),
    ],
)
def test_a_mark_that_would_protect_nothing_is_refused(schema: dict[str, Any], path: str) -> None:
    (problem,) = problems(input_schema=schema)
    assert problem.path == f"input_schema.{path}"
    if path == "properties.a.pii":
        assert (problem.allowed, problem.nearest) == (("true", "false", "hash", "encrypt"), "encrypt")


def test_a_marked_value_is_not_in_the_error_about_it() -> None:
    schema = compile_schema({"properties": {"email": {"type": "string", "maxLength": 3, "pii": "hash"}}})
    with pytest.raises(Exception, match="email") as caught:
        schema.check(b'{"email": "ada@example.org"}')
    assert "ada" not in str(caught.value)


@pytest.mark.parametrize(
    "row", [b'"ada@example.org"', b'{"person": "ada@example.org"}', b'{"people": ["ada@example.org"]}']
)
def test_nor_is_what_stands_where_marked_fields_belong(row: bytes) -> None:
    person = {"type": "object", "properties": {"email": {"type": "string", "pii": True}}}
    schema = compile_schema({"properties": {"person": person, "people": {"type": "array", "items": person}}})
    with pytest.raises(InvalidInput) as caught:
        schema.check(row)
    assert caught.value.code == "wrong_type"
    assert "ada" not in str(caught.value)


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"type": "object", "additionalProperties": {"type": "number"}},
        {"type": "object", "properties": {"a": {"type": "number"}}},
        {"type": "object", "additionalProperties": {}},
    ],
)
@pytest.mark.parametrize("value", [b"1e999", b'{"ada@example.org": 1e999}'])
def test_names_below_a_marked_field_are_not_repeated(node: dict[str, Any], value: bytes) -> None:
    """A map from addresses to something has its personal data in the names."""
    schema = compile_schema({"properties": {"contacts": {**node, "pii": "encrypt"}}})
    with pytest.raises(InvalidInput) as caught:
        schema.check(b'{"contacts": {"ada@example.org": ' + value + b"}}")
    assert caught.value.field == "contacts"
    assert "ada" not in str(caught.value)


def test_the_subject_is_a_required_input_that_can_name_somebody() -> None:
    (missing,) = problems(input_schema=NAMED, privacy={"subject": "custmer"})
    assert (missing.path, missing.value) == ("privacy.subject", "'custmer'")
    (optional,) = problems(input_schema={**NAMED, "required": ["age"]}, privacy={"subject": "customer"})
    assert optional.allowed == ("age",)
    (near,) = problems(input_schema={**NAMED, "required": ["customer"]}, privacy={"subject": "custmer"})
    assert near.nearest == "customer"
    number = {"properties": {"x": {"type": "number"}}, "required": ["x"]}
    (kind,) = problems(input_schema=number, privacy={"subject": "x"})
    assert "cannot name a person" in kind.message
    spec = parse_object(MINIMAL | {"input_schema": {**NAMED, "required": ["age"]}, "privacy": {"subject": "age"}})
    assert launch_of(spec).privacy_subject == "age"


def test_protected_outputs_are_not_pooled() -> None:
    (problem,) = problems(output_schema=SEALED, fusion="pooled")
    assert (problem.path, problem.allowed) == ("fusion", ("auto", "fused"))
    assert launch_of(parse_object(MINIMAL | {"output_schema": SEALED})).fusion == "fused"


def test_another_protection_of_an_output_is_a_break_for_its_readers() -> None:
    plain = json.dumps({"properties": {"reason": {"type": "string", "pii": True}}}).encode()
    sealed = json.dumps(SEALED).encode()
    (found,) = schema_breaks(plain, sealed, "output")
    assert str(found) == "output.reason: its value is written in another way (pii: plain before, encrypt now)"
    assert schema_breaks(plain, sealed, "input") == ()
