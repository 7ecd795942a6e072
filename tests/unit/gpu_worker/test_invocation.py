"""Where an activated adapter begins to act."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.decoding.blocks import Activation
from gpu_worker.decoding.invocation import Invocation
from gpu_worker.decoding.sequence import Sequence


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ([], None),
        ([7], None),
        ([7, 8], 0),
        ([7, 8, 7], 0),
        ([7, 7, 8], 1),
        ([7, 8, 1, 7, 8, 2], 3),
        ([1, 7], None),
        ([8, 7], None),
    ],
)
def test_the_last_invocation_counts(prompt: list[int], start: int | None) -> None:
    found = Invocation((7, 8), b"a").activation(prompt)
    assert found == (None if start is None else Activation(start, b"a"))


@given(prompt=st.lists(st.integers(0, 2), max_size=20), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_it_is_as_the_slow_search_has_it(prompt: list[int], tokens: list[int]) -> None:
    starts = [start for start in range(len(prompt)) if prompt[start : start + len(tokens)] == tokens]
    found = Invocation(tuple(tokens), b"a").activation(prompt)
    assert (found and found.start) == (starts[-1] if starts else None)


def test_a_sequence_is_acted_on_from_there_to_the_end_of_its_answer() -> None:
    sequence = Sequence(1, [5, 7, 8, 9], 4, activation=Activation(1, b"a"))
    assert [sequence.acted_on(position) for position in range(6)] == [False, *[True] * 5]
    assert not Sequence(1, [5, 7, 8, 9], 4).acted_on(3)
