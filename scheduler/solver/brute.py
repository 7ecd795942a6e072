"""The slow twin of the solver: every placement of a small fleet is tried, and checked by rules written down again.

It shares with the solver what things cost (`objective.evaluate`) and what forbids a device (`constraints`), and nothing
else: no kinds, no ledger, no program. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType

from msgspec import Struct

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.constraints import forbids
from scheduler.solver.objective import evaluate, total


class Best(Struct, frozen=True):
    """The cheapest placement, and whether some placement seats every replica."""

    cost: int
    seats: tuple[Seat | None, ...]
    all_placed: bool
    tried: int


def enumerate_all(folded: Folded, fixed: Mapping[int, Seat | None] = MappingProxyType({})) -> Best:
    """Exponential: keep to about five replicas on five devices. `fixed`, by demand: what has one choice only."""
    choices = [
        (fixed[number],) if number in fixed else tuple(_choices(folded, number)) for number in range(len(folded.kind))
    ]
    best: tuple[int, tuple[Seat | None, ...]] | None = None
    all_placed, tried = False, 0
    for seats in _placements(folded, choices, ()):
        tried += 1
        cost = total(evaluate(folded, seats))
        all_placed = all_placed or all(folded.placed(number, seat) for number, seat in enumerate(seats))
        if best is None or cost < best[0]:
            best = cost, seats
    assert best is not None, "placing nothing is always possible"
    return Best(*best, all_placed, tried)


def _choices(folded: Folded, number: int) -> Iterator[Seat | None]:
    """No seat, the present one (kept or held), and every set of devices of one group in every option."""
    demand, devices = folded.problem.demands[number], folded.problem.devices
    current = folded.current[number]
    yield None
    if current is not None:
        yield current
    for option, wanted in enumerate(demand.options):
        for group in folded.groups_of(folded.kind[number]):
            allowed = [device for device in group if forbids(demand, wanted, devices[device]) is None]
            for chosen in combinations(allowed, demand.tensor_parallel_size):
                if (chosen, option) != current:
                    yield chosen, option
    # A running tensor-parallel replica never starts anew half on a device that takes nothing new: it stays or goes.


def _placements(
    folded: Folded, choices: Sequence[Sequence[Seat | None]], chosen: tuple[Seat | None, ...]
) -> Iterator[tuple[Seat | None, ...]]:
    if len(chosen) == len(choices):
        yield chosen
        return
    for seat in choices[len(chosen)]:
        longer = (*chosen, seat)
        if seat is None or _allowed(folded, longer):
            yield from _placements(folded, choices, longer)


def _allowed(folded: Folded, seats: Sequence[Seat | None]) -> bool:
    """Whether the last seat fits beside the earlier ones; every rule is symmetric, so this checks all pairs."""
    return _memory(folded, seats) and _neighbours(folded, seats)


def _memory(folded: Folded, seats: Sequence[Seat | None]) -> bool:
    demands, last = folded.problem.demands, seats[-1]
    assert last is not None
    for device in last[0]:
        there = [number for number, seat in enumerate(seats) if seat is not None and device in seat[0]]
        taken = sum(demands[number].options[(seats[number] or ((), 0))[1]].memory_bytes for number in there)
        offer = folded.problem.devices[device]
        if taken > offer.memory_bytes - offer.reserved_bytes:
            return False
        if len(there) > 1 and any(demands[number].exclusive for number in there):
            return False
        if len({demands[number].version for number in there}) < len(there):
            return False
    return True


def _neighbours(folded: Folded, seats: Sequence[Seat | None]) -> bool:
    """Anti-affinity by worker and by server."""
    demands, devices, last = folded.problem.demands, folded.problem.devices, seats[-1]
    demand = demands[len(seats) - 1]
    assert last is not None
    home = devices[last[0][0]]
    others = [(demands[number], devices[seat[0][0]]) for number, seat in enumerate(seats[:-1]) if seat is not None]
    same = [(other, place) for other, place in others if other.version == demand.version]
    limits = [other.max_per_server for other in demands if other.version == demand.version]
    by_server = min((limit for limit in limits if limit is not None), default=len(demands))
    by_worker = min(other.max_per_worker for other in demands if other.version == demand.version)
    if sum(place.worker == home.worker for _, place in same) >= by_worker:
        return False
    return sum(place.server == home.server for _, place in same) < by_server
