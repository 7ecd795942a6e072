"""Which sequences a decoder runs: invariants over random loads, and the rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.decoding.blocks import BlockPool
from gpu_worker.decoding.sequence import Chunk, Sequence, no_blocks
from gpu_worker.decoding.step_scheduler import StepLimits, StepScheduler
from tests.examples import examples

BLOCK = 4


def made(blocks: int = 20, sequences: int = 4, tokens: int = 8) -> tuple[StepScheduler, BlockPool]:
    pool = BlockPool(blocks)
    return StepScheduler(pool, BLOCK, b"model", StepLimits(sequences, tokens)), pool


def asked(ticket: int, prompt: int, answer: int = 2, priority: int = 1, base: int | None = None) -> Sequence:
    """`base`: sequences with the same base share their prompt."""
    first = 1000 * (ticket if base is None else base)
    return Sequence(ticket, [first + n for n in range(prompt)], answer, priority)


def shape(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.ticket, chunk.start, chunk.count) for chunk in chunks]


def step(scheduler: StepScheduler) -> list[tuple[int, int, int]]:
    """One step of a decoder that always chooses token 7."""
    chunks = scheduler.plan()
    scheduler.ran(chunks)
    for chunk in chunks:
        if chunk.chooses:
            chunk.sequence.ids.append(7)
            if len(chunk.sequence.answer) >= chunk.sequence.tokens_max:
                scheduler.remove(chunk.sequence)
    return shape(chunks)


def test_a_long_prompt_comes_in_chunks_and_does_not_hold_up_who_decodes() -> None:
    scheduler, _ = made()
    scheduler.add(asked(1, 3, answer=5))
    assert step(scheduler) == [(1, 0, 3)]
    scheduler.add(asked(2, 20))
    assert [step(scheduler) for _ in range(3)] == [
        [(1, 3, 1), (2, 0, 7)],
        [(1, 4, 1), (2, 7, 7)],
        [(1, 5, 1), (2, 14, 6)],
    ]


def test_a_prompt_with_a_short_rest_passes_a_longer_one_that_keeps_half_of_the_step() -> None:
    scheduler, _ = made(blocks=60, sequences=8, tokens=16)
    scheduler.add(asked(1, 12, answer=1, base=5))
    step(scheduler)
    scheduler.add(asked(2, 100))
    scheduler.add(asked(3, 100))
    assert step(scheduler) == [(2, 0, 16)]
    scheduler.add(asked(4, 3, answer=1))
    scheduler.add(asked(5, 12, answer=1, base=5))  # two of its three blocks are found
    scheduler.add(asked(6, 2, answer=1))
    assert step(scheduler) == [(4, 0, 3), (5, 8, 4), (2, 16, 9)]
    assert step(scheduler) == [(6, 0, 2), (2, 25, 14)]


def test_whoever_is_passed_needs_at_most_twice_as_many_steps() -> None:
    scheduler, _ = made(blocks=60, sequences=8, tokens=16)
    scheduler.add(asked(1, 96, answer=1))
    steps = 0
    while any(one.ticket == 1 for one in (*scheduler.running, *scheduler.waiting)):
        for ticket in range(4):
            scheduler.add(asked(100 + 4 * steps + ticket, 4, answer=1))
        step(scheduler)
        steps += 1
    assert steps == 2 * 96 // 16


def test_a_short_rest_does_not_pass_a_more_urgent_prompt() -> None:
    scheduler, _ = made(blocks=60, sequences=8, tokens=16)
    scheduler.add(asked(1, 40, priority=0))
    scheduler.add(asked(2, 2, priority=1))
    assert [step(scheduler) for _ in range(3)] == [[(1, 0, 16)], [(1, 16, 16)], [(1, 32, 8), (2, 0, 2)]]


@pytest.mark.parametrize(("blocks", "sequences"), [(60, 3), (11, 8)])
def test_a_short_rest_takes_neither_the_last_place_nor_the_last_blocks(blocks: int, sequences: int) -> None:
    """A place for the second, in one case; in the other the blocks that the first needs in this step."""
    scheduler, _ = made(blocks, sequences, tokens=16)
    scheduler.add(asked(1, 36))
    scheduler.add(asked(2, 2, answer=9))
    assert step(scheduler) == [(2, 0, 2), (1, 0, 14)]
    scheduler.add(asked(3, 2))
    assert step(scheduler) == [(2, 2, 1), (1, 14, 15)]
    assert scheduler.preemptions == 0


def test_first_come_first_served_within_a_priority() -> None:
    scheduler, _ = made(sequences=2, tokens=8)
    for ticket, priority in ((1, 2), (2, 1), (3, 0), (4, 1)):
        scheduler.add(asked(ticket, 2, answer=1, priority=priority))
    assert step(scheduler) == [(3, 0, 2), (2, 0, 2)]
    assert step(scheduler) == [(4, 0, 2), (1, 0, 2)]


def test_an_urgent_sequence_takes_the_place_of_a_less_urgent_one() -> None:
    scheduler, pool = made(sequences=1)
    scheduler.add(asked(1, 3, answer=9, priority=1))
    step(scheduler)
    scheduler.add(asked(2, 3, answer=1, priority=1))
    assert step(scheduler) == [(1, 3, 1)], "an equal waits"
    scheduler.add(asked(3, 3, answer=1, priority=0))
    step(scheduler)  # in this step both the running one decoded and its place was taken
    assert [one.ticket for one in scheduler.waiting] == [1, 2]
    while not scheduler.idle:
        step(scheduler)
    assert (scheduler.preemptions, pool.free) == (1, 20)


def test_without_room_the_last_in_rank_is_computed_again_later_and_its_full_blocks_are_found_again() -> None:
    scheduler, pool = made(blocks=4, sequences=2, tokens=16)
    first, second = asked(1, 7, answer=6), asked(2, 7, answer=6)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == [(1, 0, 7), (2, 0, 7)]
    assert step(scheduler) == [(1, 7, 1), (2, 7, 1)]
    assert step(scheduler) == [(1, 8, 1)]
    assert (second.computed, scheduler.preemptions) == (0, 1)
    while not scheduler.idle:
        step(scheduler)
    assert (len(first.answer), len(second.answer), pool.free) == (6, 6, 4)


def test_an_equal_prefix_is_computed_once() -> None:
    scheduler, _ = made(tokens=32)
    scheduler.add(asked(1, 10, answer=1, base=5))
    assert step(scheduler) == [(1, 0, 10)]
    scheduler.add(asked(2, 10, answer=1, base=5))
    assert step(scheduler) == [(2, 8, 2)]
    scheduler.add(asked(3, 8, answer=1, base=5))
    assert step(scheduler) == [(3, 4, 4)], "the last token's logits are needed, so its block is computed"


def test_a_prompt_whose_logits_are_wanted_is_computed_whole() -> None:
    scheduler, _ = made(tokens=32)
    scheduler.add(asked(1, 8, answer=1, base=5))
    step(scheduler)
    scored = asked(2, 8, answer=1, base=5)
    scored.reusable = no_blocks
    scheduler.add(scored)
    assert step(scheduler) == [(2, 0, 8)]


def test_late_sequences_are_named_and_leave_with_their_blocks() -> None:
    scheduler, pool = made()
    late, patient = asked(1, 5), asked(2, 5)
    late.deadline_at_ms = 100
    scheduler.add(late)
    scheduler.add(patient)
    step(scheduler)
    assert scheduler.expired(99) == []
    assert scheduler.expired(100) == [late]
    scheduler.remove(late)
    scheduler.remove(patient)
    assert (scheduler.idle, pool.free) == (True, 20)


def test_a_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens"):
        made(sequences=9, tokens=8)


loads = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2), st.integers(0, 3), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)


@given(loads, st.integers(10, 14), st.integers(1, 4), st.integers(4, 16))
@examples(120)
def test_whatever_comes_everything_ends_and_no_rule_is_broken(
    load: list[tuple[int, int, int, int, int]], blocks: int, sequences: int, tokens: int
) -> None:
    scheduler, pool = made(blocks, sequences, tokens)
    arrivals: dict[int, list[Sequence]] = {}
    for ticket, (prompt, answer, priority, base, at) in enumerate(load):
        arrivals.setdefault(at, []).append(asked(ticket, prompt, answer, priority, base))
    open_ones: list[Sequence] = []
    now = 0
    while arrivals or not scheduler.idle:
        for sequence in arrivals.pop(now, []):
            assert scheduler.fits(sequence.prompt_tokens + sequence.tokens_max)
            scheduler.add(sequence)
            open_ones.append(sequence)
        chunks = scheduler.plan()
        assert chunks or scheduler.idle, "with work and an otherwise free pool something always runs"
        check(chunks, scheduler, sequences, tokens)
        scheduler.ran(chunks)
        for chunk in chunks:
            if chunk.chooses:
                chunk.sequence.ids.append(7)
                if len(chunk.sequence.answer) >= chunk.sequence.tokens_max:
                    scheduler.remove(chunk.sequence)
        now += 1
        assert now < 2_000
    assert all(len(one.answer) == one.tokens_max for one in open_ones)
    assert pool.free == blocks


def check(chunks: list[Chunk], scheduler: StepScheduler, sequences: int, tokens: int) -> None:
    assert sum(chunk.count for chunk in chunks) <= tokens
    assert len(scheduler.running) <= sequences
    written: list[int] = []
    for chunk in chunks:
        one = chunk.sequence
        assert one in scheduler.running
        assert chunk.start == one.computed
        assert chunk.count >= 1
        assert len(one.blocks) >= scheduler.blocks_for(chunk.end)
        for block in one.blocks[chunk.start // BLOCK : scheduler.blocks_for(chunk.end)]:
            assert block not in written, "two sequences write to one block"
            written.append(block)
