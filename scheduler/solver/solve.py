"""From a problem to a plan: what may move, how long to look, and whether the result beats doing nothing.

`replan` is for the daily change (a model added, a device lost): only what has no good place is free, and neighbours are
freed step by step when that does not suffice. `plan_fleet` frees everything, as a rebalance does: exactly when the
fleet is small; else from the greedy answer by windows, parts of the fleet that are solved again one after the other
(large neighbourhood search, after P. Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems", CP 1998), until the bound of `bound` is near.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from scheduler.solver.bound import Relaxation
from scheduler.solver.candidates import candidates
from scheduler.solver.classes import Folded, Seat, fold, place_of
from scheduler.solver.constraints import tier_conflict
from scheduler.solver.cpsat import SOLVER, minimise
from scheduler.solver.explain import why_not
from scheduler.solver.floor import least
from scheduler.solver.greedy import greedy
from scheduler.solver.ledger import Ledger, keep
from scheduler.solver.model import PERMILLE, Assignment, Plan, Problem, Scope, Unplaceable
from scheduler.solver.moves import ordered_moves
from scheduler.solver.objective import Worth, cost_without, total
from scheduler.solver.part import Part
from scheduler.solver.program import Answer, Program
from scheduler.solver.room import make_room
from scheduler.solver.tidy import tidy
from scheduler.solver.windows import Window, neighbours, windows


class Limits(Struct, frozen=True, kw_only=True):
    """How much work a solve may do. Work is millionths of CP-SAT's deterministic time, never seconds."""

    exact_free_max: int = 16
    exact_seats_max: int = 1_500
    """A part with no more free replicas, or no more seats (kind x option x device), may be one program."""
    widened_seats_max: int = 6_000
    exact_work: int = 60_000
    bound_work: int = 300_000
    window_work: int = 40_000
    windows_max: int = 24
    gap_permille: int = 10
    """Near enough to the bound to stop."""
    look_max: int = 8
    """Free replicas up to which a bound in one look is tried before any program is built."""
    widenings: tuple[int, ...] = (6, 24)
    """Devices per unplaced replica whose contents are freed, step by step."""


FOR_FLEET = Limits(exact_work=2_000_000)
FOR_CHANGE = Limits(exact_work=20_000, bound_work=8_000, window_work=8_000, windows_max=2, gap_permille=20, look_max=64)
FOR_ORDER = structs.replace(FOR_CHANGE, window_work=3_000)
"""A rebalance solves several windows at once, and there will be another."""
REBALANCED_WHOLE_MAX = 64
"""Replicas of a fleet of which a rebalance looks at every placement."""
PARTS = 3
"""Windows of a rebalance of a larger one."""
LOOK_EXACT_MAX = 8
"""Free replicas up to which the greedy answer is taken only when it is known to be the best; of more, when it is near.
"""
COUNTED = ("programs", "work", "variables", "rows", "widenings", "free", "devices_seen")


