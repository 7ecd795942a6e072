"""Which devices a part of the problem has to look at: one of each that differ, as many as could ever be used.

Sound, not a heuristic. A device where nothing free fits is left out. Of devices of one island that no free replica can
tell apart (same costs, same free memory once it is rounded down to what sizes can add up to) only as many stay as there
are free replicas, and likewise of servers that look the same: each free replica uses one server. Of servers that hold
nothing at all no more stay than devices can be opened by a placement that beats the start.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.solver.classes import Folded, Seat
from scheduler.solver.groupings import Numbers
from scheduler.solver.ledger import Ledger
from scheduler.solver.objective import cold_cost, cost_without, device_cost, evaluate, fragment_cost, seat_cost, total

SUMS_MAX = 2048
"""More different sums than this round nothing worth rounding."""


def candidates(folded: Folded, fixed: Ledger, free: Sequence[int], start: Sequence[Seat | None]) -> list[int]:
    """Devices, rising. `fixed` holds everything but the free replicas; `start` is a seat or none for every demand."""
    kinds = sorted({folded.kind[number] for number in free})
    sums = _sums([folded.kinds[kind].sizes for kind in kinds for _ in folded.kinds[kind].members])
    bound_to = {device: number for number in free for device in (folded.current[number] or ((), 0))[0]}
    looks = Looks(folded, fixed, kinds, sums, bound_to)
    width = sum(folded.kinds[folded.kind[number]].demand.tensor_parallel_size for number in free)
    spare = _openings_max(folded, free, start)
    by_server: dict[int, list[tuple[int, tuple[object, ...]]]] = {}
    for device in range(len(folded.usable)):
        look = looks.of(device)
        if look is not None:
            by_server.setdefault(folded.server[device], []).append((device, look))
    seen: dict[tuple[object, ...], int] = {}
    chosen: list[int] = []
    for server, devices in by_server.items():
        kept = _different(devices, width)
        state = looks.of_server(server, kept)
        seen[state] = seen.get(state, 0) + 1
        empty = all(not fixed.count[device] and device not in bound_to for device, _ in devices)
        if seen[state] <= (min(len(free), spare) if empty else len(free)):
            chosen.extend(device for device, _ in kept)
    used = {device for number in free for device in (start[number] or ((), 0))[0]}
    return sorted({*chosen, *bound_to, *used})


class Looks:
    """What free replicas can see of a device and of a server."""

    def __init__(
        self,
        folded: Folded,
        fixed: Ledger,
        kinds: Sequence[int],
        sums: Sequence[int] | None,
        bound_to: dict[int, int],
    ) -> None:
        self.folded = folded
        self.fixed = fixed
        self.kinds = kinds
        self.sums = sums
        self.bound_to = bound_to
        self.versions = sorted({folded.kinds[kind].version for kind in kinds})
        self.loads = any(folded.kinds[kind].load for kind in kinds)

    def of(self, device: int) -> tuple[object, ...] | None:
        """None: nothing free fits."""
        folded, fixed = self.folded, self.fixed
        fits: list[tuple[int, int, int]] = []
        group = folded.device_class[device]
        for kind in self.kinds:
            table = folded.kinds[kind]
            if not table.fits[group] or not fixed.admits(table.members[0], device):
                continue
            for option in table.fits[group]:
                if folded.weight(kind, option, device) <= fixed.free[device]:
                    cost = seat_cost(folded, kind, option, device) + cold_cost(folded, kind, device)
                    cost += folded.objective.kv_apart * self._apart(table.members[0], device)
                    fits.append((kind, option, cost))
        if not fits:
            return None
        count = fixed.count[device]
        return (
            tuple(fits),
            self._rounded(fixed.free[device]),
            0 if count else device_cost(folded, device),
            min(count, 1) if folded.objective.packing == "binpack" else count,
            max(0, folded.objective.load_free - fixed.load[device]) if self.loads else 0,
            self.bound_to.get(device, -1),
            self._places(device),
        )

    def _apart(self, number: int, device: int) -> int:
        """Whether a member of its exchange of KV is fixed, and not there."""
        return self.fixed.apart(number, (device,))

    def _places(self, device: int) -> tuple[int, ...]:
        folded = self.folded
        groups = tuple(of[device] for of in folded.group_at)
        return (folded.worker[device], folded.island[device], folded.domain[device], *groups)

    def _rounded(self, free: int) -> int:
        if self.sums is None:
            return free
        low, high = 0, len(self.sums)
        while low < high:
            middle = (low + high) // 2
            if self.sums[middle] <= free:
                low = middle + 1
            else:
                high = middle
        return self.sums[low - 1]

    def of_server(self, server: int, kept: Sequence[tuple[int, tuple[object, ...]]]) -> tuple[object, ...]:
        """Its devices with local numbers for worker, group, island and domain, and what it has of the free versions."""
        folded, fixed = self.folded, self.fixed
        numbers = [Numbers() for _ in range(3 + len(folded.group_at))]
        state: list[object] = [self._held(fixed.on_server, server)]
        for device, look in kept:
            # Local numbers are per role: two servers are the same when their devices pair up in order.
            places = zip(numbers, self._places(device), strict=True)
            island = folded.island[device]
            around = (len(folded.islands[island]), fixed.island_used[island]) if island >= 0 else (0, 0)
            local = tuple(number.of(value) for number, value in places)
            state.append((look[:-1], local, around, self._held(fixed.on_worker, folded.worker[device])))
        return tuple(state)

    def _held(self, counts: dict[tuple[int, int], int], place: int) -> tuple[int, ...]:
        return tuple(counts.get((version, place), 0) for version in self.versions)


def _different(devices: Sequence[tuple[int, tuple[object, ...]]], width: int) -> list[tuple[int, tuple[object, ...]]]:
    """Of devices that look the same no more than could be used at once."""
    seen: dict[tuple[object, ...], int] = {}
    kept: list[tuple[int, tuple[object, ...]]] = []
    for device, look in devices:
        seen[look] = seen.get(look, 0) + 1
        if seen[look] <= width:
            kept.append((device, look))
    return kept


def _sums(sizes: Sequence[tuple[int, ...]]) -> list[int] | None:
    """All that one option of each can add up to, rising; None when that is too much."""
    sums = {0}
    for options in sizes:
        sums |= {known + size for known in sums for size in options}
        if len(sums) > SUMS_MAX:
            return None
    return sorted(sums)


def _openings_max(folded: Folded, free: Sequence[int], start: Sequence[Seat | None]) -> int:
    """Devices that a placement can open without costing more than the start.

    What the start costs above the fixed part is at least: the cheapest seat (or none) of each free replica, and for
    each opened device its cost less the gap it may close in its island.
    """
    opening = min((device_cost(folded, device) for device in range(len(folded.usable))), default=0)
    opening -= fragment_cost(folded)
    if opening <= 0:
        return len(free) + len(folded.usable)
    above = total(evaluate(folded, start)) - cost_without(folded, start, free)
    least = sum(_cheapest(folded, folded.kind[number]) for number in free)
    return max(0, (above - least) // opening)


def _cheapest(folded: Folded, kind: int) -> int:
    table = folded.kinds[kind]
    size = table.demand.tensor_parallel_size
    costs = [
        sum(table.costs[group][option]) * size
        for group in range(folded.classes)
        for option in table.fits[group] + table.stays[group]
    ]
    return min([table.unplaced_cost, *costs])
