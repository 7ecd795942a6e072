"""A request that a bridge brought says from where: in its header, its story and its spans."""

from __future__ import annotations

from msgspec.structs import replace

from sie_stream.origin import HEADER_BYTES_MAX, ORIGIN_HEADER, Origin, origin_header, origin_in
from sie_stream.tracing.otlp import spans_json
from sie_stream.tracing.story import tell
from tests.unit.tracing.test_story import SOURCE, T0, answered

ORIGIN = Origin("elsewhere:9092", "orders", 3, 17, T0 - 40)


def test_it_comes_back_as_it_was_and_strangers_cannot_break_it() -> None:
    assert origin_in(origin_header(ORIGIN)) == ORIGIN
    assert origin_in(()) is None
    for bad in (b"", b"{", b"[]", b'{"cluster":1}', b"\xff", b"[" * 1_000, b"x" * (HEADER_BYTES_MAX + 1)):
        assert origin_in(((ORIGIN_HEADER, bad),)) is None, bad
    assert origin_header(replace(ORIGIN, cluster="c" * HEADER_BYTES_MAX)) == ()


def test_the_story_begins_where_the_record_was() -> None:
    told = tell(answered(sources=(replace(SOURCE, origin=ORIGIN),)))
    assert [step.stage for step in told.steps][:4] == ["placement", "bridge", "client", "ingress"]
    step = told.steps[1]
    assert step.what == "carried from another cluster: orders/3@17 of elsewhere:9092"
    assert (step.at_ms, step.lasted_ms) == (T0, 40.0)
    assert told.origin == ORIGIN
    spans = spans_json(told, "0")["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [span["name"] for span in spans][1] == "bridge"


def test_a_bound_topic_is_named_as_one() -> None:
    told = tell(answered(sources=(replace(SOURCE, bound=True),)))
    assert told.steps[1].what == "request record, 300 bytes on a bound topic"
    assert told.origin is None
