"""Verdicts: equal bytes, equal content, within tolerance, and the cause of what differs."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.replay.compare import EQUAL, Again, Original, differences, distance_of, verdict
from tests.examples import examples

ORIGINAL = Original("r", "ok", "m", "1", "sha256:a", "sklearn (1.9)", b'{"score":0.5}', "", None, 64, 1.0, 9.0, 0)
AGAIN = Again("ok", "1", "sha256:a", "sklearn (1.9)", b'{"score":0.5}')
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def other(**changes: Any) -> Again:
    return msgspec.structs.replace(AGAIN, **changes)


@pytest.mark.parametrize(
    ("again", "cause"),
    [
        (other(outputs=b'{"score":0.6}'), "numeric"),
        (other(outputs=b'{"score":0.6}', version="2"), "version"),
        (other(outputs=b'{"score":0.6}', weights_digest="sha256:b"), "version"),
        (other(outputs=b'{"score":0.6}', engine="sklearn (2.0)"), "version"),
        (other(outputs=b'{"score":0.6}', seed=7), "seed"),
        (other(outputs=b'{"score":0.6}', by_chance=True), "seed"),
        (other(outputs=b'{"scores":[0.6, 0.2]}', by_chance=True), "seed"),
        (other(outputs=b'{"score":0.6}', by_chance=True, version="2"), "version"),
        (other(outputs=b'{"points":0.5}', version="2"), "schema"),
        (other(outputs=b'{"score":"high"}'), "schema"),
        (other(status="failed", outputs=None, error_code="engine_error"), "status"),
        (other(status="rejected", outputs=None, error_code="out_of_range", schema_refused=True), "schema"),
    ],
)
def test_a_difference_has_its_cause(again: Again, cause: str) -> None:
    found = verdict(ORIGINAL, again)
    assert (found.outcome, found.cause) == ("different", cause)
    assert found.fields


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ("sha256:a over sha256:b", "sha256:a over sha256:c", "version"),
        ("sha256:a over sha256:b", "sha256:a over sha256:b", "numeric"),
        ("sha256:a", "sha256:a over sha256:b", "numeric"),
    ],
)
def test_an_adapter_over_other_weights_is_another_version(before: str, after: str, cause: str) -> None:
    """Results that were written before bases were named say nothing of theirs."""
    original = msgspec.structs.replace(ORIGINAL, weights_digest=before)
    assert verdict(original, other(outputs=b'{"score":0.6}', weights_digest=after)).cause == cause


def test_what_is_equal() -> None:
    assert verdict(ORIGINAL, AGAIN) is EQUAL
    assert verdict(ORIGINAL, other(version="2", engine="other")) is EQUAL
    swapped = msgspec.structs.replace(ORIGINAL, outputs=b'{"a":1,"b":2}')
    assert verdict(swapped, other(outputs=b'{"b": 2, "a": 1}')).outcome == "equal"
    failed = msgspec.structs.replace(ORIGINAL, status="failed", outputs=None, error_code="invalid_input")
    assert verdict(failed, other(status="failed", outputs=None, error_code="invalid_input")) is EQUAL
    assert verdict(failed, other(status="failed", outputs=None, error_code="poison")).cause == "status"


def test_tolerance_is_for_numbers_only() -> None:
    near = other(outputs=b'{"score":0.5000001}')
    assert verdict(ORIGINAL, near).outcome == "different"
    assert verdict(ORIGINAL, near, 1e-6).outcome == "within"
    text = msgspec.structs.replace(ORIGINAL, outputs=b'{"label":"a"}')
    assert verdict(text, other(outputs=b'{"label":"b"}'), 1e9).outcome == "different"
    assert verdict(text, other(outputs=b'{"label":"b"}')).cause == "numeric"


@examples(200)
@given(JSON, JSON)
def test_differences_are_none_exactly_between_equals_and_the_same_from_both_sides(one: Any, two: Any) -> None:
    assert list(differences(one, one)) == []
    there, back = list(differences(one, two)), list(differences(two, one))
    assert there == back
    if one != two:
        assert there


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_distance_is_symmetric_and_zero_for_equals_only(one: float, two: float) -> None:
    found = distance_of(one, two)
    assert found == distance_of(two, one)
    assert found >= 0
    assert (found == 0) == (one == two) or abs(one - two) < 1e-300


def test_distance_is_absolute_below_one_and_relative_above() -> None:
    assert math.isclose(distance_of(0.1, 0.2), 0.1)
    assert math.isclose(distance_of(1_000_000, 1_000_001), 1e-6, rel_tol=1e-3)
    assert distance_of(-1e308, 1e308) == 2
    assert distance_of(math.inf, 1.0) == math.inf
