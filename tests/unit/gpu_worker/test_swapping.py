"""Preempted sequences whose keys and values are kept: when that is cheaper, and that every block holds what it should.

The memory is a dict here: block -> the tokens whose keys and values lie in it.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.decoding.blocks import BlockPool
from gpu_worker.decoding.sequence import Keep, Restore, Sequence
from gpu_worker.decoding.step_scheduler import StepLimits, StepScheduler
from gpu_worker.decoding.swapping import Rates, SwapLimits, SwapSpace, cheaper
from tests.examples import examples

BLOCK = 4


class Engine:
    """A scheduler and the memory that it plans for. Token 7 follows every token."""

    def __init__(self, blocks: int, sequences: int, tokens: int, swap_blocks: int) -> None:
        self.pool = BlockPool(blocks)
        self.swap = SwapSpace(SwapLimits(swap_blocks, 100))
        self.scheduler = StepScheduler(self.pool, BLOCK, b"m", StepLimits(sequences, tokens), self.swap)
        self.memory: dict[int, list[int | None]] = {block: [None] * BLOCK for block in range(blocks)}
        self.kept: dict[int, list[list[int | None]]] = {}
        self.computed = 0

    def step(self) -> None:
        chunks = self.scheduler.plan()
        for move in self.scheduler.moves:
            ticket = move.sequence.ticket
            if isinstance(move, Keep):
                self.kept[ticket] = [list(self.memory[block]) for block in move.blocks]
                continue
            assert isinstance(move, Restore), "there is no tier here"
            kept = self.kept.pop(ticket)
            for block, content in zip(move.blocks, kept[move.first :], strict=True):
                self.memory[block] = content
        for chunk in chunks:
            one = chunk.sequence
            held = [self.memory[one.blocks[at // BLOCK]][at % BLOCK] for at in range(chunk.start)]
            assert held == one.ids[: chunk.start], "its keys and values are not where it reads them"
            for at in range(chunk.start, chunk.end):
                self.memory[one.blocks[at // BLOCK]][at % BLOCK] = one.ids[at]
        self.computed += sum(chunk.count for chunk in chunks)
        self.scheduler.ran(chunks)
        for chunk in chunks:
            if chunk.chooses:
                chunk.sequence.ids.append(7)
                if len(chunk.sequence.answer) >= chunk.sequence.tokens_max:
                    self.scheduler.remove(chunk.sequence)

    def run(self) -> None:
        turns = 0
        while not self.scheduler.idle:
            self.step()
            turns += 1
            assert turns < 3_000


def asked(ticket: int, prompt: int, answer: int, priority: int = 1, base: int | None = None) -> Sequence:
    first = 1000 * (ticket if base is None else base)
    return Sequence(ticket, [first + n for n in range(prompt)], answer, priority)


@pytest.mark.parametrize(
    ("tokens", "size", "rates", "wanted"),
    [
        (100, 100_000, Rates(copied_bytes=1_000, computed_tokens=1.0), "recompute"),
        (100, 49_000, Rates(copied_bytes=1_000, computed_tokens=1.0), "swap"),
        (100, 50_000, Rates(copied_bytes=1_000, computed_tokens=1.0), "swap"),  # as dear: nothing is lost
        (100, 49_000, Rates(copied_bytes=1_000, computed_tokens=1.1), "recompute"),
    ],
)
def test_what_costs_less_is_done(tokens: int, size: int, rates: Rates, wanted: str) -> None:
    assert cheaper(tokens, size, rates) == wanted


def test_rates_follow_what_is_measured_and_ignore_times_that_say_nothing() -> None:
    rates = Rates(copied_bytes=100.0, computed_tokens=10.0)
    for _ in range(60):
        rates = rates.after_copy(5_000, 10.0).after_step(64, 32.0)
    assert (rates.copied_bytes, rates.computed_tokens) == (pytest.approx(500, rel=0.01), pytest.approx(2, rel=0.01))
    assert rates.after_copy(5_000, 0.0).after_step(9, 0.0) == rates


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    outcomes: dict[int, tuple[int, int]] = {}
    for swap_blocks in (0, 10):
        engine = Engine(blocks=4, sequences=2, tokens=16, swap_blocks=swap_blocks)
        for ticket in (1, 2):
            engine.scheduler.add(asked(ticket, 7, 6))
        engine.run()
        assert engine.scheduler.preemptions == 1
        assert (engine.swap.used, engine.pool.free) == (0, 4)
        outcomes[swap_blocks] = (engine.computed, engine.swap.swaps)
    assert outcomes[10] == (2 * 12, 1), "every token is computed once"
    assert outcomes[0][0] > outcomes[10][0]


def test_without_room_in_host_memory_it_is_computed_again() -> None:
    engine = Engine(blocks=4, sequences=2, tokens=16, swap_blocks=1)
    for ticket in (1, 2):
        engine.scheduler.add(asked(ticket, 7, 6))
    engine.run()
    assert (engine.swap.swaps, engine.scheduler.preemptions) == (0, 1)


def test_one_that_is_removed_while_it_is_kept_gives_its_room_back() -> None:
    engine = Engine(blocks=4, sequences=2, tokens=16, swap_blocks=4)
    first, second = asked(1, 7, 6), asked(2, 7, 6)
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    while not second.kept:
        engine.step()
    assert engine.swap.used > 0
    engine.scheduler.remove(second)
    assert engine.swap.used == 0
    engine.run()


loads = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2), st.integers(0, 3), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)


@given(loads, st.integers(10, 14), st.integers(1, 4), st.integers(4, 16), st.integers(0, 12))
@examples(150)
def test_whatever_comes_blocks_hold_what_their_sequence_computed(
    load: list[tuple[int, int, int, int, int]], blocks: int, sequences: int, tokens: int, swap_blocks: int
) -> None:
    engine = Engine(blocks, sequences, tokens, swap_blocks)
    arrivals: dict[int, list[Sequence]] = {}
    for ticket, (prompt, answer, priority, base, at) in enumerate(load):
        arrivals.setdefault(at, []).append(asked(ticket, prompt, answer, priority, base))
    everyone = [one for ones in arrivals.values() for one in ones]
    for now in range(13):
        for one in arrivals.pop(now, []):
            engine.scheduler.add(one)
        engine.step()
    engine.run()
    assert all(len(one.answer) == one.tokens_max for one in everyone)
    assert (engine.pool.free, engine.swap.used) == (blocks, 0)
