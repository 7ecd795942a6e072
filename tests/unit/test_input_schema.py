"""The input_schema language: verdicts, words, odd input, and the fast check against its slow twin."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sie_stream.errors import InvalidRequest
from sie_stream.input_schema import CODES, InputValidator, InvalidInput, compile_schema
from sie_stream.problems import SpecError
from tests.examples import examples

CLAIM = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mean_radius": {"type": "number", "exclusiveMinimum": 0},
        "segment": {"enum": ["retail", "business"]},
        "note": {"type": "string", "minLength": 2, "maxLength": 5, "pattern": "^[a-zé]+$"},
        "flag": {"type": "boolean", "nullable": True},
        "history": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        "home": {"type": "object", "properties": {"zip": {"type": "string", "pii": True, "maxLength": 5}}},
        "rate": {"type": "number", "enum": [0.5, 1, 2]},
        "any": {},
    },
    "required": ["age"],
}


def verdict(validator: InputValidator, raw: bytes) -> str:
    """'' when accepted, else the code."""
    try:
        validator.check(raw)
    except InvalidInput as error:
        return error.code
    return ""


def refusal(schema: dict, raw: bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        compile_schema(schema).check(raw)
    assert caught.value.code in CODES
    return caught.value


@pytest.mark.parametrize(
    ("row", "code", "field"),
    [
        ('{"age": 1}', "", ""),
        ('{"age": 1, "mean_radius": 3, "segment": "retail", "note": "abé", "flag": null}', "", ""),
        ('{"age": 1, "history": [1, 2.5], "home": {"zip": "10115"}, "rate": 1.0, "any": null}', "", ""),
        (' \n{"age":\t1} ', "", ""),
        ("{}", "missing_field", "age"),
        ('{"age": 1, "mean_radus": 3}', "unknown_field", "mean_radus"),
        ('{"age": 1, "home": {"zap": "1"}}', "unknown_field", "home.zap"),
        ('{"age": "1"}', "wrong_type", "age"),
        ('{"age": true}', "wrong_type", "age"),
        ('{"age": 1.0}', "wrong_type", "age"),
        ('{"age": null}', "wrong_type", "age"),
        ('{"age": [1]}', "wrong_type", "age"),
        ('{"age": 121}', "out_of_range", "age"),
        ('{"age": -1}', "out_of_range", "age"),
        ('{"age": 9223372036854775808}', "out_of_range", "age"),
        ('{"age": ' + "9" * 5000 + "}", "out_of_range", "age"),
        ('{"age": 1, "mean_radius": 0}', "out_of_range", "mean_radius"),
        ('{"age": 1, "mean_radius": 1e999}', "not_finite", "mean_radius"),
        ('{"age": 1, "mean_radius": -Infinity}', "not_finite", "mean_radius"),
        ('{"age": 1, "mean_radius": NaN}', "not_finite", "mean_radius"),
        ('{"age": 1, "mean_radius": ' + "9" * 400 + "}", "not_finite", "mean_radius"),
        ('{"age": 1, "any": {"deep": [NaN]}}', "not_finite", "any.deep[0]"),
        ('{"age": 1, "any": ' + "9" * 400 + "}", "not_finite", "any"),
        ('{"age": 1, "segment": "retial"}', "not_allowed", "segment"),
        ('{"age": 1, "note": "a"}', "too_short", "note"),
        ('{"age": 1, "note": "abcdef"}', "too_long", "note"),
        ('{"age": 1, "note": "AB"}', "not_allowed", "note"),
        ('{"age": 1, "history": []}', "too_short", "history"),
        ('{"age": 1, "history": [1, 2, 3, 4]}', "too_long", "history"),
        ('{"age": 1, "history": [1, "x"]}', "wrong_type", "history[1]"),
        ('{"age": 1, "history": {"0": 1}}', "wrong_type", "history"),
        ('{"age": 1, "rate": 3}', "not_allowed", "rate"),
        ('{"age": 1, "note": "\\ud800"}', "bad_utf8", "note"),
        ("[]", "wrong_type", ""),
        ("null", "wrong_type", ""),
        ("", "not_json", ""),
        ("{", "not_json", ""),
        ('{"age": 1} x', "not_json", ""),
        ('{"age": 01}', "not_json", ""),
        ("{'age': 1}", "not_json", ""),
    ],
)
def test_each_fault_has_its_code_and_names_its_field(row: str, code: str, field: str) -> None:
    validator = compile_schema(CLAIM)
    if not code:
        validator.check(row.encode())
        validator.check(msgspec.Raw(row.encode()))
        return
    with pytest.raises(InvalidInput) as caught:
        validator.check(row.encode())
    assert (caught.value.code, caught.value.field) == (code, field)
    assert isinstance(caught.value, InvalidRequest)


def test_bytes_that_are_not_text() -> None:
    assert refusal(CLAIM, b'{"age": "\xff"}').code == "bad_utf8"
    assert refusal(CLAIM, b'{"age": "\xed\xa0\x80"}').code == "bad_utf8"
    assert refusal(CLAIM, b"\xef\xbb\xbf" + b'{"age": 1}').code == "not_json"
    assert refusal(CLAIM, '{"age": 1}'.encode("utf-16")).code == "bad_utf8"


@pytest.mark.parametrize("count", [40, 5_000, 200_000])
def test_deep_nesting_is_refused_at_any_depth_without_a_crash(count: int) -> None:
    deep = b"[" * count + b"]" * count
    assert refusal(CLAIM, b'{"age": 1, "any": ' + deep + b"}").code == "too_deep"
    assert refusal({}, b'{"any": ' + deep + b"}").code == "too_deep"
    assert refusal(CLAIM, b'{"age": ' + deep + b"}").code == "too_deep"
    assert refusal(CLAIM, b'{"any": ' + b"[" * count).code == "too_deep"


def test_brackets_in_text_and_beside_each_other_are_not_depth() -> None:
    validator = compile_schema({})
    validator.check(json.dumps({"text": "[{" * 500 + '"\\'}).encode())
    validator.check(json.dumps({"rows": [[]] * 500}).encode())


def test_a_repeated_key_counts_last_but_each_value_must_be_allowed() -> None:
    validator = compile_schema(CLAIM)
    validator.check(b'{"age": 1, "age": 2}')
    assert verdict(validator, b'{"age": "x", "age": 2}') == "wrong_type"
    assert verdict(validator, b'{"age": 2, "age": 500}') == "out_of_range"


def test_messages_say_value_allowed_range_and_nearest_spelling() -> None:
    assert "Did you mean 'mean_radius'?" in str(refusal(CLAIM, b'{"age": 1, "mean_radus": 3}'))
    message = str(refusal(CLAIM, b'{"age": 121}'))
    assert "age = 121" in message
    assert "0 to 120" in message
    assert "Did you mean 'retail'?" in str(refusal(CLAIM, b'{"age": 1, "segment": "retial"}'))
    assert "send 1" in str(refusal(CLAIM, b'{"age": 1.0}'))
    assert "1 more problem " in str(refusal(CLAIM, b'{"agee": 1}'))
    long = refusal(CLAIM, json.dumps({"age": "x" * 100_000}).encode())
    assert len(str(long)) < 300


def test_personal_data_never_appears_in_a_message() -> None:
    for bad in ('"1011555"', "[10115]", "10115", '"10\\ud800115"'):
        error = refusal(CLAIM, b'{"age": 1, "home": {"zip": ' + bad.encode() + b"}}")
        assert error.field == "home.zip"
        assert "10115" not in str(error)


def test_what_a_validator_tells_about_its_schema() -> None:
    validator = compile_schema(CLAIM)
    assert validator.fields[:2] == ("age", "mean_radius")
    assert validator.required == ("age",)
    assert validator.pii_fields == ("home.zip",)
    assert validator.text_field is None
    prompt = compile_schema(
        {
            "properties": {"prompt": {"type": "string"}, "top_k": {"type": "integer", "default": 3}},
            "required": ["prompt"],
        }
    )
    assert prompt.text_field == "prompt"
    assert prompt.defaults == {"top_k": 3}


def test_additional_properties() -> None:
    closed = compile_schema({"properties": {"a": {"type": "number"}}})
    open_ = compile_schema({"properties": {"a": {"type": "number"}}, "additionalProperties": True})
    typed = compile_schema({"properties": {"a": {"type": "number"}}, "additionalProperties": {"type": "integer"}})
    mapping = compile_schema({"additionalProperties": {"type": "integer"}})
    assert verdict(closed, b'{"b": 1}') == "unknown_field"
    assert verdict(open_, b'{"b": "x"}') == ""
    assert verdict(open_, b'{"b": "\xff"}') == "bad_utf8"
    assert verdict(open_, b'{"b": 1e999}') == "not_finite"
    assert verdict(typed, b'{"a": 1.5, "b": 1}') == ""
    assert verdict(typed, b'{"b": 1.5}') == "wrong_type"
    assert verdict(mapping, b'{"b": 1}') == ""
    assert verdict(mapping, b'{"b": "1"}') == "wrong_type"
    assert verdict(compile_schema({}), b'{"anything": [1, {"goes": null}]}') == ""


def test_schema_problems_are_reported_all_at_once_with_nearest_spelling() -> None:
    with pytest.raises(SpecError) as caught:
        compile_schema(
            {
                "properties": {
                    "a": {"type": "nmber", "minimum": 0},
                    "b": {"type": "string", "minimum": 3, "patern": "x"},
                    "c": {"enum": []},
                    "d": {"type": "integer", "default": "x"},
                    "e": {"type": "integer", "minimum": 0.2, "maximum": 0.8},
                    "f": {"type": "string", "pattern": "("},
                    "g": {"type": ["number", "string"]},
                    "h": {"type": "array", "minItems": 3, "maxItems": 1},
                    "i": {"enum": ["a", 1]},
                    "j": {"type": "number", "minimum": math.nan},
                    "k": 3,
                    'l"': {"type": "number"},
                    "m": {"type": "string", "pii": "yes"},
                    "n": {"oneOf": []},
                },
                "required": ["aa"],
            }
        )
    found = {problem.path.removeprefix("schema."): problem for problem in caught.value.problems}
    assert set(found) == {
        "required[0]",
        "properties.a.type",
        "properties.b.minimum",
        "properties.b.patern",
        "properties.c.enum",
        "properties.e",
        "properties.f.pattern",
        "properties.g.type",
        "properties.h.minItems",
        "properties.i.enum",
        "properties.j.minimum",
        "properties.k",
        "properties",
        "properties.m.pii",
        "properties.n.oneOf",
    }
    assert found["properties.a.type"].nearest == "number"
    assert found["properties.b.patern"].nearest == "pattern"
    with pytest.raises(SpecError, match="default"):
        compile_schema({"properties": {"d": {"type": "integer", "default": "x"}}})


@pytest.mark.parametrize("schema", [{"type": "array"}, {"type": "object", "nullable": True}, {"type": ["object"]}, []])
def test_the_inputs_of_a_model_are_one_object(schema: object) -> None:
    with pytest.raises(SpecError):
        compile_schema(schema)  # type: ignore[arg-type]  # the wrong type is the point


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, object] = {"type": "number"}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(SpecError, match="32 levels"):
        compile_schema({"properties": {"a": schema}})


NUMBERS = st.one_of(
    st.integers(-10, 10),
    st.sampled_from([0, 1, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, 10**320]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.5, 1.0, -0.0, 1e308, 5e-324]),
)
TEXTS = st.text(st.sampled_from("abzé😀\n\u2028 "), max_size=4)
NAMES = st.sampled_from(["a", "b", "mean radius", "é", "", "f0", "class"])
BOUND = st.one_of(st.integers(-5, 5), st.floats(-5, 5), st.sampled_from([2**63, -(2**70), 1e300]))


def ranged(kind: str) -> st.SearchStrategy[dict]:
    words = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    return st.dictionaries(st.sampled_from(words), BOUND, max_size=2).map(lambda limits: {"type": kind} | limits)


LEAVES = st.one_of(
    st.just({}),
    st.just({"type": "boolean"}),
    ranged("number"),
    ranged("integer"),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={
            "minLength": st.integers(0, 2),
            "maxLength": st.integers(2, 4),
            "pattern": st.sampled_from(["^a", "b$", "."]),
        },
    ),
    st.lists(TEXTS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.lists(st.integers(-2, 2), min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.just({"type": "number", "enum": [0.5, 1, 2]}),
)


def composites(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={"items": inner, "minItems": st.integers(0, 1), "maxItems": st.integers(1, 3)},
        ),
        objects(inner),
    )


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[dict]) -> dict:
    schema: dict = {"type": "object"}
    properties = draw(st.dictionaries(NAMES, inner, max_size=3))
    if draw(st.booleans()):
        schema["properties"] = properties
        names = sorted(properties)
        schema["required"] = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.one_of(st.booleans(), inner))
    return schema


NULLABLE = st.one_of(LEAVES, LEAVES.map(lambda leaf: leaf | {"nullable": True}))
SCHEMAS = objects(st.recursive(NULLABLE, composites, max_leaves=5))
ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)


def fitting(schema: dict) -> st.SearchStrategy:
    """Values that often fit the schema: the types are right, the limits by chance."""
    kind = schema.get("type")
    if "enum" in schema:
        return st.one_of(st.sampled_from(schema["enum"]), NUMBERS)
    if kind == "object":
        members = {name: fitting(body) for name, body in schema.get("properties", {}).items()}
        needed = {name: value for name, value in members.items() if name in schema.get("required", ())}
        rest = {name: value for name, value in members.items() if name not in needed}
        return st.fixed_dictionaries(needed, optional=rest | {"extra": ANY_JSON})
    if kind == "array":
        return st.lists(fitting(schema.get("items", {})), max_size=3)
    leaf = {"number": NUMBERS, "integer": NUMBERS, "string": TEXTS, "boolean": st.booleans()}.get(str(kind), ANY_JSON)
    return st.one_of(leaf, st.none()) if schema.get("nullable") else leaf


# Spellings at which JSON parsers are known to differ.
PATCHES = [
    *(b"NaN", b"-Infinity", b"1e999", b"-", b"1.", b".5", b"1e5", b"-0", b"0", b"9" * 330, b"0." + b"3" * 900),
    *(b"\\ud800", b"\\ud83d\\ude00", b"\\u0000", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x00", b"\x7f"),
    *(b"[" * 40, b"{}", b",", b'"a":1,', b"//", b"\x0b"),
]


@st.composite
def rows(draw: st.DrawFn) -> tuple[dict, bytes]:
    """A schema, and bytes: a fitting row, any JSON, or either of them with a few bytes changed."""
    schema = draw(SCHEMAS)
    value = draw(st.one_of(fitting(schema), fitting(schema), ANY_JSON))
    raw = json.dumps(value, ensure_ascii=draw(st.booleans())).encode()
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(raw)))
        cut = draw(st.integers(0, 3))
        patch = draw(
            st.one_of(
                st.binary(max_size=3),
                st.sampled_from(PATCHES),
            )
        )
        raw = raw[:at] + patch + raw[at + cut :]
    return schema, raw


@examples(500)
@given(rows())
@example(({"type": "object", "properties": {"a": {"type": "number"}}}, b'{"a": ' + b"9" * 309 + b"}"))
@example(({"type": "object"}, b'{"a": ' + b"9" * 309 + b"}"))
@example(({"type": "object"}, b'{"a": ' + b"9" * 300 + b"}"))
@example(({"type": "object", "properties": {}, "additionalProperties": True}, b'{"a": "\\udc00"}'))
def test_fast_and_slow_give_the_same_verdict(case: tuple[dict, bytes]) -> None:
    schema, raw = case
    try:
        validator = compile_schema(schema)
    except SpecError:
        return  # contradictory limits; the language's own tests cover them
    slow = ""
    try:
        validator.check_exact(raw)
    except InvalidInput as error:
        slow = error.code
    assert verdict(validator, raw) == slow
