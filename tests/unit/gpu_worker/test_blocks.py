"""The block pool against a slow twin that looks through everything each time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.decoding.blocks import Activation, BlockPool, chained_digests
from tests.examples import examples

COUNT = 6


class SlowPool:
    """The same promises, kept by search: a list of what each block holds, and the order in which they became idle."""

    def __init__(self, count: int) -> None:
        self.holders: Counter[int] = Counter()
        self.content: dict[int, bytes] = {}
        self.idle: list[int] = []
        self.count = count

    @property
    def free(self) -> int:
        return sum(self.holders[block] == 0 for block in range(self.count))

    def match(self, digests: list[bytes]) -> list[int]:
        found: list[int] = []
        for digest in digests:
            blocks = [block for block, content in self.content.items() if content == digest]
            if not blocks:
                break
            found += blocks
        for block in found:
            self.holders[block] += 1
            self.idle = [one for one in self.idle if one != block]
        return found

    def took(self, blocks: list[int]) -> None:
        """What the real pool chose must be free, empty blocks before cached ones, and cached ones by age."""
        for block in blocks:
            assert self.holders[block] == 0
            if block in self.content:
                assert all(self.holders[one] or one in self.content for one in range(self.count)), (
                    "an empty one is left"
                )
                assert self.idle[0] == block
                self.idle.pop(0)
                del self.content[block]
            self.holders[block] = 1

    def publish(self, block: int, digest: bytes) -> None:
        if digest not in self.content.values() and block not in self.content:
            self.content[block] = digest

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block] and block in self.content:
                self.idle.append(block)


steps = st.lists(
    st.tuples(st.sampled_from(("take", "match", "publish", "release")), st.integers(0, 3), st.integers(0, 3)),
    max_size=40,
)


@given(steps)
@examples(80)
def test_the_pool_keeps_the_promises_of_its_slow_twin(steps: list[tuple[str, int, int]]) -> None:
    pool, twin = BlockPool(COUNT), SlowPool(COUNT)
    held: list[list[int]] = []
    for kind, which, size in steps:
        digests = [bytes([which, place]) for place in range(size)]
        if kind == "take":
            taken = pool.take(size)
            assert (taken is None) == (size > twin.free)
            if taken is not None:
                twin.took(taken)
                held.append(taken)
        elif kind == "match":
            found = pool.match(digests)
            assert found == twin.match(digests)
            held.append(found)
        elif kind == "publish" and held:
            for block, digest in zip(held[which % len(held)], digests, strict=False):
                pool.publish(block, digest)
                twin.publish(block, digest)
        elif kind == "release" and held:
            blocks = held.pop(which % len(held))
            pool.release(blocks)
            twin.release(blocks)
        assert pool.free == twin.free
        assert pool.cached == len(twin.content)
    for blocks in held:
        pool.release(blocks)
    assert pool.free == COUNT


def test_a_block_that_nobody_holds_cannot_be_given_back() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release(blocks)


@given(st.lists(st.integers(0, 5), max_size=20), st.lists(st.integers(0, 5), max_size=20), st.integers(1, 4))
@examples(80)
def test_digests_are_equal_exactly_where_all_tokens_so_far_are(a: list[int], b: list[int], size: int) -> None:
    ours, theirs = chained_digests(b"m", a, size), chained_digests(b"m", b, size)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (mine == other) == (a[: number * size] == b[: number * size])
    assert chained_digests(b"m", a, size, ours[:1]) == ours
    assert not ours or chained_digests(b"other weights", a, size)[0] != ours[0]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=8, max_size=40),
    start=st.integers(0, 45),
    later=st.integers(1, 4),
    size=st.integers(1, 8),
    known=st.integers(0, 5),
)
def test_blocks_before_an_activation_are_as_without_and_no_other_is(
    tokens: list[int], start: int, later: int, size: int, known: int
) -> None:
    plain = chained_digests(b"m", tokens, size)
    mine = chained_digests(b"m", tokens, size, (), Activation(start, b"a"))
    before = start // size
    assert mine[:before] == plain[:before]
    assert not set(mine[before:]) & set(plain)
    assert chained_digests(b"m", tokens, size, mine[:known], Activation(start, b"a")) == mine
    for other in (Activation(start + later, b"a"), Activation(start, b"b")):
        theirs = chained_digests(b"m", tokens, size, (), other)
        assert not set(mine[before:]) & set(theirs)
