"""The short explanation: the same costs as the long one in few sentences; replicas prefer a server of their own."""

from __future__ import annotations

from hypothesis import given

from scheduler.solver import plan_fleet
from scheduler.solver.added import added_terms
from scheduler.solver.classes import fold
from scheduler.solver.constraints import Refusal
from scheduler.solver.explain import seat_on, seats_of
from scheduler.solver.ledger import Ledger
from scheduler.solver.model import Objective, Problem
from scheduler.solver.objective import evaluate
from scheduler.solver.solve import place_missing, rebalance
from scheduler.solver.summary import SENTENCES_MAX, why_not_elsewhere
from tests.examples import examples
from tests.unit.scheduler.solver.checks import broken_rules
from tests.unit.scheduler.solver.fleets import demand, device, place, problems, where

TRIES = examples(40)


@TRIES
@given(problems())
def test_what_a_seat_adds_is_what_the_whole_objective_says(problem: Problem) -> None:
    folded = fold(problem)
    seats = seats_of(folded, plan_fleet(problem))
    before = evaluate(folded, seats)
    for number, seat in enumerate(seats):
        if seat is None or not folded.placed(number, seat):
            continue
        ledger = Ledger(folded, [None if other == number else one for other, one in enumerate(seats)])
        here = added_terms(ledger, number, seat)
        for target in range(len(folded.usable)):
            kind = folded.kinds[folded.kind[number]]
            if not kind.fits[folded.device_class[target]]:
                continue
            other = seat_on(ledger, number, target)
            if isinstance(other, Refusal):
                continue
            there = added_terms(ledger, number, other)
            after = evaluate(folded, [other if n == number else one for n, one in enumerate(seats)])
            assert {t: there[t] - here[t] for t in there} == {t: after[t] - before[t] for t in after}


@TRIES
@given(problems())
def test_every_other_device_is_counted_once_and_the_ledger_is_left_alone(problem: Problem) -> None:
    folded = fold(problem)
    seats = seats_of(folded, plan_fleet(problem))
    ledger = Ledger(folded, seats)
    free = list(ledger.free)
    for number, seat in enumerate(seats):
        if seat is not None:
            sentences = why_not_elsewhere(folded, ledger, number, seat)
            others = len(folded.usable) - len(seat[0])
            assert bool(sentences) == bool(others)
            assert len(sentences) <= SENTENCES_MAX + 1
            assert sum(_devices(sentence) for sentence in sentences) == others
    assert ledger.free == free


def _devices(sentence: str) -> int:
    named, _, _ = sentence.partition(": ")
    listed, _, more = named.partition(" and ")
    return len(listed.split(", ")) + int(more.removesuffix(" more") or 0)


def test_a_large_fleet_takes_few_sentences() -> None:
    devices = tuple(device(f"s{server}:g{number}", 100 + server) for server in range(40) for number in range(4))
    holders = tuple(demand(f"m{n}", 60 + n % 30, current=None) for n in range(150))
    problem = Problem(devices=devices, demands=(*holders, demand("new", 50)), objective=Objective(packing="spread"))
    plan = place_missing(problem)
    folded = fold(problem)
    seats = seats_of(folded, plan)
    seat = seats[-1]
    assert seat is not None
    sentences = why_not_elsewhere(folded, Ledger(folded, seats), len(seats) - 1, seat)
    assert len(sentences) <= 4, sentences
    assert any(sentence.partition(": ")[2].startswith("e.g. ") for sentence in sentences)


def test_replicas_of_a_model_are_on_different_servers_where_they_can_be() -> None:
    devices = tuple(device(f"s{server}:g{n}", worker=f"s{server}w{n}") for server in range(2) for n in range(2))
    two = (demand("m", 10, replica=0), demand("m", 10, replica=1))
    for packing in ("spread", "binpack"):
        found = where(plan_fleet(Problem(devices=devices, demands=two, objective=Objective(packing=packing))))
        assert {place[:2] for place in found.values()} == {"s0", "s1"}, packing


@TRIES
@given(problems())
def test_a_rebalance_of_few_moves_is_a_lawful_plan(problem: Problem) -> None:
    plan = rebalance(problem, 2)
    assert not broken_rules(problem, plan)
    assert plan.lower_bound <= plan.cost
    assert plan.do_nothing_cost is None or plan.cost <= plan.do_nothing_cost


def test_single_moves_empty_the_fullest_devices_of_a_spread_fleet() -> None:
    """Twenty devices came back empty beside twenty that hold two replicas each: too much for one program."""
    devices = tuple(device(f"s{n:02}:g0") for n in range(40))
    demands = tuple(demand(f"m{n}", 30 + n % 5, current=place(f"s{n % 20:02}:g0")) for n in range(40))
    problem = Problem(devices=devices, demands=demands, objective=Objective(packing="spread"))
    plan = rebalance(problem, 16)
    assert [move.kind for move in plan.moves] == ["move"] * 16
    assert plan.terms["balance"] == 4 * 200


def test_one_server_holds_them_on_different_workers() -> None:
    devices = tuple(device(f"s0:g{n}", worker=f"w{n}") for n in range(2))
    plan = plan_fleet(Problem(devices=devices, demands=(demand("m", 10, replica=0), demand("m", 10, replica=1))))
    assert sorted(place[:2] for place in where(plan).values()) == ["w0", "w1"]
    assert plan.terms["same_server"] > 0
