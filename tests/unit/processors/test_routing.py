"""Where requests go: shares, stickiness, buckets."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.shares import apportion
from sie_stream.control import VariantRow
from sie_stream.errors import InvalidRequest
from sie_stream.routing import SHARES, bucket_of, choose_variant, partition_of, pinned_variant, spill_of, sticky_key

KEYS = [f"key-{number}".encode() for number in range(20_000)]


def split(canary: int) -> list[VariantRow]:
    return [VariantRow("stable", "1", SHARES - canary), VariantRow("canary", "2", canary)]


@pytest.mark.parametrize("canary", [0, 1, 500, 1_000, 5_000, 9_999, 10_000])
def test_shares_are_met_within_sampling_error(canary: int) -> None:
    got = sum(choose_variant(split(canary), key, b"mi-a").variant == "canary" for key in KEYS)
    share = canary / SHARES
    assert abs(got - share * len(KEYS)) <= 5 * math.sqrt(len(KEYS) * share * (1 - share))


@given(st.binary(min_size=1, max_size=40), st.lists(st.integers(0, SHARES), min_size=2, max_size=8))
def test_a_key_that_went_to_the_canary_stays_there_while_it_grows(key: bytes, weights: list[int]) -> None:
    chosen = [choose_variant(split(weight), key, b"mi-a").variant for weight in sorted(weights)]
    assert chosen == sorted(chosen, reverse=True)  # "stable" before "canary", never back


def test_routes_split_independently() -> None:
    both = Counter(
        (choose_variant(split(5_000), key, b"mi-a").variant, choose_variant(split(5_000), key, b"mi-b").variant)
        for key in KEYS
    )
    assert all(abs(count - 5_000) < 400 for count in both.values())
    assert len(both) == 4


def test_a_route_without_weights_takes_nothing() -> None:
    with pytest.raises(InvalidRequest, match="no version that takes traffic"):
        choose_variant([VariantRow("stable", "1", 0)], b"k", b"")


def test_a_pinned_version_ignores_weights() -> None:
    assert pinned_variant(split(0), "m", "2").variant == "canary"
    with pytest.raises(InvalidRequest, match="Versions: 1, 2"):
        pinned_variant(split(0), "m", "3")


@given(st.binary(min_size=1), st.integers(1, 64))
def test_buckets_are_stable_and_in_range(key: bytes, width: int) -> None:
    assert 0 <= bucket_of(key, width) < width
    assert bucket_of(key, width) == bucket_of(key, width)


def test_buckets_do_not_depend_on_the_process() -> None:
    assert [bucket_of(key, 8) for key in (b"a", b"b", b"session-7")] == [3, 4, 1]


@given(st.integers(1, 16))
def test_keys_spread_over_all_buckets(width: int) -> None:
    counts = Counter(bucket_of(key, width) for key in KEYS[:4_000])
    assert len(counts) == width
    assert max(counts.values()) < 1.5 * 4_000 / width


def test_partitions_of_lanes_do_not_overlap() -> None:
    assert sorted(partition_of(lane, bucket, 4) for lane in range(3) for bucket in range(4)) == list(range(12))


def test_the_sticky_key_is_session_then_key_then_id() -> None:
    assert sticky_key("s", b"k", "r") == b"s"
    assert sticky_key(None, b"k", "r") == b"k"
    assert sticky_key(None, b"", "r") == b"r"


@pytest.mark.parametrize("shares", [(7_000, 3_000), (2_334, 3_833, 3_833), (100, 100, 9_800), (0, 10_000, 0, 0)])
def test_buckets_get_their_shares_of_the_keys(shares: tuple[int, ...]) -> None:
    spill = spill_of(shares, len(shares))
    got = Counter(bucket_of(key, len(shares), spill) for key in KEYS)
    for bucket, share in enumerate(shares):
        part = share / SHARES
        assert abs(got[bucket] - part * len(KEYS)) <= 5 * math.sqrt(len(KEYS) * part * (1 - part)) + 1


def test_only_the_keys_that_are_given_away_move() -> None:
    even = [bucket_of(key, 3) for key in KEYS]
    spill = spill_of((2_334, 3_833, 3_833), 3)
    moved = [(old, new) for key, old in zip(KEYS, even, strict=True) if (new := bucket_of(key, 3, spill)) != old]
    assert {old for old, _ in moved} == {0}
    assert abs(len(moved) - 0.1 * len(KEYS)) < 250
    counts = Counter(new for _, new in moved)
    assert abs(counts[1] - counts[2]) < 250


def test_a_second_relief_moves_little_more_than_it_must() -> None:
    first, second = spill_of((2_334, 3_833, 3_833), 3), spill_of((1_634, 4_183, 4_183), 3)
    moved = sum(bucket_of(key, 3, first) != bucket_of(key, 3, second) for key in KEYS)
    assert moved < 1.1 * 0.07 * len(KEYS)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.binary(min_size=1))
def test_every_key_has_a_bucket_that_may_have_keys(weights: list[int], key: bytes) -> None:
    shares = apportion([float(weight) for weight in weights], SHARES)
    spill = spill_of(shares, len(shares))
    bucket = bucket_of(key, len(shares), spill)
    assert 0 <= bucket < len(shares)
    assert shares[bucket] > 0


@pytest.mark.parametrize("shares", [(), (5_000, 5_000), (3_333, 3_333, 3_334), (10_000,), (5_000, 5_001), (-1, 10_001)])
def test_shares_that_are_even_or_make_no_sense_change_nothing(shares: tuple[int, ...]) -> None:
    assert spill_of(shares, len(shares)) is None
    assert spill_of((10_000, 0), 3) is None
