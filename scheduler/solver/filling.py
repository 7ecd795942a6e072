"""Filling devices one after the other, each as full as sizes allow.

After the minimum bin slack heuristic (J. N. D. Gupta and J. C. Ho, "A new heuristic algorithm for the one-dimensional
bin-packing problem", Production Planning & Control 10, 1999): the largest waiting replica opens a device, and those
whose sizes add up to the most that is left follow it. Subset sums are the bits of one integer. Devices come island by
island, so that an island is full before the next is touched; versions with as many waiting replicas as islands are
still to come go first, since anti-affinity would keep them waiting to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.ledger import Ledger
from scheduler.solver.objective import device_cost

GRAIN = 8192
"""Parts of a device's memory that subset sums count in; sizes are rounded up."""


class Item(Struct, frozen=True):
    """A waiting replica that may go onto the device at hand; `size` in grains."""

    number: int
    option: int
    size: int


def is_plain(folded: Folded, number: int) -> bool:
    """Whether it takes a part of one device and is bound to no other replica."""
    demand = folded.problem.demands[number]
    return demand.tensor_parallel_size == 1 and not demand.exclusive and folded.kv[number] < 0


def fill(folded: Folded, start: Sequence[Seat | None], options: Sequence[int] = ()) -> list[Seat | None]:
    """`start` and plain replicas that have no seat in it. Looks at sizes only, so compare the result by cost."""
    ledger, seats = Ledger(folded, start), list(start)
    waiting = [number for number, seat in enumerate(start) if seat is None and is_plain(folded, number)]
    left: dict[int, int] = {}
    for number in waiting:
        left[folded.version[number]] = left.get(folded.version[number], 0) + 1
    ranked = sorted(waiting, key=lambda number: (-folded.kinds[folded.kind[number]].sizes[0], number))
    volume = sum(folded.kinds[folded.kind[number]].sizes[0] for number in waiting)
    for device in _in_order(ledger):
        if not ranked:
            break
        to_come = _servers_to_come(folded, volume)
        ranked.sort(key=lambda number: left[folded.version[number]] < to_come)
        for item in _chosen(ledger, ranked, device, options):
            seat = (device,), item.option
            ledger.add(item.number, seat)
            seats[item.number] = seat
            left[folded.version[item.number]] -= 1
            volume -= folded.kinds[folded.kind[item.number]].sizes[item.option]
        ranked = [number for number in ranked if seats[number] is None]
    return seats


def _in_order(ledger: Ledger) -> list[int]:
    """Devices that hold something, then those of touched islands, then the rest; cheap ones first."""
    folded = ledger.folded

    def rank(device: int) -> tuple[bool, int, bool, int]:
        island = folded.island[device]
        return (
            not ledger.count[device],
            device_cost(folded, device),
            island >= 0 and not ledger.island_used[island],
            device,
        )

    return sorted(range(len(folded.usable)), key=rank)


def _servers_to_come(folded: Folded, volume: int) -> int:
    """How many more servers of the average kind the volume needs, this one included."""
    servers = len(set(folded.server))
    return -(-volume * servers // max(1, sum(folded.usable)))


def _chosen(ledger: Ledger, ranked: Iterable[int], device: int, options: Sequence[int]) -> list[Item]:
    """The first that fits, on an empty device, and then what fills it best; earlier ones are preferred."""
    folded = ledger.folded
    grain = max(1, folded.usable[device] // GRAIN)
    limit = ledger.free[device] // grain
    items = _items(ledger, ranked, device, options, grain, limit)
    if ledger.count[device] or not items:
        return subset(items, limit)
    return [items[0], *subset(items[1:], limit - items[0].size)]


def _items(
    ledger: Ledger, ranked: Iterable[int], device: int, options: Sequence[int], grain: int, limit: int
) -> list[Item]:
    """One replica of each version that may go there."""
    folded = ledger.folded
    items: list[Item] = []
    versions: set[int] = set()
    for number in ranked:
        kind = folded.kinds[folded.kind[number]]
        allowed = kind.fits[folded.device_class[device]]
        if not allowed or folded.version[number] in versions or device in kind.failed_devices:
            continue
        option = options[number] if options and options[number] in allowed else allowed[0]
        size = -(-kind.sizes[option] // grain)
        if size <= limit and ledger.admits(number, device):
            versions.add(folded.version[number])
            items.append(Item(number, option, size))
    return items


def subset(items: Sequence[Item], limit: int) -> list[Item]:
    """Items whose sizes add up to the most within the limit. Bit n of a sum says that n can be reached."""
    mask = (1 << (limit + 1)) - 1
    sums = [1]
    for item in items:
        sums.append((sums[-1] | sums[-1] << item.size) & mask)
    left = sums[-1].bit_length() - 1
    taken: list[Item] = []
    for place in range(len(items) - 1, -1, -1):
        if not sums[place] >> left & 1:
            left -= items[place].size
            taken.append(items[place])
    return taken[::-1]
