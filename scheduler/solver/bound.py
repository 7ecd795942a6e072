"""A lower bound without search: free replicas are poured into pools of devices, as if a pool were one large device.

A relaxation. Devices that nothing but their neighbours tells apart are counted, not named; sizes count by volume and,
because a volume alone lets two halves and a bit share a device, by dual feasible functions (S. P. Fekete and
J. Schepers, "New classes of fast lower bounds for bin packing problems", Mathematical Programming 91, 2001): a function
f with sum f(x) <= f(capacity) for all sizes x that fit a device together gives a valid row. What is fixed on a device
leaves its free memory; KV groups are left out. What is proven about this program is true of every placement that
leaves the fixed replicas where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from msgspec import Struct

from scheduler.solver.classes import Folded, Kind, Seat
from scheduler.solver.groupings import Numbers
from scheduler.solver.ledger import Ledger
from scheduler.solver.objective import device_cost, fragment_cost, pair_cost
from scheduler.solver.program import Program, Term

THRESHOLDS_MAX = 6
ROUNDINGS = (1, 2, 3, 4)
Dual = Callable[[int], int]


class Poured(Struct, frozen=True):
    """Devices of a pool that hold a kind in an option; `size` in bytes, None: the whole device."""

    variable: int
    version: int
    size: int | None
    load: int


class Pool:
    """Devices that are equal but for what they hold; `opened`: they hold something fixed already."""

    def __init__(self, folded: Folded, fixed: Ledger, devices: list[int], shape: tuple[int, ...]) -> None:
        self.devices = tuple(devices)
        self.inside = frozenset(devices)
        self.opened = fixed.count[devices[0]] > 0
        self.device_class = folded.device_class[devices[0]]
        self.capacity = folded.usable[devices[0]]
        self.free = sum(fixed.free[device] for device in devices)
        self.workers = frozenset(folded.worker[device] for device in devices)
        self.shape = shape
        """Classes of all devices of its island, when that is untouched; else empty."""
        self.closes_gap = not self.opened and folded.island[devices[0]] >= 0
        self.poured: list[Poured] = []
        self.used: int | None = None
        """The variable that counts devices to be opened."""


class Relaxation:
    """Builds `program` at once. Its objective plus `objective.cost_without` is in the units of `evaluate`."""

    def __init__(self, folded: Folded, fixed: Ledger, free: Sequence[int], seats: Sequence[Seat | None]) -> None:
        """`seats`, of all demands, become the hint."""
        self.folded = folded
        self.fixed = fixed
        self.seats = seats
        self.program = Program()
        self.taken = frozenset(device for number in free for device in (seats[number] or ((), 0))[0])
        self.members: dict[int, list[int]] = {}
        for number in free:
            self.members.setdefault(folded.kind[number], []).append(number)
        self.pools = self._make_pools()
        self.chosen: dict[int, list[tuple[int, int]]] = {kind: [] for kind in self.members}
        """By kind: (option, variable)."""
        serving: dict[int, list[Term]] = {}
        for kind, members in self.members.items():
            unplaced = self._pour(kind, members)
            if folded.kinds[kind].demand.purpose == "serve":
                serving.setdefault(folded.kinds[kind].version, []).append((unplaced, len(members)))
        self._first_replicas(serving)
        held = frozenset(device for n in free if not folded.may_stay[n] for device in (folded.current[n] or ((), 0))[0])
        for pool in self.pools:
            if pool.opened:
                self._top_up(pool)
            else:
                self._pack(pool, len(held.intersection(pool.devices)))
            if pair_cost(folded):
                self._pairs(pool)
            self._load(pool)
        self._islands()
        self._servers()

    def options(self, values: Sequence[int]) -> list[int]:
        """By demand: the option it has in the relaxation, which knows what precision is worth; else the best."""
        options = [0] * len(self.folded.kind)
        for kind, members in self.members.items():
            size = self.folded.kinds[kind].demand.tensor_parallel_size
            counted = [option for option, variable in self.chosen[kind] for _ in range(values[variable] // size)]
            for member, option in zip(members, sorted(counted), strict=False):
                options[member] = option
        return options

    # ------------------------------------------------------------ pools

    def _make_pools(self) -> list[Pool]:
        folded, fixed = self.folded, self.fixed
        numbers, members, shapes = Numbers(), list[list[int]](), list[tuple[int, ...]]()
        for device, group in enumerate(folded.device_class):
            island = folded.island[device]
            untouched = island >= 0 and not fixed.island_used[island]
            shape = tuple(sorted(folded.device_class[other] for other in folded.islands[island])) if untouched else ()
            key: Hashable = (group, device_cost(folded, device), fixed.count[device] > 0, island >= 0, shape)
            number = numbers.of(key)
            if number == len(members):
                members.append([])
                shapes.append(shape)
            members[number].append(device)
        return [Pool(folded, fixed, devices, shape) for devices, shape in zip(members, shapes, strict=True)]

    def _pour(self, kind: int, members: Sequence[int]) -> int:
        """Variables of one kind: devices per pool and option, and replicas left out. Gives the latter."""
        folded, program, table = self.folded, self.program, self.folded.kinds[kind]
        size, count = table.demand.tensor_parallel_size, len(members)
        stayers = [number for number in members if folded.may_stay[number]]
        at_home = {(folded.current[n][1], device) for n in stayers for device in folded.current[n][0]}  # type: ignore[index]
        terms: list[Term] = []
        homes: list[Term] = []
        for pool in self.pools:
            for option, bytes_needed in enumerate(table.sizes):
                home = any((option, device) in at_home for device in pool.devices)
                if option not in table.fits[pool.device_class] and not home:
                    continue
                most = min(count * size, self._room(pool, kind, option, members[0], size))
                if most == 0:
                    continue
                cold = 0 if home or pool.workers & table.warm_workers else table.cold_cost
                cost = sum(table.costs[pool.device_class][option]) + cold
                variable = program.variable(most, cost, self._hint(pool, members, option))
                terms.append((variable, 1))
                self.chosen[kind].append((option, variable))
                whole = None if table.demand.exclusive else bytes_needed
                pool.poured.append(Poured(variable, table.version, whole, table.load))
                if home:
                    homes.append((variable, 1))
        hint = sum(not folded.placed(number, self.seats[number]) for number in members)
        unplaced = program.variable(count, table.unplaced_cost, hint)
        program.equal([*terms, (unplaced, size)], count * size)
        self._migration(table, members, homes)
        return unplaced

    def _hint(self, pool: Pool, members: Sequence[int], option: int) -> int:
        """Devices of the pool that the seats have for these replicas in this option."""
        seats = [self.seats[number] for number in members if self.folded.placed(number, self.seats[number])]
        return sum(device in pool.inside for seat in seats if seat and seat[1] == option for device in seat[0])

    def _room(self, pool: Pool, kind: int, option: int, number: int, size: int) -> int:
        """Devices of the pool on which it fits beside what is fixed, and workers allow."""
        folded, fixed = self.folded, self.fixed
        weight = folded.weight(kind, option, pool.devices[0])
        room = sum(weight <= fixed.free[device] and fixed.admits(number, device) for device in pool.devices)
        return min(room, folded.worker_limit[folded.kinds[kind].version] * len(pool.workers) * size)

    def _migration(self, table: Kind, members: Sequence[int], homes: Sequence[Term]) -> None:
        """Each running replica stays where such replicas are, or costs at least the cheapest move."""
        folded, program = self.folded, self.program
        running = [number for number in members if folded.current[number] is not None]
        if not running:
            return
        stayers = [number for number in running if folded.may_stay[number]]
        staying = sum(self.seats[number] == folded.current[number] for number in stayers)
        cheapest = min(folded.move_cost[number] for number in running)
        moved = program.variable(len(running), cheapest, len(running) - staying)
        stay = program.variable(len(stayers), 0, staying)
        program.at_least([(moved, 1), (stay, 1)], len(running))
        size = table.demand.tensor_parallel_size
        program.at_most([(stay, size), *((variable, -1) for variable, _ in homes)], 0)

    def _first_replicas(self, serving: dict[int, list[Term]]) -> None:
        """A version of which all replicas are left out, and none is fixed, costs more."""
        for version, terms in serving.items():
            if self.folded.first_cost[version] and not self.fixed.serving[version]:
                replicas = sum(count for _, count in terms)
                missing = sum(self.program.hint[unplaced] for unplaced, _ in terms)
                none = self.program.variable(1, self.folded.first_cost[version], int(missing == replicas))
                self.program.at_most([*((unplaced, 1) for unplaced, _ in terms), (none, -1)], replicas - 1)

    # ------------------------------------------------------------ packing

    def _top_up(self, pool: Pool) -> None:
        """What is poured beside fixed replicas fits their devices' free memory, as a volume."""
        if pool.poured:
            terms = [(one.variable, one.size or 0) for one in pool.poured]
            self.program.at_most(terms, pool.free)

    def _pack(self, pool: Pool, held: int) -> None:
        """Opened devices: enough for the volume, for each dual feasible function, and for each version."""
        program, size = self.program, len(pool.devices)
        fragment = fragment_cost(self.folded) if pool.closes_gap else 0
        hint = sum(device in self.taken for device in pool.devices)
        used = program.variable(size, device_cost(self.folded, pool.devices[0]) - fragment, hint)
        pool.used = used
        for dual in _duals(pool):
            capacity = dual(pool.capacity)
            terms = [(one.variable, capacity if one.size is None else dual(one.size)) for one in pool.poured]
            program.at_most([*(term for term in terms if term[1]), (used, -capacity)], 0)
        by_version: dict[int, list[Term]] = {}
        for one in pool.poured:
            by_version.setdefault(one.version, []).append((one.variable, 1))
        for terms in by_version.values():
            program.at_most([*terms, (used, -1)], 0)
        # Devices may also be used by replicas that are only held, and so are not poured.
        program.at_most([(used, 1), *((one.variable, -1) for one in pool.poured)], held)

    def _load(self, pool: Pool) -> None:
        """How busy its devices are together, above what all of them that hold something may be free of cost."""
        program, weights = self.program, self.folded.objective
        terms = [(one.variable, one.load) for one in pool.poured if one.load]
        if not terms or not weights.load:
            return
        slack = sum(max(0, weights.load_free - self.fixed.load[device]) for device in pool.devices)
        free: list[Term] = [] if pool.used is None else [(pool.used, -weights.load_free)]
        fixed = slack if pool.used is None else 0
        hint = sum(load * program.hint[variable] for variable, load in (*terms, *free)) - fixed
        over = program.variable(
            sum(load * program.upper[variable] for variable, load in terms), weights.load, max(0, hint)
        )
        program.at_most([*terms, *free, (over, -1)], fixed)

    def _pairs(self, pool: Pool) -> None:
        """Replicas make the fewest pairs when spread evenly: the sum over devices of the lines q*n - q(q+1)/2."""
        program, count = self.program, len(pool.devices)
        fixed = [self.fixed.count[device] for device in pool.devices]
        before = sum(held * (held - 1) // 2 for held in fixed)
        most = sum(program.upper[one.variable] for one in pool.poured)
        seats = [self.seats[number] or ((), 0) for members in self.members.values() for number in members]
        seated = [self.fixed.count[device] + sum(device in seat[0] for seat in seats) for device in pool.devices]
        hint = sum(number * (number - 1) // 2 for number in seated) - before
        pairs = program.variable((most + sum(fixed)) ** 2, pair_cost(self.folded), hint)
        for slope in range(1, (most + sum(fixed)) // count + 2):
            terms = [(pairs, 1), *((one.variable, -slope) for one in pool.poured)]
            program.at_least(terms, slope * sum(fixed) - count * slope * (slope + 1) // 2 - before)

    def _islands(self) -> None:
        """Islands of each shape that are touched anew hold the opened devices of its pools; the rest is free."""
        fragment = fragment_cost(self.folded)
        by_shape: dict[tuple[int, ...], list[Pool]] = {}
        self.touched: list[int] = []
        for pool in self.pools:
            if pool.shape and fragment and pool.used is not None:
                by_shape.setdefault(pool.shape, []).append(pool)
        for shape, pools in by_shape.items():
            count = sum(len(pool.devices) for pool in pools) // len(shape)
            anew = {self.folded.island[device] for device in self.taken}
            hint = len(anew.intersection(self.folded.island[device] for pool in pools for device in pool.devices))
            touched = self.program.variable(count, fragment * len(shape), hint)
            self.touched.append(touched)
            opened = [(pool.used, 1) for pool in pools if pool.used is not None]
            self.program.at_most([*opened, (touched, -len(shape))], 0)

    def _servers(self) -> None:
        """Replicas of a version are on as many servers as their limit demands: those with other devices that may take
        them, and one at most for each island that is touched anew."""
        folded = self.folded
        others = {
            folded.server[device] for pool in self.pools for device in pool.devices if not (pool.shape and self.touched)
        }
        for kind, members in self.members.items():
            limit = folded.server_limit[folded.kinds[kind].version]
            size = folded.kinds[kind].demand.tensor_parallel_size
            if limit * len(others) < len(members):
                terms = [(variable, 1) for _, variable in self.chosen[kind]]
                touched = [(variable, -limit * size) for variable in self.touched]
                self.program.at_most([*terms, *touched], limit * len(others) * size)


def _duals(pool: Pool) -> list[Dual]:
    """The volume itself, thresholds at sizes up to half a device, and roundings."""
    capacity = pool.capacity
    small = sorted({one.size for one in pool.poured if one.size is not None and 2 * one.size <= capacity})
    step = max(1, len(small) // THRESHOLDS_MAX)
    duals: list[Dual] = [lambda size: size]
    duals.extend(_threshold(capacity, limit) for limit in small[step - 1 :: step])
    duals.extend(_rounding(capacity, parts) for parts in ROUNDINGS)
    return duals


def _threshold(capacity: int, limit: int) -> Dual:
    """Larger than capacity - limit counts as the whole device, smaller than limit as nothing."""
    return lambda size: capacity if size > capacity - limit else 0 if size < limit else size


def _rounding(capacity: int, parts: int) -> Dual:
    """u(k) of the paper, times k: sizes are rounded down to multiples of 1/(k+1), which are then worth 1/k each."""

    def dual(size: int) -> int:
        whole, rest = divmod(size * (parts + 1), capacity)
        return whole * capacity if rest else size * parts

    return dual
