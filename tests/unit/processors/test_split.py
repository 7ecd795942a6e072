"""Properties of the split: shares within sampling error, sticky keys, growth that only moves keys to who grows."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.control import VariantRow
from sie_stream.routing import SHARES, Range, choose_variant, resized, rest_of
from tests.examples import examples

KEYS = [b"customer-%d" % number for number in range(20_000)]


def split(shares: dict[str, int], before: dict[str, tuple[Range, ...]] | None = None) -> dict[str, tuple[Range, ...]]:
    """Ranges of the variants after each, in order, was resized."""
    ranges = dict(before or {})
    for name, share in shares.items():
        taken = [one for other, own in ranges.items() if other != name for one in own]
        ranges[name] = resized(ranges.get(name, ()), share, taken)
    return ranges


def route(ranges: dict[str, tuple[Range, ...]]) -> tuple[VariantRow, ...]:
    rest = rest_of([one for own in ranges.values() for one in own])
    rows = [VariantRow("stable", "1", sum(end - first for first, end in rest), rest)]
    rows += [VariantRow(name, name, sum(end - first for first, end in own), own) for name, own in ranges.items()]
    return tuple(rows)


@pytest.mark.parametrize("percent", [5, 10, 20, 50])
def test_share_is_within_sampling_error(percent: int) -> None:
    variants = route(split({"canary": percent * 100}))
    hits = sum(choose_variant(variants, key, b"mi-1").variant == "canary" for key in KEYS)
    expected = len(KEYS) * percent / 100
    assert abs(hits - expected) < 4 * math.sqrt(expected * (1 - percent / 100))


@examples(25)
@given(st.data())
def test_growth_moves_keys_only_to_who_grows(data: st.DataObject) -> None:
    names = data.draw(st.sampled_from([("b",), ("b", "c"), ("b", "c", "d")]))
    ranges = split({name: data.draw(st.integers(0, 2_000)) for name in names})
    for _ in range(4):
        grows = data.draw(st.sampled_from(names))
        size = sum(end - first for first, end in ranges[grows])
        more = split({grows: data.draw(st.integers(size, 3_000))}, ranges) if size <= 3_000 else ranges
        for key in KEYS[:300]:
            was = choose_variant(route(ranges), key, b"mi-1").variant
            now = choose_variant(route(more), key, b"mi-1").variant
            assert now in (was, grows)
        ranges = more


@examples(25)
@given(st.lists(st.tuples(st.sampled_from("bcd"), st.integers(0, 3_000)), max_size=12))
def test_ranges_never_overlap_and_have_the_wanted_size(changes: list[tuple[str, int]]) -> None:
    ranges: dict[str, tuple[Range, ...]] = {}
    wanted: dict[str, int] = {}
    for name, share in changes:
        ranges = split({name: share}, ranges)
        wanted[name] = share
        owned = sorted(one for own in ranges.values() for one in own)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(owned))
        assert {key: sum(end - first for first, end in own) for key, own in ranges.items()} == wanted
        assert sum(row.weight for row in route(ranges)) == SHARES


def test_weight_zero_gets_no_key_and_shrinking_gives_back_what_came_last() -> None:
    grown = split({"canary": 2_000}, split({"canary": 1_000}))
    assert split({"canary": 1_000}, grown) == split({"canary": 1_000})
    none = route(split({"canary": 0}, grown))
    assert {choose_variant(none, key, b"mi-1").variant for key in KEYS[:2_000]} == {"stable"}


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="1000 too many"):
        resized((), 5_000, [(0, 6_000)])
