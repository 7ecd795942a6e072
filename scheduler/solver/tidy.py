"""Local search for a rebalance: replicas that are dear where they are go, one by one, to where they cost less.

It sees what a move of one replica gains (a shared device, a dear one, an SLA that is missed, a server shared with
another replica of the version), in time that grows with the replicas that are dear, not with the square of the fleet.
Emptying a device takes several moves that only pay together; that is left to the integer program.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.solver.added import added_terms
from scheduler.solver.classes import Folded, Seat
from scheduler.solver.greedy import best_seat
from scheduler.solver.ledger import Ledger


def tidy(folded: Folded, seats: Sequence[Seat | None], moves_max: int) -> list[Seat | None]:
    """`seats` after at most `moves_max` moves, each of which costs less than it gains; the dearest replicas first."""
    found, ledger = list(seats), Ledger(folded, seats)
    dear: list[tuple[int, int]] = []
    for number, seat in enumerate(found):
        if seat is None or not folded.may_stay[number] or folded.problem.demands[number].settled:
            continue
        cost = _without(ledger, number, seat)
        if cost > folded.move_cost[number]:
            dear.append((-cost, number))
    moved = 0
    for _, number in sorted(dear):
        if moved == moves_max:
            break
        seat = found[number]
        assert seat is not None, "only what has a seat is dear"
        here = _without(ledger, number, seat)
        ledger.remove(number, seat)
        other = best_seat(ledger, number)
        if other is not None and other != seat and sum(added_terms(ledger, number, other).values()) < here:
            found[number] = other
            moved += 1
        ledger.add(number, found[number] or seat)
    return found


def _without(ledger: Ledger, number: int, seat: Seat) -> int:
    """What it costs that the replica is there; the ledger is left as it was."""
    ledger.remove(number, seat)
    cost = sum(added_terms(ledger, number, seat).values())
    ledger.add(number, seat)
    return cost
