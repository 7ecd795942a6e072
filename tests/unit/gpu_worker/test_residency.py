"""Turns on a device: who comes in, who leaves, and that nobody starves."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.memory.mapper import DeviceMemory, Move
from gpu_worker.residency import RELOADS_MAX, TURN_MS, Activate, Demand, Evict, Order, Residency

PAGE = 10


def residency(sizes: list[int], total: int = 100) -> Residency:
    """Models 1, 2, ... of these sizes on a device of `total` bytes without workspace."""
    memory = DeviceMemory(total, PAGE, 10_000)
    memory.workspace_bytes = 0
    for slot, size in enumerate(sizes, 1):
        memory.add(slot, "e", size, 0, {}, 0.0)
    return Residency(memory)


def bring_in(of: Residency, *slots: int) -> None:
    for slot in slots:
        of.memory.activate(slot)
        of.memory.arrived(slot)


def plain(orders: list[Order]) -> list[tuple[str, int]]:
    return [(type(order).__name__, order.slot) for order in orders]


def test_what_fits_comes_in_at_once() -> None:
    of = residency([40, 40])
    assert plain(of.decide([Demand(2, 1)], set(), 0.0)) == [("Activate", 2)]
    assert not of.runnable(2)
    of.memory.arrived(2)
    assert of.runnable(2)


def test_models_that_nothing_waits_for_make_room_as_few_as_needed() -> None:
    of = residency([50, 50, 50])
    bring_in(of, 1, 2)
    of.used(1, 0.0)
    assert plain(of.decide([Demand(3, 1)], set(), 1.0)) == [("Evict", 2), ("Activate", 3)]


def test_a_lease_holds_its_model() -> None:
    of = residency([50, 50, 50])
    bring_in(of, 1, 2)
    assert plain(of.decide([Demand(3, 1)], {2}, 1.0)) == [("Evict", 1), ("Activate", 3)]
    assert of.decide([Demand(1, 1)], {2}, 2.0) == []  # model 3 is on the way, model 2 at work


def test_models_with_work_keep_their_places_for_a_turn() -> None:
    of = residency([50, 50, 50])
    bring_in(of, 1, 2)
    demand = [Demand(1, 1), Demand(2, 1), Demand(3, 1)]
    assert of.decide(demand, set(), 0.0) == []
    assert of.due_in_ms(0.0) == TURN_MS
    assert of.decide(demand, set(), TURN_MS - 1) == []
    assert plain(of.decide(demand, set(), TURN_MS)) == [("Evict", 1), ("Activate", 3)]
    of.memory.arrived(3)
    demand = [Demand(2, 1), Demand(3, 1), Demand(1, 1)]
    assert of.decide(demand, set(), TURN_MS + 1) == []  # a new turn: model 3 has one of its own
    assert of.due_in_ms(TURN_MS + 1) == TURN_MS


def test_at_the_end_of_a_turn_those_at_work_get_nothing_more_and_leave_when_they_are_done() -> None:
    of = residency([50, 50, 50])
    bring_in(of, 1, 2)
    demand = [Demand(1, 1), Demand(2, 1), Demand(3, 1)]
    of.decide(demand, {1, 2}, 0.0)
    assert of.decide(demand, {1, 2}, TURN_MS) == []
    assert [of.runnable(slot) for slot in (1, 2)] == [False, True]
    assert plain(of.decide(demand, {2}, TURN_MS + 5)) == [("Evict", 1), ("Activate", 3)]
    assert of.runnable(2)


def test_who_was_to_leave_stays_when_nobody_waits_any_more() -> None:
    of = residency([50, 50, 50])
    bring_in(of, 1, 2)
    of.decide([Demand(1, 1), Demand(2, 1), Demand(3, 1)], {1, 2}, 0.0)
    of.decide([Demand(1, 1), Demand(2, 1), Demand(3, 1)], {1, 2}, TURN_MS)
    of.decide([Demand(1, 1), Demand(2, 1)], {1, 2}, TURN_MS + 1)
    assert of.runnable(1)
    assert of.due_in_ms(TURN_MS + 1) is None


def test_an_urgent_lane_does_not_wait_for_the_end_of_a_turn() -> None:
    of = residency([50, 50, 50])
    bring_in(of, 1, 2)
    orders = of.decide([Demand(1, 0), Demand(2, 2), Demand(3, 1)], set(), 0.0)
    assert plain(orders) == [("Evict", 2), ("Activate", 3)]


def test_four_reloads_past_a_large_model_end_the_turn() -> None:
    of = residency([60, 60, 20, 20, 20, 20, 20])
    bring_in(of, 1)
    busy = [Demand(1, 1), Demand(2, 1)]
    reloads = 0
    for step in range(RELOADS_MAX):
        orders = of.decide([*busy, Demand(3 + step, 1)], set(), 1.0 + step)
        reloads += sum(isinstance(order, Activate) for order in orders)
        of.memory.arrived(3 + step)
    assert reloads == RELOADS_MAX
    orders = of.decide([*busy, Demand(7, 1)], set(), 10.0)
    assert ("Activate", 2) in plain(orders)
    assert ("Evict", 1) in plain(orders)


def test_when_nobody_waits_the_likeliest_models_fill_what_is_free() -> None:
    of = residency([40, 40, 40])
    of.used(3, 0.0)
    assert plain(of.decide([], set(), 1.0)) == [("Activate", 3)]
    assert of.decide([], set(), 101.0) == []  # one after the other
    of.memory.arrived(3)
    assert plain(of.decide([], set(), 201.0)) == [("Activate", 1)]
    of.memory.arrived(1)
    assert of.decide([], set(), 301.0) == []


@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=9),
    st.integers(0, 2**32 - 1),
    st.integers(0, 3),
)
def test_nobody_starves_and_no_model_at_work_is_evicted(sizes: list[int], seed: int, lane: int) -> None:
    """All models always have work; engines hold some of it for a random time. Everyone gets on the device."""
    of = residency(sizes)
    chance = random.Random(seed)
    until: dict[int, float] = {}
    came: set[int] = set()
    at_ms = 0.0
    for _ in range(400):
        at_ms += chance.uniform(1.0, 40.0)
        leased = {slot for slot, end in until.items() if end > at_ms}
        for order in of.decide([Demand(slot, lane) for slot in range(1, len(sizes) + 1)], leased, at_ms):
            assert not isinstance(order, Move)
            if isinstance(order, Evict):
                assert order.slot not in leased
            else:
                of.memory.arrived(order.slot)
        for slot in range(1, len(sizes) + 1):
            if slot not in leased and of.runnable(slot):
                until[slot] = at_ms + chance.uniform(0.0, 100.0)
                of.used(slot, at_ms)
                came.add(slot)
    assert came == set(range(1, len(sizes) + 1))
