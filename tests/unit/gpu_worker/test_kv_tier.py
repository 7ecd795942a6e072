"""The ring outside the engine: what is found is what was put, whoever was killed and whatever was damaged."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.decoding.kv_tier import ALIGNMENT, BEGIN, SIZE_MIN, KvTier
from tests.examples import examples

SIZE = SIZE_MIN + 64 * 64


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


class Killed(BaseException):
    """The writer is no more."""


class Memory(bytearray):
    """Memory whose writer is killed in the middle of its n-th write."""

    writes_left = 1 << 30

    def __getitem__(self, place: slice) -> bytes | Memory:  # type: ignore[override]
        if place == slice(None, SIZE):
            return self
        return bytes(memoryview(self)[place])

    def __setitem__(self, place: slice, value: bytes) -> None:  # type: ignore[override]
        self.writes_left -= 1
        view = memoryview(self)
        if self.writes_left < 0:
            start = place.start or 0
            half = len(value) // 2
            view[start : start + half] = value[:half]
            raise Killed
        view[place] = value


def test_what_was_put_is_found_until_it_is_the_oldest() -> None:
    memory = memoryview(bytearray(SIZE))
    tier = KvTier(memory)
    for number in range(60):
        assert tier.put("block", key(number), content(number, 500))
    found = [number for number in range(60) if tier.holds("block", key(number))]
    assert 10 <= len(found) == tier.count
    assert found == list(range(60 - len(found), 60))
    for opened in (tier, KvTier(memory)):
        for number in found:
            assert opened.find("block", key(number)) == content(number, 500)
        assert opened.find("block", key(0)) is None
        assert opened.find("state", key(59)) is None


def test_the_newest_content_of_a_key_counts() -> None:
    memory = memoryview(bytearray(SIZE))
    tier = KvTier(memory)
    for number in range(300):
        assert tier.put("state", key(1), content(number, 100))
        assert tier.find("state", key(1)) == content(number, 100)
    assert KvTier(memory).find("state", key(1)) == content(299, 100)


def test_what_is_longer_than_half_of_the_ring_is_not_taken() -> None:
    tier = KvTier(memoryview(bytearray(SIZE)))
    assert not tier.put("block", key(1), bytes(SIZE // 2))
    assert tier.put("block", key(1), bytes(SIZE // 2 - 3 * ALIGNMENT))
    with pytest.raises(ValueError, match="at least"):
        KvTier(memoryview(bytearray(SIZE_MIN - 1)))


def test_a_run_ends_before_the_first_block_that_is_missing_or_damaged() -> None:
    memory = bytearray(SIZE)
    tier = KvTier(memoryview(memory))
    for number in range(5):
        tier.put("block", key(number), content(number, 300))
    digests = [key(number) for number in range(7)]
    assert tier.run_of(digests) == 5
    place = memory.find(content(3, 300))
    memory[place + 17] ^= 1
    assert tier.run_of(digests) == 3
    assert not tier.holds("block", key(3)), "it is not looked at again"
    assert bytes(tier.block(key(2))) == content(2, 300)


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=60),
    lives=st.lists(st.integers(0, 60), min_size=1, max_size=6),
)
@examples(150)
def test_whenever_its_writer_is_killed_the_next_one_finds_whole_entries_and_goes_on(
    sizes: list[int], lives: list[int]
) -> None:
    memory = Memory(SIZE)
    whole: list[int] = []
    number = 0
    for writes in [*lives, 1 << 30]:
        memory.writes_left = 1 << 30
        tier = KvTier(memory)  # type: ignore[arg-type]
        found = [one for one in range(number) if tier.holds("block", key(one))]
        for one in found:
            assert tier.find("block", key(one)) == content(one, sizes[one % len(sizes)])
        # The newest that were whole are there, in one run: at most the ring's end and one entry cost them room.
        room = SIZE - BEGIN - 2 * 1024
        recent = list(whole[::-1])
        for one in recent:
            room -= 2 * ALIGNMENT + sizes[one % len(sizes)]
            if room < 0:
                break
            assert one in found, (one, found)
        memory.writes_left = writes
        try:
            for _ in range(len(sizes)):
                number += 1
                tier.put("block", key(number - 1), content(number - 1, sizes[(number - 1) % len(sizes)]))
                whole.append(number - 1)
        except Killed:
            pass


@given(st.integers(0, 1 << 30), st.integers(0, 500), st.integers(0, 10))
def test_garbage_is_an_empty_ring(seed: int, more: int, count: int) -> None:
    memory = memoryview(bytearray(content(seed, SIZE_MIN + more)))
    tier = KvTier(memory)
    assert tier.count == 0
    for number in range(count):
        tier.put("block", key(number), content(number, 200))
    assert KvTier(memory).count == tier.count > 0 or not count


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 255)), max_size=40))
@settings(deadline=None)
def test_altered_bytes_are_never_given_out(changes: list[tuple[int, int]]) -> None:
    memory = bytearray(SIZE)
    tier = KvTier(memoryview(memory))
    for number in range(20):
        tier.put("block", key(number), content(number, 400))
    for place, change in changes:
        memory[place] ^= change
    for opened in (tier, KvTier(memoryview(memory))):
        for number in range(20):
            assert opened.find("block", key(number)) in (None, content(number, 400))
