"""Plans that move what runs: pure functions from a placement problem to moves, or to why there are none.

`plan_room` moves neighbours so that a wish fits; `plan_order` moves replicas to where they cost less. Both move new
before old only: a plan that would have to stop a serving replica first is not taken, and the solver is told that
stopping one costs more than anything gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, structs

from scheduler.placement import PlacementProblem, fleet_of, solver_run
from scheduler.plans import PlannedMove, PlannedStart
from scheduler.seats import Seat
from scheduler.solver.model import Move, Place, Plan, Problem
from scheduler.solver.solve import rebalance, replan
from sie_stream.decisions import SolverRun

MOVES_MAX = 16
"""Of one plan. What takes more is left as it is."""
NEVER_STOP = 100_000_000
GAIN_MIN = 150
"""A rebalance has to gain this much after its moves are paid for, and at least what they cost once more. What the
whole fleet costs is no measure: of two hundred devices it takes two to be half a percent, so none was ever emptied
alone."""


class MovePlan(Struct, frozen=True):
    """Either `why_not` or `moves` is empty."""

    why_not: str = ""
    moves: tuple[PlannedMove, ...] = ()
    starts: tuple[PlannedStart, ...] = ()
    solver: SolverRun | None = None


def plan_room(problem: PlacementProblem) -> MovePlan:
    """Moves after which at least one of the wishes fits."""
    found = _planned(problem, replan)
    if found.moves and not found.starts:
        return MovePlan("moving neighbours makes no room for it.")
    return found


def plan_order(problem: PlacementProblem) -> MovePlan:
    """Moves that pay, when they pay enough. `problem` has no wishes."""
    found = _planned(problem, lambda fleet: rebalance(fleet, MOVES_MAX))
    if found.solver is None or found.solver.do_nothing is None:
        return found
    gain, before = found.solver.do_nothing - found.solver.objective, found.solver.do_nothing
    if gain < max(GAIN_MIN, found.solver.terms.get("migration", 0)):
        return MovePlan(f"it would gain {gain} of {before}, which is too little to disturb what runs.")
    return found


def _planned(problem: PlacementProblem, solve: Callable[[Problem], Plan]) -> MovePlan:
    fleet = fleet_of(problem)
    fleet = structs.replace(fleet, objective=structs.replace(fleet.objective, stop=NEVER_STOP))
    plan = solve(fleet)
    running = [move for move in plan.moves if move.kind != "start"]
    if not plan.taken or not running:
        return MovePlan("no plan costs less than doing nothing.")
    interrupted = [move.model for move in plan.moves if move.kind == "stop" or move.order == "old-first"]
    if interrupted:
        return MovePlan(f"it would interrupt {interrupted[0]}.")
    if len(running) > MOVES_MAX:
        return MovePlan(f"it would take {len(running)} moves; {MOVES_MAX} are allowed at a time.")
    sizes = {demand.key: demand.options[0].memory_bytes for demand in fleet.demands}
    return MovePlan(
        moves=_renumbered([_move(move, sizes) for move in running]),
        starts=tuple(
            PlannedStart(move.model, move.generation, _seat(move.target), sizes[_key(move)])
            for move in plan.moves
            if move.kind == "start"
        ),
        solver=solver_run(plan),
    )


def _move(move: Move, sizes: dict[tuple[str, int, int], int]) -> PlannedMove:
    source, target = _seat(move.source), _seat(move.target)
    return PlannedMove(move.model, move.generation, source, target, sizes[_key(move)], move.wave)


def _renumbered(moves: Sequence[PlannedMove]) -> tuple[PlannedMove, ...]:
    """Waves in which only something starts are no waves of moves: consecutive numbers from 0."""
    waves = {wave: number for number, wave in enumerate(sorted({move.wave for move in moves}))}
    return tuple(structs.replace(move, wave=waves[move.wave]) for move in moves)


def _key(move: Move) -> tuple[str, int, int]:
    return move.model, move.generation, move.replica


def _seat(place: Place | None) -> Seat:
    assert place is not None, "only a start comes from nowhere, and only a stop goes nowhere"
    return (place.worker, *place.devices)