class Search:
    """The best seats so far, and what it took to find them. Working state of one solve."""

    def __init__(self, folded: Folded, seats: Sequence[Seat | None], limits: Limits) -> None:
        self.folded = folded
        self.limits = limits
        self.base = tuple(seats)
        self.seats = list(seats)
        self.worth = Worth(folded)
        self.before = self.worth.total(seats)
        self.cost = self.before
        self.statistics = dict.fromkeys(COUNTED, 0)

    def offer(self, seats: Sequence[Seat | None]) -> bool:
        """Take the seats when they cost less."""
        cost = self.worth.total(seats)
        if cost >= self.cost:
            return False
        self.seats, self.cost = list(seats), cost
        return True

    def solve(self, free: Sequence[int], seats_max: int) -> int:
        """Place the free replicas anew; gives the lower bound of every placement that leaves the others alone.

        `seats_max`: seats (kind x option x candidate device) up to which this is one program.
        """
        folded = self.folded
        fixed = self._fixed(free)
        self._start(free, (), fixed)
        if len(free) <= self.limits.look_max:
            bound = cost_without(folded, self.seats, free, self.worth) + least(folded, fixed, free)
            near = self.limits.gap_permille if len(free) > LOOK_EXACT_MAX else 0
            if (self.cost - bound) * PERMILLE <= near * bound:
                return min(bound, self.cost)
        options = sum(len(folded.kinds[kind].sizes) for kind in sorted({folded.kind[number] for number in free}))
        if len(free) <= self.limits.exact_free_max or options * len(folded.usable) <= seats_max:
            devices = candidates(folded, fixed, free, self.seats)
            if options * len(devices) <= seats_max:
                return self.improve(Window(tuple(free), tuple(devices)), self.limits.exact_work)
        relaxed = Relaxation(folded, fixed, free, self.seats)
        answer = self.minimise(relaxed.program, self.limits.bound_work)
        bound = cost_without(folded, self.seats, free, self.worth) + answer.bound
        if answer.values is not None:
            self._start(free, relaxed.options(answer.values), fixed)
        for window in windows(folded, lambda: self.seats, free, self.limits.windows_max):
            if (self.cost - bound) * PERMILLE <= self.limits.gap_permille * bound:
                break
            self.improve(window, self.limits.window_work)
        return bound

    def _fixed(self, free: Sequence[int]) -> Ledger:
        seats = list(self.seats)
        for number in free:
            seats[number] = None
        return Ledger(self.folded, seats)

    def _start(self, free: Sequence[int], options: Sequence[int], fixed: Ledger) -> None:
        """Greedily beside what runs; and greedily without the free ones that run, where the moves are paid for."""
        beside, alone = list(self.seats), list(self.seats)
        for number in free:
            beside[number], alone[number] = self.base[number], None
        new = all(self.base[number] is None for number in free)
        self.offer(greedy(self.folded, beside, options, fixed if new else None))
        if any(beside[number] is not None for number in free):
            self.offer(_homing(self.folded, greedy(self.folded, alone, options)))

    def improve(self, window: Window, work: int) -> int:
        """Solve one part again on its devices, keeping the rest. Gives the lower bound of doing so."""
        folded, free, devices = self.folded, window.free, window.devices
        part = Part(folded, self._fixed(free), free, devices, self.seats)
        constant = self.cost - part.program.value(part.program.hint)
        answer = self.minimise(part.program, work)
        if answer.values is not None:
            seats = part.decode(answer.values)
            assert self.worth.total(seats) <= constant + part.program.value(answer.values), (
                "the program and the objective disagree"
            )
            self.offer(seats)
        self.statistics["free"] = max(self.statistics["free"], len(free))
        self.statistics["devices_seen"] = max(self.statistics["devices_seen"], len(devices))
        return constant + answer.bound

    def minimise(self, program: Program, work: int) -> Answer:
        answer = minimise(program, work)
        self.statistics["programs"] += 1
        self.statistics["work"] += answer.work
        self.statistics["variables"] = max(self.statistics["variables"], len(program.costs))
        self.statistics["rows"] = max(self.statistics["rows"], len(program.rows))
        return answer

    def unplaced(self) -> list[int]:
        """Serving replicas without a place that making room could help."""
        folded = self.folded
        serving = Ledger(folded, self.seats).serving
        return [
            number
            for number, seat in enumerate(self.seats)
            if not folded.placed(number, seat)
            and folded.problem.demands[number].purpose == "serve"
            and serving[folded.version[number]] < self._replicas_max(number)
        ]

    def _replicas_max(self, number: int) -> int:
        """How many replicas of its version the servers and workers that could take one may have."""
        folded, version = self.folded, self.folded.version[number]
        kind = folded.kinds[folded.kind[number]]
        fitting = [device for device, group in enumerate(folded.device_class) if kind.fits[group]]
        workers, servers = {folded.worker[d] for d in fitting}, {folded.server[d] for d in fitting}
        return min(folded.worker_limit[version] * len(workers), folded.server_limit[version] * len(servers))


def place_missing(problem: Problem, limits: Limits = FOR_CHANGE) -> Plan:
    """Place what has no place; what has a good one stays. Raises ConfigError for a problem that makes no sense."""
    return place_missing_in(fold(problem), limits)


def place_missing_in(folded: Folded, limits: Limits = FOR_CHANGE) -> Plan:
    """As `place_missing`, for a caller that goes on with the folded problem."""
    base, whole = keep(folded)
    search = Search(folded, base, limits)
    _, bound = _solve_missing(search)
    return _plan(search, "changed", bound, base, whole)


def _solve_missing(search: Search) -> tuple[tuple[int, ...], int]:
    """(what has no good place, the bound of placing it)."""
    changed = tuple(number for number, seat in enumerate(search.base) if not search.folded.placed(number, seat))
    bound = search.solve(changed, search.limits.exact_seats_max) if changed else search.cost
    return changed, bound


def replan(problem: Problem, limits: Limits = FOR_CHANGE) -> Plan:
    """Place what has no place, and move only what must move. Raises ConfigError for a problem that makes no sense."""
    folded = fold(problem)
    base, whole = keep(folded)
    search = Search(folded, base, limits)
    changed, bound = _solve_missing(search)
    if waiting := search.unplaced():
        search.statistics["widenings"] += 1
        search.offer(make_room(folded, search.seats, waiting))
        moved = [number for number, seat in enumerate(base) if seat is not None and seat != search.seats[number]]
        bound = search.solve(tuple(sorted({*changed, *moved})), limits.exact_seats_max)
    for devices in limits.widenings:
        waiting = search.unplaced()
        if not waiting:
            break
        search.statistics["widenings"] += 1
        wider = neighbours(folded, search.seats, waiting, devices)
        bound = search.solve(tuple(sorted({*changed, *wider})), limits.widened_seats_max)
    return _plan(search, "changed", bound, base, whole)


