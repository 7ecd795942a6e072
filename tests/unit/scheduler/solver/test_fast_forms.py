"""What the solver remembers, copies or looks up once says the same as computing it anew, on problems at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from scheduler.solver import plan_fleet, summary
from scheduler.solver.classes import Folded, Seat, fold
from scheduler.solver.constraints import forbids, forbids_staying
from scheduler.solver.explain import seats_of
from scheduler.solver.greedy import best_fit, best_seat, greedy
from scheduler.solver.ledger import Ledger, keep
from scheduler.solver.model import Demand, Problem
from scheduler.solver.objective import Worth, cost_without, evaluate, total
from scheduler.solver.summary import Sorts, why_not_elsewhere
from tests.examples import examples
from tests.unit.scheduler.solver.fleets import problems

TRIES = examples(30)
Seats = Sequence[Seat | None]


def books(ledger: Ledger) -> dict[str, Any]:
    """All that a ledger counts; what is counted as nothing is as good as not counted."""
    counted = {name: value for name, value in vars(ledger).items() if name != "folded"}
    for name in ("on_device", "on_worker", "on_server"):
        counted[name] = {key: count for key, count in counted[name].items() if count}
    counted["holders"] = [sorted(holders) for holders in counted["holders"]]
    counted["exchange"] = {key: domains for key, domains in counted["exchange"].items() if domains}
    return counted


def placed(problem: Problem) -> tuple[Folded, list[Seat | None]]:
    folded = fold(problem)
    return folded, list(seats_of(folded, plan_fleet(problem)))


@TRIES
@given(problems(), st.data())
def test_a_ledger_that_was_copied_and_changed_is_one_kept_anew(problem: Problem, data: st.DataObject) -> None:
    folded, seats = placed(problem)
    ledger = Ledger(folded, seats)
    other, left = ledger.copy(), list(seats)
    for number in data.draw(st.permutations(range(len(seats)))):
        seat = left[number]
        if seat is not None:
            other.remove(number, seat)
            left[number] = None
        assert books(other) == books(Ledger(folded, left))
    for number, seat in enumerate(seats):
        if seat is not None:
            other.add(number, seat)
    assert books(other) == books(ledger) == books(Ledger(folded, seats))


@TRIES
@given(problems())
def test_what_keeps_a_replica_away_by_its_neighbours_is_what_its_refusal_says(problem: Problem) -> None:
    folded, seats = placed(problem)
    ledger = Ledger(folded, seats)
    for number in range(len(seats)):
        for place in range(len(folded.usable)):
            beside = ledger.beside(number, place)
            refusal = ledger.refusal(number, 0, place)
            by_neighbours = refusal is not None and refusal.constraint == "anti_affinity"
            assert (beside is not None) == by_neighbours == (not ledger.admits(number, place))


@TRIES
@given(problems(), st.data())
def test_a_placement_priced_before_costs_what_it_costs(problem: Problem, data: st.DataObject) -> None:
    folded, seats = placed(problem)
    worth = Worth(folded)
    kept, _ = keep(folded)
    for found in data.draw(st.permutations([seats, kept, seats, kept, [None] * len(seats)])):
        terms = worth.terms(found)
        assert terms == evaluate(folded, found)
        assert worth.total(found) == total(terms)
        terms["balance"] += 1  # what was told belongs to who asked
    free = [number for number, seat in enumerate(kept) if seat is None]
    assert cost_without(folded, kept, free, worth) == cost_without(folded, kept, free)


@TRIES
@given(problems())
def test_greedy_with_a_ledger_it_was_given_answers_the_same_and_leaves_it_as_it_was(problem: Problem) -> None:
    folded = fold(problem)
    start, _ = keep(folded)
    held = Ledger(folded, start)
    before = books(held)
    assert greedy(folded, start, (), held) == greedy(folded, start)
    assert books(held) == before
    waiting = [number for number, seat in enumerate(start) if not folded.placed(number, seat)]
    assert best_fit(held, start, waiting) == one_by_one(folded, start, waiting)
    assert books(held) == before


@TRIES
@given(problems(), st.booleans())
def test_kinds_are_what_is_written_alike_and_fit_where_nothing_forbids_it(problem: Problem, shared: bool) -> None:
    """`shared`: replicas that are alike have their fields in common, as those of one wish have."""
    demands: dict[bytes, Demand] = {}
    written: list[bytes] = []
    for one in problem.demands:
        number = -1 if one.kv_group is None else one.replica
        alike = structs.replace(one, replica=number, current=None)
        written.append(msgspec.msgpack.encode(alike, order="deterministic"))
        demands.setdefault(written[-1], one)
    if shared:
        again = [
            structs.replace(demands[text], replica=one.replica, current=one.current)
            for text, one in zip(written, problem.demands, strict=True)
        ]
        problem = structs.replace(problem, demands=tuple(again))
    folded = fold(problem)
    order = list(dict.fromkeys(written))
    assert folded.kind == tuple(order.index(text) for text in written)
    for kind in folded.kinds:
        for place, group in enumerate(folded.device_class):
            device = folded.problem.devices[place]
            options = list(enumerate(kind.demand.options))
            assert kind.fits[group] == tuple(n for n, one in options if not forbids(kind.demand, one, device))
            assert kind.stays[group] == tuple(n for n, one in options if not forbids_staying(kind.demand, one, device))


def one_by_one(folded: Folded, start: Seats, order: Sequence[int]) -> list[Seat | None]:
    """best_fit with a ledger kept anew for every replica."""
    seats = list(start)
    for number in order:
        others = [None if other == number else seat for other, seat in enumerate(seats)]
        found = best_seat(Ledger(folded, others), number)
        seats[number] = seats[number] if found is None else found
    return seats


def device_by_device(folded: Folded, ledger: Ledger, number: int, seat: Seat) -> dict[int, tuple[str, str, int]]:
    """The verdict of each other device, asked alone. `ledger` holds everything but the replica."""
    here = summary.added_terms(ledger, number, seat)
    found: dict[int, tuple[str, str, int]] = {}
    for place in range(len(folded.usable)):
        if place not in seat[0]:
            one = summary._reason(folded, ledger, number, place, here)
            found[place] = (one.sentence, one.constraint, one.more)
    return found


@TRIES
@given(problems())
def test_devices_of_one_sort_have_one_verdict(problem: Problem) -> None:
    folded, seats = placed(problem)
    ledger = Ledger(folded, seats)
    for number, seat in enumerate(seats):
        if seat is None:
            continue
        ledger.remove(number, seat)
        slow = device_by_device(folded, ledger, number, seat)
        sorts = Sorts(ledger, number)
        by_sort: dict[Any, set[tuple[str, str, int]]] = {}
        for place, verdict in slow.items():
            by_sort.setdefault(sorts.of(place), set()).add(verdict)
        assert all(len(verdicts) == 1 for verdicts in by_sort.values())
        ledger.add(number, seat)


@TRIES
@given(problems())
def test_the_summary_by_sorts_is_the_summary_device_by_device(problem: Problem) -> None:
    folded, seats = placed(problem)
    ledger = Ledger(folded, seats)
    for number, seat in enumerate(seats):
        if seat is None:
            continue
        fast = why_not_elsewhere(folded, ledger, number, seat)
        ledger.remove(number, seat)
        reasons = [
            summary.Reason(*verdict, [place])
            for place, verdict in device_by_device(folded, ledger, number, seat).items()
        ]
        ledger.add(number, seat)
        assert fast == summary._sentences(folded, summary._merged(reasons))
