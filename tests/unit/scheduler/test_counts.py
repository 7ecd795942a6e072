"""Counts of replicas in words: one and several."""

from __future__ import annotations

import pytest

from scheduler.counts import counted, replicas_in_words, wanted_in_words


@pytest.mark.parametrize(
    ("count", "words", "sentence"),
    [
        (0, "0 replicas", "0 replicas are wanted"),
        (1, "1 replica", "1 replica is wanted"),
        (2, "2 replicas", "2 replicas are wanted"),
    ],
)
def test_one_and_several(count: int, words: str, sentence: str) -> None:
    assert (replicas_in_words(count), wanted_in_words(count)) == (words, sentence)


def test_a_verb_goes_with_its_count() -> None:
    assert [counted(count, "device is", "devices are") for count in (0, 1, 2)] == [
        "0 devices are",
        "1 device is",
        "2 devices are",
    ]
