"""In which order a plan is carried out: every replica is ready at its new place before the old one stops.

While it moves a replica takes memory at both ends, so moves wait for each other. They go in waves: what has room now,
then what has room after that. Where a cycle leaves no such order the least valuable replica of it stops first.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from scheduler.solver.classes import Folded, Seat, place_of
from scheduler.solver.model import Move, MoveKind, MoveOrder


class Pending(Struct):
    """A seat to be taken, and the one that is left for it while it still is held."""

    number: int
    target: Seat
    source: Seat | None
    order: MoveOrder = "new-first"


class Rooms:
    """Memory and versions per worker while moves are under way; a moving replica counts at both ends."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.free = list(folded.usable)
        self.on_worker: dict[tuple[int, int], int] = {}
        for number, seat in enumerate(folded.current):
            if seat is not None:
                self.change(number, seat, 1)

    def change(self, number: int, seat: Seat, step: int) -> None:
        folded = self.folded
        for device in seat[0]:
            self.free[device] -= step * folded.weight(folded.kind[number], seat[1], device)
        key = folded.version[number], folded.worker[seat[0][0]]
        self.on_worker[key] = self.on_worker.get(key, 0) + step

    def fits(self, number: int, seat: Seat, source: Seat | None) -> bool:
        folded, version = self.folded, self.folded.version[number]
        here = self.on_worker.get((version, folded.worker[seat[0][0]]), 0)
        # A move within a worker: for as long as it takes, the replica counts there once.
        here -= source is not None and folded.worker[source[0][0]] == folded.worker[seat[0][0]]
        return here < folded.worker_limit[version] and all(
            self.free[device] >= folded.weight(folded.kind[number], seat[1], device) for device in seat[0]
        )


def ordered_moves(folded: Folded, seats: Sequence[Seat | None]) -> tuple[Move, ...]:
    """Everything between what runs now and `seats`, by wave. What is evicted stops in wave 0."""
    rooms = Rooms(folded)
    moves: list[Move] = []
    pending: list[Pending] = []
    for number, (before, after) in enumerate(zip(folded.current, seats, strict=True)):
        if before == after:
            continue
        if after is not None:
            pending.append(Pending(number, after, before))
        elif before is not None:
            rooms.change(number, before, -1)
            moves.append(_move(folded, "stop", number, before, None, 0, "old-first"))
    wave = 1 if moves else 0
    while pending:
        ready = _ready(rooms, pending)
        if not ready:
            moves.append(_break_cycle(folded, rooms, pending, wave))
        for one in ready:
            kind: MoveKind = "start" if one.source is None else "move"
            moves.append(_move(folded, kind, one.number, one.source, one.target, wave, one.order))
            if one.source is not None:
                rooms.change(one.number, one.source, -1)
        done = {one.number for one in ready}
        pending = [one for one in pending if one.number not in done]
        wave += 1
    return tuple(moves)


def _ready(rooms: Rooms, pending: Sequence[Pending]) -> list[Pending]:
    """What has room beside everything that is there now; it takes that room."""
    ready: list[Pending] = []
    for one in pending:
        if rooms.fits(one.number, one.target, one.source):
            rooms.change(one.number, one.target, 1)
            ready.append(one)
    return ready


def _break_cycle(folded: Folded, rooms: Rooms, pending: Sequence[Pending], wave: int) -> Move:
    """The least valuable replica that still runs at its old place stops there, and starts when it has room."""
    running = [one for one in pending if one.source is not None]
    assert running, "the seats of a plan fit together, so what has stopped makes room"
    one = min(running, key=lambda one: (folded.problem.demands[one.number].sla_weight, one.number))
    source = one.source
    assert source is not None
    rooms.change(one.number, source, -1)
    one.source, one.order = None, "old-first"
    return _move(folded, "stop", one.number, source, None, wave, "old-first")


def _move(
    folded: Folded,
    kind: MoveKind,
    number: int,
    source: Seat | None,
    target: Seat | None,
    wave: int,
    order: MoveOrder,
) -> Move:
    demand = folded.problem.demands[number]
    return Move(
        kind=kind,
        model=demand.model,
        generation=demand.generation,
        replica=demand.replica,
        source=None if source is None else place_of(folded, number, source),
        target=None if target is None else place_of(folded, number, target),
        wave=wave,
        order=order,
    )
