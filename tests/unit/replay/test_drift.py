"""Samples, PSI, KS and histograms against slow or known answers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sie_stream.replay.drift import Sample, histogram, ks, psi, quantile, score_and_label
from tests.examples import examples

NUMBERS = st.lists(st.floats(-5, 5), min_size=1, max_size=40)


@examples(200)
@given(NUMBERS, NUMBERS)
def test_ks_is_the_largest_gap_of_the_empirical_distributions(one: list[float], two: list[float]) -> None:
    def share(values: list[float], at: float) -> float:
        return sum(value <= at for value in values) / len(values)

    slow = max(abs(share(one, at) - share(two, at)) for at in [*one, *two])
    assert math.isclose(ks(one, two), slow, abs_tol=1e-12)


@examples(200)
@given(NUMBERS, NUMBERS)
def test_psi_is_never_negative_and_zero_for_the_same_sample(one: list[float], two: list[float]) -> None:
    assert psi(one, two) >= 0
    assert psi(one, list(reversed(one))) == 0


def test_a_shift_is_seen_and_noise_is_not() -> None:
    before = [number / 1_000 for number in range(1_000)]
    assert psi(before, [value + 0.3 for value in before]) > 0.2
    assert psi(before, before[1::2]) < 0.01
    assert psi([], before) == ks([], before) == 0


def test_a_sample_stays_bounded_and_even() -> None:
    sample = Sample(64)
    for number in range(10_000):
        sample.add(number, number + 1)
    assert sample.seen == 10_000
    assert 32 <= len(sample.before) == len(sample.after) <= 64
    steps = {later - earlier for earlier, later in zip(sample.before, sample.before[1:], strict=False)}
    assert len(steps) == 1
    assert all(after == before + 1 for before, after in zip(sample.before, sample.after, strict=True))


@given(NUMBERS, NUMBERS)
def test_a_histogram_counts_everything(one: list[float], two: list[float]) -> None:
    found = histogram(one, two, bins=7)
    assert (sum(found.before), sum(found.after)) == (len(one), len(two))
    tailed = histogram(one, two, bins=7, tail=0.1)
    assert sum(tailed.before) == len(one)


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([1, 2], 0.99) == 2
    assert quantile([], 0.5) is None


def test_score_and_label_of_outputs() -> None:
    assert score_and_label(b'{"label":"yes","score":0.9}') == (0.9, "yes")
    assert score_and_label(b'{"value":{"b":2,"a":1}}') == (1.0, None)
    assert score_and_label(b'{"score":"high","flag":true,"z":[4]}') == (4.0, None)
    assert score_and_label(b'{"text":"hello"}') == (None, None)
    assert score_and_label(b"no json") == score_and_label(None) == (None, None)
