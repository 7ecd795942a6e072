"""Which offsets a replay reads, what is out of reach, and how fast it may go."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition
from sie_stream.replay.pace import CREDIT_MS, Pace, Pacer, parse_speed
from sie_stream.replay.plan import Bounds, out_of_reach, segments, span_of
from tests.examples import examples

PLACE = TopicPartition("sie.work.m", 1)


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    beginning = draw(st.integers(0, 50))
    stable = draw(st.integers(beginning, 100))
    return Bounds(beginning, stable, draw(st.integers(stable, 120)))


@examples(300)
@given(bounds(), st.none() | st.integers(0, 150), st.none() | st.integers(0, 150))
def test_every_offset_asked_for_is_read_or_accounted_for(found: Bounds, first: int | None, until: int | None) -> None:
    span = span_of(PLACE, first, until, found)
    asked = range(first or 0, min(until if until is not None else found.high, found.high))
    readable = [offset for offset in asked if found.beginning <= offset < found.stable]
    assert list(range(span.start, span.end)) == readable
    assert span.gone == sum(offset < found.beginning for offset in asked)
    assert span.held_back == sum(offset >= found.stable for offset in asked)
    assert span.size >= 0


def test_what_is_out_of_reach_is_said() -> None:
    span = span_of(PLACE, 0, None, Bounds(10, 40, 45))
    said = out_of_reach([span])
    assert len(said) == 2
    assert "10 offsets below 10 are deleted" in said[0]
    assert "5 offsets from 40 on are behind an open transaction" in said[1]
    assert out_of_reach([span_of(PLACE, 10, 40, Bounds(10, 40, 40))]) == []


@examples(200)
@given(st.sets(st.integers(0, 400)), st.integers(1, 30))
def test_segments_cover_every_offset_once_and_jump_over_long_gaps(offsets: set[int], gap_max: int) -> None:
    ordered = sorted(offsets)
    found = segments(ordered, gap_max)
    covered = [offset for start, end in found for offset in range(start, end)]
    assert covered == sorted(set(covered))
    assert offsets <= set(covered)
    assert all(later[0] - earlier[1] >= gap_max for earlier, later in itertools.pairwise(found))
    assert {start for start, _ in found} | {end - 1 for _, end in found} <= offsets


def test_speed_is_a_rate_or_a_multiple_of_the_original_pace() -> None:
    assert parse_speed("") == Pace()
    assert parse_speed("500") == Pace(per_s=500)
    assert parse_speed("0.5x") == Pace(factor=0.5)
    for wrong in ("0", "x", "fast", "-1", "1e9", "10/s"):
        with pytest.raises(ConfigError, match="--speed"):
            parse_speed(wrong)


def test_a_pace_says_when_a_record_is_due() -> None:
    assert Pace(per_s=100).due_ms(50, 0, 10**9) == 500
    assert Pace(factor=2).due_ms(3, 1_000, 5_000) == 2_000
    assert Pace().due_ms(10**6, 0, 10**6) == 0


def test_a_limit_holds_in_every_second_whatever_was_waited_for() -> None:
    pacer = Pacer(Pace(per_s=10))
    assert [pacer.start_ms(5_000, 0) for _ in range(3)] == [5_000, 5_100, 5_200]
    # An engine took 8 s: those that were due meanwhile do not come all at once.
    after = [pacer.start_ms(13_200, 0) for _ in range(11)]
    assert after[0] == 13_200 - CREDIT_MS
    assert after[-1] - after[0] == 1_000


def test_what_is_late_by_little_is_caught_up_with() -> None:
    pacer = Pacer(Pace(per_s=10))
    pacer.start_ms(0, 0)
    assert pacer.start_ms(150, 0) == 100
    assert pacer.start_ms(150, 0) == 200
