"""Dead letters of ingress: bytes that nobody can decode, on a topic of a model with protected fields."""

from __future__ import annotations

import pytest

from tests.unit.processors.kit import machine, record, route, take_up


@pytest.mark.parametrize(("mark", "kept"), [("encrypt", b""), (True, b'{"name": "Ada\xff')])
def test_they_are_kept_only_where_nothing_in_them_is_protected(mark: object, kept: bytes) -> None:
    schema = {"properties": {"name": {"type": "string", "pii": mark}}}
    ingress = machine(route(input_topic="orders", input_group="g", input_schema=schema), topics=["orders"])
    written = take_up(ingress, record(b'{"name": "Ada\xff', topic="orders"), group="g")
    (letter,) = written.letters
    assert (letter.reason, letter.original, letter.original_bytes) == ("bad_utf8", kept, 14)
    assert all("Ada" not in result.error.message for result in written.results if result.error is not None)
