"""A good placement without search: the start of the integer program, and the answer when it finds nothing better.

Three ways are tried and the cheapest is taken: best fit with the largest first, best fit with the most valuable first
(which matters when not everything fits), and, for binpack, filling one device after the other (`filling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.filling import fill, is_plain
from scheduler.solver.groupings import numbered
from scheduler.solver.ledger import Ledger
from scheduler.solver.objective import (
    cold_cost,
    device_cost,
    evaluate,
    fragment_cost,
    pair_cost,
    seat_cost,
    server_cost,
    span_cost,
    total,
)

Rank = tuple[int, int, int]
FILL_MIN = 8
"""Fewer replicas than this are not worth filling devices with."""


def greedy(
    folded: Folded, start: Sequence[Seat | None], options: Sequence[int] = (), ledger: Ledger | None = None
) -> list[Seat | None]:
    """`start` and, where there is room, a seat for everything in it that has none. Never moves what has a good one.

    `options`, by demand: the precision that filling should use, when something better than "the best" is known.
    `ledger` holds the start, for a caller that has one.
    """
    ledger = Ledger(folded, start) if ledger is None else ledger
    waiting = [number for number, seat in enumerate(start) if not folded.placed(number, seat)]
    largest = sorted(waiting, key=lambda number: _largest_first(folded, number))
    found = [best_fit(ledger, start, largest)]
    if any(not folded.placed(number, found[0][number]) for number in waiting):
        found.append(best_fit(ledger, start, _most_valuable_first(ledger, waiting)))
    if folded.objective.packing == "binpack" and len(waiting) >= FILL_MIN:
        special = [number for number in largest if not is_plain(folded, number)]
        filled = fill(folded, best_fit(ledger, start, special), options)
        found.append(best_fit(Ledger(folded, filled), filled, largest))
    return found[0] if len(found) == 1 else min(found, key=lambda seats: total(evaluate(folded, seats)))


def _largest_first(folded: Folded, number: int) -> tuple[int, int, int, int]:
    """KV groups together, then tensor-parallel and exclusive ones, then by size; ties in the order of the problem."""
    kind = folded.kinds[folded.kind[number]]
    demand = kind.demand
    special = demand.tensor_parallel_size > 1 or demand.exclusive or folded.kv[number] >= 0
    exchange = folded.kv[number] if folded.kv[number] >= 0 else len(folded.kind)
    return -special, exchange, -kind.sizes[0] * demand.tensor_parallel_size, number


def _most_valuable_first(ledger: Ledger, waiting: Sequence[int]) -> list[int]:
    """First replicas before second ones, then by what it costs to leave one out, then by size."""
    folded, serving = ledger.folded, ledger.serving[:]
    ranked: list[tuple[int, int, int, int]] = []
    for number in waiting:
        kind, version = folded.kinds[folded.kind[number]], folded.version[number]
        first = folded.first_cost[version] if not serving[version] else 0
        serving[version] += kind.demand.purpose == "serve"
        ranked.append((-kind.unplaced_cost - first, -kind.sizes[0], folded.kind[number], number))
    return [number for *_, number in sorted(ranked)]


# ---------------------------------------------------------------- best fit


def best_fit(held: Ledger, start: Sequence[Seat | None], order: Iterable[int]) -> list[Seat | None]:
    """`start` and a seat for each of `order` that has no good one, each the cheapest at its turn.

    `held` holds the start, and is left as it is.
    """
    seats, ledger = list(start), held.copy()
    for number in order:
        if not ledger.folded.placed(number, seats[number]):
            _seat_best(ledger, seats, number)
    return seats


def _seat_best(ledger: Ledger, seats: list[Seat | None], number: int) -> None:
    held = seats[number]
    if held is not None:
        ledger.remove(number, held)
    found = best_seat(ledger, number)
    seats[number] = found if found is not None else held
    if seats[number] is not None:
        ledger.add(number, seats[number])  # type: ignore[arg-type]


def best_seat(ledger: Ledger, number: int) -> Seat | None:
    """The cheapest seat with room now; among equals the tightest (binpack) or the emptiest (spread), then the first."""
    folded = ledger.folded
    size = folded.kinds[folded.kind[number]].demand.tensor_parallel_size
    if size == 1:
        ranked = _ranked(ledger, number, range(len(folded.usable)))
        return min(ranked, key=lambda found: found[0])[1] if ranked else None
    best: tuple[Rank, Seat] | None = None
    seen: set[tuple[int, ...]] = set()
    for group in folded.groups_of(folded.kind[number]):
        if len(group) < size:
            continue
        if not any(ledger.count[device] for device in group) and ledger.admits(number, group[0]):
            # Of groups that hold nothing the first of each shape is enough.
            shape = _shape(ledger, number, group)
            if shape in seen:
                continue
            seen.add(shape)
        best = _better(best, _in_group(ledger, number, group, size, -1))
    return None if best is None else best[1]


def _shape(ledger: Ledger, number: int, group: Sequence[int]) -> tuple[int, ...]:
    """What tells empty groups apart."""
    folded = ledger.folded
    kind = folded.kinds[folded.kind[number]]
    marks = [folded.worker[d] if folded.worker[d] in kind.warm_workers else -1 for d in group]
    marks += [d for d in group if d in kind.failed_devices]
    touched = [int(folded.island[d] >= 0 and ledger.island_used[folded.island[d]] > 0) for d in group]
    beside = int(_beside(ledger, number, group[0]) > 0)
    marks += [ledger.apart(number, (d,)) for d in group]
    for nearer in folded.group_at[: kind.level]:
        marks += numbered(nearer[d] for d in group)
    return beside, *(folded.device_class[d] for d in group), *touched, *marks


def best_in_group(ledger: Ledger, number: int, group: Sequence[int], size: int, device: int) -> Seat | None:
    """The cheapest seat of `size` devices of the group, `device` among them; None when they have no room together."""
    found = _in_group(ledger, number, group, size, device)
    return None if found is None else found[1]


def _in_group(ledger: Ledger, number: int, group: Sequence[int], size: int, wanted: int) -> tuple[Rank, Seat] | None:
    best: tuple[Rank, Seat] | None = None
    ranked = _ranked(ledger, number, group if size > 1 or wanted < 0 else (wanted,))
    for option in range(len(ledger.folded.kinds[ledger.folded.kind[number]].sizes)):
        of_option = [found for found in ranked if found[1][1] == option]
        for order in _orders(ledger, number, of_option):
            fitting = sorted(of_option, key=lambda found: (found[1][0][0] != wanted, *order(found)))[:size]
            if wanted >= 0 and not any(found[1][0][0] == wanted for found in fitting):
                continue
            if len(fitting) == size:
                devices = tuple(sorted(seat[0][0] for _, seat in fitting))
                cost = sum(found[0][0] for found in fitting) + _together(ledger, number, devices)
                rank = (cost, sum(found[0][1] for found in fitting), devices[0])
                best = _better(best, (rank, (devices, option)))
    return best


def _orders(
    ledger: Ledger, number: int, found: Sequence[tuple[Rank, Seat]]
) -> list[Callable[[tuple[Rank, Seat]], tuple[object, ...]]]:
    """In which order devices are taken. Where a replica may span islands: once from each of them, the nearest next."""
    folded, kind = ledger.folded, ledger.folded.kind[number]
    level = folded.kinds[kind].level
    if not level:
        return [lambda one: (one[0],)]
    room: dict[int, int] = {}
    for _, seat in found:
        group = folded.group[seat[0][0]]
        room[group] = room.get(group, 0) + 1
    near = folded.group_at[1]
    first = {folded.group[seat[0][0]]: near[seat[0][0]] for _, seat in found}

    def order(island: int, node: int) -> Callable[[tuple[Rank, Seat]], tuple[object, ...]]:
        def key(one: tuple[Rank, Seat]) -> tuple[object, ...]:
            device = one[1][0][0]
            group = folded.group[device]
            return group != island, near[device] != node, -room[group], group, one[0]

        return key

    return [order(island, node) for island, node in first.items()]


def _together(ledger: Ledger, number: int, devices: Sequence[int]) -> int:
    """What the devices of a replica cost together beside what each costs alone."""
    alone = sum(ledger.apart(number, (device,)) for device in devices)
    apart = ledger.folded.objective.kv_apart * (ledger.apart(number, devices) - alone)
    return apart + span_cost(ledger.folded, ledger.folded.kind[number], devices)


def _better(one: tuple[Rank, Seat] | None, other: tuple[Rank, Seat] | None) -> tuple[Rank, Seat] | None:
    if one is None or other is None:
        return one or other
    return min(one, other)


def _ranked(ledger: Ledger, number: int, devices: Iterable[int]) -> list[tuple[Rank, Seat]]:
    """Single devices with room: (cost, slack, device) and the seat. Of equal empty devices only the first."""
    folded, index = ledger.folded, ledger.folded.kind[number]
    kind = folded.kinds[index]
    alone = kind.demand.tensor_parallel_size == 1 and not kind.failed_devices and not kind.demand.warm_on
    sign = 1 if folded.objective.packing == "binpack" else -1
    smallest = min(kind.sizes)
    seen: set[tuple[int, bool, bool, int]] = set()
    found: list[tuple[Rank, Seat]] = []
    for device in devices:
        group = folded.device_class[device]
        if not kind.fits[group] or ledger.free[device] < smallest or not ledger.admits(number, device):
            continue
        if alone and not ledger.count[device]:
            island = folded.island[device]
            apart = ledger.apart(number, (device,))
            state = (group, island >= 0 and ledger.island_used[island] > 0, _beside(ledger, number, device) > 0, apart)
            if state in seen:
                continue
            seen.add(state)
        for option in kind.fits[group]:
            free = ledger.free[device] - folded.weight(index, option, device)
            if free >= 0:
                cost = seat_cost(folded, index, option, device) + cold_cost(folded, index, device)
                cost += _beside(ledger, number, device) + ledger.load_cost(index, device)
                cost += folded.objective.kv_apart * ledger.apart(number, (device,))
                found.append(((cost + _opening(ledger, device), sign * free, device), ((device,), option)))
    return found


def _beside(ledger: Ledger, number: int, device: int) -> int:
    """What it costs that the server has a replica of the version already."""
    version = ledger.folded.version[number]
    held = ledger.on_server.get((version, ledger.folded.server[device]), 0)
    return server_cost(ledger.folded, version) if held else 0


def _opening(ledger: Ledger, device: int) -> int:
    """What the device costs in addition when one more replica is put on it."""
    folded, count = ledger.folded, ledger.count[device]
    if count:
        return pair_cost(folded) * count
    island = folded.island[device]
    if island < 0:
        return device_cost(folded, device)
    fragment = fragment_cost(folded)
    touched = ledger.island_used[island] > 0
    return device_cost(folded, device) + (-fragment if touched else fragment * (len(folded.islands[island]) - 1))
