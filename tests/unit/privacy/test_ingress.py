"""Dead letters of ingress: bytes that nobody can decode, on a topic of a model with protected fields."""

from __future__ import annotations

import pytest

from processors.ingress.events import RoutesChanged
from tests.unit.processors.kit import machine, record, route, take_up


@pytest.mark.parametrize(("mark", "kept"), [("encrypt", b""), (True, b'{"name": "Ada\xff')])
def test_they_are_kept_only_where_nothing_in_them_is_protected(mark: object, kept: bytes) -> None:
    schema = {"properties": {"name": {"type": "string", "pii": mark}}}
    ingress = machine(route(input_topic="orders", input_group="g", input_schema=schema), topics=["orders"])
    written = take_up(ingress, record(b'{"name": "Ada\xff', topic="orders"), group="g")
    (letter,) = written.letters
    assert (letter.reason, letter.original, letter.original_bytes) == ("bad_utf8", kept, 14)
    assert all("Ada" not in result.error.message for result in written.results if result.error is not None)


PEOPLE = {"properties": {"name": {"type": "string", "pii": "encrypt"}}}
ADA = b'{"model": "people", "inputs": {"name": "Ada\xff"}}'


@pytest.mark.parametrize(("rows", "kept"), [(["wine"], ADA), (["wine", "people"], b"")])
def test_on_the_common_topic_they_may_be_for_any_model(rows: list[str], kept: bytes) -> None:
    ingress = machine(*(route(name, **({"input_schema": PEOPLE} if name == "people" else {})) for name in rows))
    (letter,) = take_up(ingress, record(ADA)).letters
    assert (letter.original, letter.original_bytes, letter.source_offset) == (kept, len(ADA), 0)
    if kept:
        return
    ingress.decide([RoutesChanged((("people", None),))])
    assert take_up(ingress, record(ADA, offset=1)).letters[0].original == ADA


def test_a_schema_that_cannot_be_read_may_mark_fields() -> None:
    ingress = machine(route("people", input_schema={"properties": {"name": {"type": "strng", "pii": "encrypt"}}}))
    assert take_up(ingress, record(ADA)).letters[0].original == b""


def test_whose_a_record_is_of_a_topic_that_is_bound_no_more_nobody_knows() -> None:
    ingress = machine(route(input_topic="orders", input_schema=PEOPLE))
    ingress.decide([RoutesChanged((("wine", None),))])
    (letter,) = take_up(ingress, record(b'{"name":"Ada"}', topic="orders")).letters
    assert (letter.reason, letter.original) == ("not_bound", b"")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'"Ada Lovelace"', "a string"),
        (b'["Ada Lovelace"]', "an array"),
        (b'{"model": "people", "inputs": {}, "session": {"name": "Ada Lovelace"}}', "session = an object"),
    ],
)
def test_inputs_that_stand_where_a_request_belongs_are_not_repeated(value: bytes, said: str) -> None:
    written = take_up(machine(route("people", input_schema=PEOPLE)), record(value))
    (result,) = written.results
    assert result.error is not None
    assert said in result.error.message
    assert "Ada" not in result.error.message + written.letters[0].message
