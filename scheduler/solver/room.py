"""Room for a replica that fits nowhere: a few neighbours go elsewhere, or yield when they are worth less.

One step deep: what is moved finds a seat that is free, and moves nothing else. Deeper chains are left to the integer
program over a wider part of the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.greedy import best_seat
from scheduler.solver.ledger import Ledger

TARGETS_MAX = 24
"""Seats tried for each replica, those with the most free memory first."""


class Change(Struct, frozen=True):
    """Seats to take, in order, and what that costs apart from the objective's smaller terms."""

    cost: int
    seats: tuple[tuple[int, Seat | None], ...]


def make_room(folded: Folded, seats: Sequence[Seat | None], waiting: Sequence[int]) -> list[Seat | None]:
    """`seats` with as many of the waiting placed as neighbours can make room for; the most valuable first."""
    found = list(seats)
    ledger = Ledger(folded, found)
    for number in sorted(waiting, key=lambda number: (-_value(ledger, number), number)):
        held = found[number]
        if held is not None:
            ledger.remove(number, held)
            found[number] = None
        changes = [change for seat in _targets(ledger, number) if (change := _change(ledger, found, number, seat))]
        best = min(changes, key=lambda change: change.cost, default=None)
        if best is not None:
            _apply(ledger, found, best)
        elif held is not None:
            ledger.add(number, held)
            found[number] = held
    return found


def _apply(ledger: Ledger, seats: list[Seat | None], change: Change) -> None:
    for number, _ in change.seats:
        before = seats[number]
        if before is not None:
            ledger.remove(number, before)
    for number, seat in change.seats:
        seats[number] = seat
        if seat is not None:
            ledger.add(number, seat)


def _value(ledger: Ledger, number: int) -> int:
    """What it costs to leave it out now."""
    folded, version = ledger.folded, ledger.folded.version[number]
    kind = folded.kinds[folded.kind[number]]
    first = folded.first_cost[version] if kind.demand.purpose == "serve" and not ledger.serving[version] else 0
    return kind.unplaced_cost + first


def _targets(ledger: Ledger, number: int) -> list[Seat]:
    """Seats that only lack memory: of each group the devices with the most of it."""
    folded, kind = ledger.folded, ledger.folded.kinds[ledger.folded.kind[number]]
    size = kind.demand.tensor_parallel_size
    found: list[tuple[int, Seat]] = []
    groups = folded.groups_of(folded.kind[number]) if size > 1 else [(device,) for device in range(len(folded.usable))]
    for group in groups:
        for option in range(len(kind.sizes)):
            allowed = [d for d in group if option in kind.fits[folded.device_class[d]] and ledger.admits(number, d)]
            if len(allowed) >= size:
                roomy = sorted(allowed, key=lambda device: (-ledger.free[device], device))[:size]
                short = sum(max(0, kind.sizes[option] - ledger.free[device]) for device in roomy)
                found.append((short, (tuple(sorted(roomy)), option)))
    return [seat for _, seat in sorted(found)[:TARGETS_MAX]]


def _change(ledger: Ledger, seats: Sequence[Seat | None], number: int, seat: Seat) -> Change | None:
    """What has to go for this seat, and where to; None when that is impossible or costs more than it brings.

    The ledger is left as it was.
    """
    done: list[tuple[int, Seat]] = []
    gone: list[int] = []
    folded, value = ledger.folded, _value(ledger, number)
    cost = 0
    for device in seat[0]:
        gone += _clear(ledger, seats, number, seat[1], device)
    possible = ledger.has_room(number, seat)
    if possible:
        ledger.add(number, seat)
        done.append((number, seat))
    for other in gone if possible else ():
        elsewhere = best_seat(ledger, other)
        running = folded.current[other] is not None
        if elsewhere is None:
            cost += _value(ledger, other) + (folded.kinds[folded.kind[other]].stop_cost if running else 0)
        else:
            cost += folded.move_cost[other]
            ledger.add(other, elsewhere)
            done.append((other, elsewhere))
    for moved, place in reversed(done):
        ledger.remove(moved, place)
    for other in gone:
        ledger.add(other, _seat_of(seats, other))
    if not possible or cost >= value:
        return None
    places = dict(done)
    return Change(cost, ((number, seat), *((other, places.get(other)) for other in gone)))


def _clear(ledger: Ledger, seats: Sequence[Seat | None], number: int, option: int, device: int) -> list[int]:
    """Take neighbours off the device until the replica fits: the smallest that is large enough, else the largest."""
    folded = ledger.folded
    wanted = folded.weight(folded.kind[number], option, device)

    def size(other: int) -> int:
        return folded.weight(folded.kind[other], _seat_of(seats, other)[1], device)

    gone: list[int] = []
    while ledger.free[device] < wanted and ledger.holders[device]:
        sized = sorted(
            (folded.weight(folded.kind[n], _seat_of(seats, n)[1], device), n) for n in ledger.holders[device]
        )
        enough = [one for one in sized if one[0] >= wanted - ledger.free[device]]
        other = (enough or sized[-1:])[0][1]
        ledger.remove(other, _seat_of(seats, other))
        gone.append(other)
    return gone


def _seat_of(seats: Sequence[Seat | None], number: int) -> Seat:
    seat = seats[number]
    assert seat is not None, "what a ledger holds has a seat"
    return seat
