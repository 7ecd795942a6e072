"""Which part of a fleet to solve again: the neighbours of what found no place, or a few devices at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.ledger import Ledger
from scheduler.solver.model import PERMILLE

REPLICAS_MAX = 28
DEVICES_MAX = 8
"""Beyond these a window takes longer than it gains."""


class Window(Struct, frozen=True):
    """Replicas that are free, and the devices they may go to."""

    free: tuple[int, ...]
    devices: tuple[int, ...]


def neighbours(
    folded: Folded, seats: Sequence[Seat | None], waiting: Sequence[int], devices_each: int
) -> tuple[int, ...]:
    """Replicas that may be in the way of the waiting ones.

    Of each those on the devices with the most free memory (they may move) and on those whose replicas are worth least
    (they may yield), about `devices_each` devices in all; and the other replicas of its own version.
    """
    ledger = Ledger(folded, seats)
    chosen: dict[int, None] = {}
    for number in waiting:
        kind = folded.kinds[folded.kind[number]]
        size = kind.demand.tensor_parallel_size
        fitting = [
            group
            for group in folded.groups_of(folded.kind[number])
            if sum(bool(kind.fits[folded.device_class[d]]) for d in group) >= size
        ]
        count = max(1, devices_each // (2 * size))
        roomy = sorted(fitting, key=lambda group: -sum(sorted(ledger.free[device] for device in group)[-size:]))
        cheap = sorted(fitting, key=lambda group: sum(sorted(_worth(ledger, device) for device in group)[:size]))
        for group in roomy[:count]:
            for device in sorted(group, key=lambda device: -ledger.free[device])[: max(size, count)]:
                chosen.update(ledger.holders[device])
        for group in cheap[:count]:
            for device in sorted(group, key=lambda device: _worth(ledger, device))[: max(size, count)]:
                chosen.update(ledger.holders[device])
        chosen.update((n, None) for n in range(len(seats)) if folded.version[n] == folded.version[number])
    return tuple(n for n in chosen if seats[n] is not None)


def _worth(ledger: Ledger, device: int) -> int:
    folded = ledger.folded
    return sum(folded.kinds[folded.kind[number]].unplaced_cost for number in ledger.holders[device])


def windows(
    folded: Folded, seats: Callable[[], Sequence[Seat | None]], movable: Sequence[int], count: int
) -> Iterator[Window]:
    """Up to `count` windows over the seats as they then are; only movable replicas are free in them.

    By turns: the emptiest device with ever other fuller ones, to save a device; the devices of the least touched island
    with the free ones of other touched islands and ever other full ones, to save an island.
    """
    free = frozenset(movable)
    for turn in range(count):
        ledger = Ledger(folded, seats())
        used = [device for device, holders in enumerate(ledger.holders) if not free.isdisjoint(holders)]
        if len(used) < 2:
            return
        used.sort(key=lambda device: (-ledger.free[device] * PERMILLE // max(1, folded.usable[device]), device))
        leaving = _least_island(ledger, used) if turn % 2 else ()
        if leaving:
            others = [device for device in used if device not in leaving]
            spare = [device for device in range(len(folded.usable)) if _is_spare(ledger, device, leaving)]
            yield _window(ledger, [*leaving, *_rotated(others, turn // 2)], spare[:DEVICES_MAX], seats(), free)
        else:
            yield _window(ledger, [used[0], *_rotated(used[1:], turn // 2)], (), seats(), free)


def _least_island(ledger: Ledger, used: Sequence[int]) -> tuple[int, ...]:
    """Used devices of the touched island with the fewest of them, where another is touched too."""
    touched = [(count, island) for island, count in enumerate(ledger.island_used) if count]
    if len(touched) < 2:
        return ()
    island = min(touched)[1]
    return tuple(device for device in used if ledger.folded.island[device] == island)


def _is_spare(ledger: Ledger, device: int, leaving: Sequence[int]) -> bool:
    """Free, in a touched island that is not being left."""
    folded, island = ledger.folded, ledger.folded.island[device]
    return (
        ledger.count[device] == 0
        and island >= 0
        and ledger.island_used[island] > 0
        and island != folded.island[leaving[0]]
    )


def _window(
    ledger: Ledger,
    order: Sequence[int],
    spare: Sequence[int],
    seats: Sequence[Seat | None],
    movable: frozenset[int],
) -> Window:
    devices: dict[int, None] = {}
    missing = [number for number in sorted(movable) if not ledger.folded.placed(number, seats[number])]
    free: dict[int, None] = dict.fromkeys(missing[: REPLICAS_MAX // 2])
    for device in order:
        more = {number: None for number in ledger.holders[device] if number not in free and number in movable}
        if len(devices) >= DEVICES_MAX:
            break
        if devices and len(free) + len(more) > REPLICAS_MAX:
            continue
        devices[device] = None
        free.update(more)
    inside = [n for n in free if all(device in devices for device in (seats[n] or ((), 0))[0])]
    return Window(tuple(sorted(inside)), tuple(sorted({*devices, *spare})))


def _rotated(devices: Sequence[int], turn: int) -> list[int]:
    """Another neighbourhood each turn: strides through the fuller devices."""
    start = (turn * (DEVICES_MAX // 2)) % max(1, len(devices))
    return [*devices[start:], *devices[:start]]
