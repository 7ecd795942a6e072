"""The solver against its slow twin: the same fleets can be placed, at the same cost, within every rule."""

from __future__ import annotations

import pytest
from hypothesis import event, given

from scheduler.solver.bound import Relaxation
from scheduler.solver.brute import enumerate_all
from scheduler.solver.candidates import candidates
from scheduler.solver.classes import fold
from scheduler.solver.cpsat import minimise
from scheduler.solver.explain import seats_of
from scheduler.solver.floor import least
from scheduler.solver.greedy import greedy
from scheduler.solver.ledger import Ledger, keep
from scheduler.solver.model import Problem
from scheduler.solver.objective import cost_without, evaluate, total
from scheduler.solver.part import Part
from scheduler.solver.solve import plan_fleet, replan
from tests.examples import examples
from tests.unit.scheduler.solver.checks import broken_rules
from tests.unit.scheduler.solver.fleets import PLACE_ALL, problems

TRIES = examples(60)


@TRIES
@given(problems())
def test_a_whole_fleet_is_placed_as_well_as_trying_everything_does(problem: Problem) -> None:
    folded = fold(problem)
    best, plan = enumerate_all(folded), plan_fleet(problem)
    _, whole = keep(folded)
    event(f"all placed: {best.all_placed}, do nothing possible: {whole}, taken: {plan.taken}")
    assert plan.cost == best.cost
    assert plan.optimal
    assert total(plan.terms) == plan.cost
    assert not broken_rules(problem, plan)
    if problem.objective == PLACE_ALL:
        assert best.all_placed is not bool(plan.unplaceable)


@TRIES
@given(problems())
def test_a_change_is_valid_and_its_bound_true(problem: Problem) -> None:
    folded = fold(problem)
    base, whole = keep(folded)
    best, plan = enumerate_all(folded), replan(problem)
    assert best.cost <= plan.cost
    assert plan.lower_bound <= plan.cost
    assert not broken_rules(problem, plan)
    assert (plan.do_nothing_cost is not None) is whole
    if plan.do_nothing_cost is not None:
        assert plan.do_nothing_cost == total(evaluate(folded, base))
        assert plan.cost <= plan.do_nothing_cost
    if not plan.statistics["widenings"]:
        # Only what had no good place was free: everything else is where it was.
        after = seats_of(folded, plan)
        assert all(after[n] == seat for n, seat in enumerate(base) if folded.placed(n, seat))


@TRIES
@given(problems())
def test_the_bound_without_search_is_never_above_the_best(problem: Problem) -> None:
    folded = fold(problem)
    everything = range(len(problem.demands))
    nothing = [None] * len(problem.demands)
    relaxed = Relaxation(folded, Ledger(folded), everything, nothing)
    assert not relaxed.program.broken_by(relaxed.program.hint)
    bound = cost_without(folded, nothing, everything) + minimise(relaxed.program, 100_000).bound
    assert bound <= enumerate_all(folded).cost


@TRIES
@given(problems())
def test_the_bound_in_one_look_is_never_above_the_best(problem: Problem) -> None:
    """Of what has no good place, the rest fixed; and with everything free."""
    folded = fold(problem)
    base, _ = keep(folded)
    for free in ([n for n, seat in enumerate(base) if not folded.placed(n, seat)], list(range(len(base)))):
        seats = [None if number in free else seat for number, seat in enumerate(base)]
        bound = cost_without(folded, base, free) + least(folded, Ledger(folded, seats), free) if free else 0
        fixed = {number: base[number] for number in range(len(base)) if number not in free}
        assert bound <= enumerate_all(folded, fixed).cost


@TRIES
@given(problems())
def test_programs_take_the_greedy_answer_as_their_hint(problem: Problem) -> None:
    """The hint keeps every row, and costs what `evaluate` says once moving everything that runs is added."""
    folded = fold(problem)
    everything = range(len(problem.demands))
    base, _ = keep(folded)
    seats = greedy(folded, base)
    devices = candidates(folded, Ledger(folded), everything, seats)
    part = Part(folded, Ledger(folded), everything, devices, seats)
    relaxed = Relaxation(folded, Ledger(folded), everything, seats)
    cost = total(evaluate(folded, seats))
    assert not part.program.broken_by(part.program.hint)
    assert not relaxed.program.broken_by(relaxed.program.hint)
    moving = sum(folded.move_cost)
    assert cost_without(folded, seats, everything) + moving + part.program.value(part.program.hint) == cost
    # Less when the greedy answer stops a running replica and starts its like: decoding lets the running one move.
    assert total(evaluate(folded, part.decode(part.program.hint))) <= cost


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_place_costs_nothing(count: int) -> None:
    plan = (plan_fleet, replan)[count](Problem(devices=(), demands=()))
    assert (plan.cost, plan.lower_bound, plan.taken, plan.moves) == (0, 0, False, ())