def plan_fleet(problem: Problem, limits: Limits = FOR_FLEET) -> Plan:
    """Place everything anew, as far as moving pays. Raises ConfigError for a problem that makes no sense."""
    folded = fold(problem)
    base, whole = keep(folded)
    search = Search(folded, base, limits)
    bound = search.solve(tuple(range(len(base))), limits.exact_seats_max)
    return _plan(search, "fleet", bound, base, whole)


def rebalance(problem: Problem, moves_max: int, limits: Limits = FOR_ORDER) -> Plan:
    """Better places for what runs, in at most `moves_max` moves. Raises ConfigError for a problem that makes no sense.

    Single moves that pay (`tidy`), and then a program over parts of the fleet; without the latter when it takes more
    moves.
    """
    folded = fold(problem)
    base, whole = keep(folded)
    search = Search(folded, base, limits)
    tidied = tidy(folded, base, moves_max)
    search.offer(tidied)
    if len(base) > REBALANCED_WHOLE_MAX:
        _tidy_parts(search, moves_max)
        return _plan(search, "fleet", 0, base, whole)
    bound = search.solve(tuple(range(len(base))), limits.exact_seats_max)
    if _moved(base, search.seats) > moves_max:
        search.seats, search.cost = tidied, search.worth.total(tidied)
    return _plan(search, "fleet", bound, base, whole)


def _tidy_parts(search: Search, moves_max: int) -> None:
    """A large fleet is never placed anew for a few moves: its emptiest devices are, with some that have room."""
    everything = tuple(range(len(search.base)))
    for window in windows(search.folded, lambda: search.seats, everything, PARTS):
        if _moved(search.base, search.seats) >= moves_max:  # a program would only find what takes too many
            return
        seats, cost = search.seats, search.cost
        search.improve(window, search.limits.window_work)
        if _moved(search.base, search.seats) > moves_max:
            search.seats, search.cost = seats, cost


def _moved(before: Sequence[Seat | None], after: Sequence[Seat | None]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


def _homing(folded: Folded, seats: list[Seat | None]) -> list[Seat | None]:
    """Replicas of a kind are interchangeable: those that run take the seats they run in, where these are used."""
    homed = list(seats)
    for kind in folded.kinds:
        found = sorted(seat for number in kind.members if (seat := seats[number]) is not None)
        waiting = dict.fromkeys(sorted(kind.members, key=lambda n: (folded.current[n] is None, n)))
        for number in tuple(waiting):
            homed[number] = None
            if folded.may_stay[number] and folded.current[number] in found:
                homed[number] = folded.current[number]
                found.remove(folded.current[number])  # type: ignore[arg-type]
                del waiting[number]
        for number, seat in zip(waiting, found, strict=False):
            homed[number] = seat
    return homed


def _plan(search: Search, scope: Scope, bound: int, base: list[Seat | None], whole: bool) -> Plan:
    """The best seats as a plan, or what is there when they are not better."""
    folded = search.folded
    do_nothing = search.before if whole else None
    taken = do_nothing is None or search.cost < do_nothing
    seats = search.seats if taken else base
    terms = search.worth.terms(seats)
    return Plan(
        taken=taken,
        scope=scope,
        assignments=_assignments(folded, seats),
        moves=ordered_moves(folded, seats) if taken else (),
        unplaceable=_unplaceable(folded, seats),
        terms=terms,
        cost=total(terms),
        lower_bound=min(bound, total(terms)),
        do_nothing_cost=do_nothing,
        solver=SOLVER,
        statistics={
            "devices": len(folded.usable),
            "device_classes": folded.classes,
            "replicas": len(folded.kind),
            "kinds": len(folded.kinds),
            **search.statistics,
        },
    )


def _assignments(folded: Folded, seats: Sequence[Seat | None]) -> tuple[Assignment, ...]:
    return tuple(
        Assignment(
            *folded.problem.demands[number].key,
            place_of(folded, number, seat),
            folded.problem.devices[seat[0][0]].server,
            not folded.placed(number, seat),
        )
        for number, seat in enumerate(seats)
        if seat is not None
    )


def _unplaceable(folded: Folded, seats: Sequence[Seat | None]) -> tuple[Unplaceable, ...]:
    missing = [number for number, seat in enumerate(seats) if not folded.placed(number, seat)]
    ledger = Ledger(folded, seats) if missing else None
    found: list[Unplaceable] = []
    for number in missing:
        assert ledger is not None
        demand, held = folded.problem.demands[number], seats[number]
        if held is not None:
            ledger.remove(number, held)
        found.append(Unplaceable(*demand.key, tier_conflict(demand), why_not(folded, ledger, number)))
        if held is not None:
            ledger.add(number, held)
    return tuple(found)
