"""A problem with its symmetries folded away: equal devices become one class, equal replicas become one kind.

Two devices are of one class when no demand of the problem can tell them apart: only the labels that a selector names
and the versions that a range names count. Which constraint forbids what is then asked once per kind and class instead
of once per replica and device (117 x 8 questions instead of 267 x 256). Everything below works on indices: a device is
its place in `problem.devices`, a replica its place in `problem.demands`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from operator import is_, itemgetter

import msgspec
from msgspec import Struct, structs

from scheduler.solver.constraints import forbids_starting, forbids_staying, prefers_others
from scheduler.solver.groupings import (
    Numbers,
    domain_of,
    groupings,
    islands_of,
    level_of,
    members_of,
    members_of_all,
    numbered,
)
from scheduler.solver.model import GIB, PERMILLE, Demand, Device, Objective, Place, Problem
from scheduler.solver.versions import read_range
from sie_stream.errors import ConfigError

Seat = tuple[tuple[int, ...], int]
"""Where a replica is: its devices, rising, and which of its options it is loaded in."""


class Kind(Struct, frozen=True):
    """Replicas that differ in nothing but their number and where they run now."""

    demand: Demand
    """One of them."""
    members: tuple[int, ...]
    version: int
    level: int
    """Place in SPANS of what it may span; 0 also for one device."""
    span_cost: int
    sizes: tuple[int, ...]
    """Bytes per option."""
    unplaced_cost: int
    stop_cost: int
    cold_cost: int
    """Per device of a load on a worker without the weights; 0 where no worker has them."""
    fits: tuple[tuple[int, ...], ...]
    """By class: the options in which a replica may start there."""
    stays: tuple[tuple[int, ...], ...]
    """By class: the options in which one that runs there may stay."""
    costs: tuple[tuple[tuple[int, int, int], ...], ...]
    """By class and option: (sla_risk, precision, price) of each device."""
    warm_workers: frozenset[int]
    failed_devices: frozenset[int]
    failed_cost: int
    load: int
    """Percent of the time of each of its devices."""


class Folded(Struct, frozen=True):
    """The whole problem in indices."""

    problem: Problem
    usable: tuple[int, ...]
    """Bytes of each device that replicas may have."""
    device_class: tuple[int, ...]
    classes: int
    worker: tuple[int, ...]
    server: tuple[int, ...]
    group_at: tuple[tuple[int, ...], ...]
    """By place in SPANS and device: which group of devices near enough to be spanned. A wider one holds whole nearer
    ones; a level that no demand asks for is as the one before. Numbers go on from level to level."""
    groups: tuple[tuple[int, ...], ...]
    island: tuple[int, ...]
    """NVLink island of two or more devices; -1: none."""
    islands: tuple[tuple[int, ...], ...]
    domain: tuple[int, ...]
    """Devices that exchange KV: an NVLink island, else a NUMA node."""
    kinds: tuple[Kind, ...]
    kind: tuple[int, ...]
    """By demand."""
    version: tuple[int, ...]
    """By demand."""
    versions: int
    worker_limit: tuple[int, ...]
    """By version: replicas on one worker."""
    server_limit: tuple[int, ...]
    """By version: replicas on one server."""
    server_weight: tuple[int, ...]
    """By version: what a replica costs on a server that has another one of it."""
    kv: tuple[int, ...]
    """By demand: which exchange of KV it takes part in; -1: none."""
    first_cost: tuple[int, ...]
    """By version: what it costs, in addition, to have no serving replica."""
    current: tuple[Seat | None, ...]
    """By demand; None also when its device is gone."""
    may_stay: tuple[bool, ...]
    move_cost: tuple[int, ...]

    @property
    def objective(self) -> Objective:
        return self.problem.objective

    @property
    def group(self) -> tuple[int, ...]:
        """By device, at the nearest level: one island of one worker. A GPU without NVLink is its own."""
        return self.group_at[0]

    def groups_of(self, kind: int) -> tuple[tuple[int, ...], ...]:
        """Groups that a replica of the kind may be in."""
        level = self.group_at[self.kinds[kind].level]
        return self.groups[min(level, default=0) : max(level, default=-1) + 1]

    def group_of(self, kind: int, device: int) -> int:
        """The one with this device."""
        return self.group_at[self.kinds[kind].level][device]

    def spanned(self, kind: int, devices: Iterable[int]) -> int:
        """Groups of nearer levels that the devices of one replica touch beyond the first of each."""
        found = tuple(devices)
        return sum(len({of[device] for device in found}) - 1 for of in self.group_at[: self.kinds[kind].level])

    def weight(self, kind: int, option: int, device: int) -> int:
        """Bytes it takes there; an exclusive one takes all, so that nothing fits beside it."""
        table = self.kinds[kind]
        return max(table.sizes[option], self.usable[device]) if table.demand.exclusive else table.sizes[option]

    def placed(self, demand: int, seat: Seat | None) -> bool:
        """Whether it counts as placed: it has a seat, and may keep it."""
        return seat is not None and (seat != self.current[demand] or self.may_stay[demand])


def fold(problem: Problem) -> Folded:
    """Check the problem and index it. Raises ConfigError for what no solver could mean anything by."""
    check(problem)
    devices, demands = problem.devices, problem.demands
    classes, device_class = _device_classes(problem)
    samples = _first_of_each(device_class, classes)
    by_name = {device.key: number for number, device in enumerate(devices)}
    workers, exchanges = Numbers(), Numbers()
    worker = tuple(workers.of(device.worker) for device in devices)
    island, group_at = islands_of(devices), groupings(problem)
    versions = Numbers()
    version = tuple(versions.of(demand.version) for demand in demands)
    make_kind = partial(_kind, problem, samples, workers, by_name)
    kinds, kind = _kinds(problem, version, make_kind)
    current = _current_seats(problem, by_name)
    return Folded(
        problem=problem,
        usable=tuple(device.memory_bytes - device.reserved_bytes for device in devices),
        device_class=device_class,
        classes=classes,
        worker=worker,
        server=numbered(device.server for device in devices),
        group_at=group_at,
        groups=members_of_all(group_at),
        island=island,
        islands=members_of(island, max(island, default=-1) + 1),
        domain=numbered(domain_of(device) for device in devices),
        kinds=kinds,
        kind=kind,
        version=version,
        versions=len(versions),
        worker_limit=_limits(version, len(versions), [demand.max_per_worker for demand in demands]),
        server_limit=_limits(version, len(versions), [demand.max_per_server for demand in demands]),
        server_weight=_server_weights(problem, version, len(versions)),
        kv=tuple(
            -1 if demand.kv_group is None else exchanges.of((demand.kv_group, demand.replica)) for demand in demands
        ),
        first_cost=_first_costs(problem, version, len(versions)),
        current=current,
        may_stay=tuple(
            seat is not None
            and all(seat[1] in kinds[kind[n]].stays[device_class[device]] for device in seat[0])
            and len({group_at[kinds[kind[n]].level][device] for device in seat[0]}) == 1
            for n, seat in enumerate(current)
        ),
        move_cost=tuple(_move_cost(problem.objective, demand, current[n]) for n, demand in enumerate(demands)),
    )


def place_of(folded: Folded, demand: int, seat: Seat) -> Place:
    """The seat by its names."""
    devices = [folded.problem.devices[number] for number in seat[0]]
    precision = folded.problem.demands[demand].options[seat[1]].precision
    return Place(devices[0].worker, tuple(device.name for device in devices), precision)


def check(problem: Problem) -> None:
    """Raises ConfigError naming the first device or demand that makes no sense."""
    keys: set[tuple[str, str]] = set()
    for device in problem.devices:
        if device.key in keys:
            raise ConfigError(f"devices: {device.shown} is listed twice.")
        keys.add(device.key)
        if not 0 <= device.reserved_bytes <= device.memory_bytes:
            raise ConfigError(
                f"devices: {device.shown}: reserved_bytes is {device.reserved_bytes}; allowed: 0 to memory_bytes "
                f"({device.memory_bytes})."
            )
    replicas: set[tuple[str, int, int]] = set()
    for demand in problem.demands:
        if demand.key in replicas:
            raise ConfigError(f"demands: {demand.shown} is listed twice.")
        replicas.add(demand.key)
        _check_demand(demand)


def _check_demand(demand: Demand) -> None:
    if not demand.options or any(option.memory_bytes < 1 for option in demand.options):
        raise ConfigError(f"demands: {demand.shown}: options must hold at least one, each of 1 byte or more.")
    for field, value in (
        ("tensor_parallel_size", demand.tensor_parallel_size),
        ("max_per_worker", demand.max_per_worker),
        ("max_per_server", 1 if demand.max_per_server is None else demand.max_per_server),
        ("sla_weight", demand.sla_weight),
    ):
        if value < 1:
            raise ConfigError(f"demands: {demand.shown}: {field} is {value}; allowed: 1 or more.")
    if level_of(demand) and demand.max_per_worker > 1:
        raise ConfigError(f"demands: {demand.shown}: span {demand.span!r} is allowed with max_per_worker 1 only.")
    if demand.load_percent < 0:
        raise ConfigError(f"demands: {demand.shown}: load_percent is {demand.load_percent}; allowed: 0 or more.")
    for name, wanted in demand.requires.items():
        try:
            read_range(wanted)
        except ValueError as error:
            raise ConfigError(f"demands: {demand.shown}: requires.{name}: {error}") from error


def _device_classes(problem: Problem) -> tuple[int, tuple[int, ...]]:
    labels = sorted({name for demand in problem.demands for name in demand.node_selector})
    versions = sorted({name for demand in problem.demands for name in demand.requires})
    numbers = Numbers()
    classes = tuple(numbers.of(_what_matters(device, labels, versions)) for device in problem.devices)
    return len(numbers), classes


def _what_matters(device: Device, labels: Sequence[str], versions: Sequence[str]) -> Hashable:
    return (
        (device.kind, device.product, device.memory_bytes, device.reserved_bytes, device.price),
        (device.tier, device.spot, device.cordoned, device.draining, device.island is None),
        (device.backends, device.precisions, device.taints),
        tuple(device.labels.get(name) for name in labels),
        tuple(device.versions.get(name) for name in versions),
    )


def _first_of_each(numbers: Sequence[int], count: int) -> tuple[int, ...]:
    first = [-1] * count
    for place, number in enumerate(numbers):
        if first[number] < 0:
            first[number] = place
    return tuple(first)


def _current_seats(problem: Problem, by_name: dict[tuple[str, str], int]) -> tuple[Seat | None, ...]:
    """By demand. Of two replicas of one version on one device the second counts as running nowhere."""
    taken: set[tuple[tuple[str, int], int]] = set()
    seats: list[Seat | None] = []
    for demand in problem.demands:
        seat = _seat(demand, by_name)
        if seat is not None and any((demand.version, device) in taken for device in seat[0]):
            seat = None
        if seat is not None:
            taken.update((demand.version, device) for device in seat[0])
        seats.append(seat)
    return tuple(seats)


def _seat(demand: Demand, by_name: dict[tuple[str, str], int]) -> Seat | None:
    """Where it runs; None when nowhere, on a device that is gone, or in a form that is not declared any more."""
    if demand.current is None:
        return None
    devices = [by_name.get((demand.current.worker, name), -1) for name in demand.current.devices]
    options = [option.precision for option in demand.options]
    if -1 in devices or len(set(devices)) != demand.tensor_parallel_size or demand.current.precision not in options:
        return None
    return tuple(sorted(devices)), options.index(demand.current.precision)


_fields_of_kind = itemgetter(
    *(place for place, name in enumerate(Demand.__struct_fields__) if name not in ("replica", "current"))
)


def _kinds(
    problem: Problem, version: Sequence[int], make: Callable[[Demand, tuple[int, ...], int], Kind]
) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    encoder = msgspec.msgpack.Encoder(order="deterministic")
    numbers = Numbers()
    kind: list[int] = []
    seen: dict[Hashable, tuple[tuple[object, ...], int]] = {}
    """By version: the newest of another kind. Replicas of one wish share its fields, and are written out once."""
    for demand in problem.demands:
        # KV groups pair replicas by number, so their numbers tell them apart.
        number = -1 if demand.kv_group is None else demand.replica
        fields = _fields_of_kind(structs.astuple(demand))
        before, known = seen.get((demand.version, number), ((), -1))
        if known < 0 or not all(map(is_, fields, before)):
            known = numbers.of(encoder.encode(structs.replace(demand, replica=number, current=None)))
            seen[demand.version, number] = fields, known
        kind.append(known)
    return tuple(
        make(problem.demands[members[0]], members, version[members[0]]) for members in members_of(kind, len(numbers))
    ), tuple(kind)


def _kind(
    problem: Problem,
    samples: Sequence[int],
    workers: Numbers,
    by_name: dict[tuple[str, str], int],
    demand: Demand,
    members: tuple[int, ...],
    version: int,
) -> Kind:
    weights, options = problem.objective, demand.options
    devices = [problem.devices[sample] for sample in samples]
    stays = tuple(
        tuple(n for n, option in enumerate(options) if not forbids_staying(demand, option, d)) for d in devices
    )
    likely = demand.likelihood_permille
    if demand.purpose == "serve":
        unplaced = weights.unplaced * demand.sla_weight
    else:
        unplaced = weights.standby * likely // PERMILLE
    return Kind(
        demand=demand,
        members=members,
        version=version,
        level=level_of(demand),
        span_cost=weights.spanning * demand.sla_weight,
        sizes=tuple(option.memory_bytes for option in options),
        unplaced_cost=unplaced,
        stop_cost=weights.stop if demand.purpose == "serve" else 0,
        cold_cost=weights.cold * demand.sla_weight * likely // PERMILLE if demand.warm_on else 0,
        fits=tuple(
            () if forbids_starting(demand, device) else kept for device, kept in zip(devices, stays, strict=True)
        ),
        stays=stays,
        costs=tuple(tuple(_costs(weights, demand, n, d) for n in range(len(options))) for d in devices),
        warm_workers=frozenset(workers.seen[name] for name in demand.warm_on if name in workers.seen),
        failed_devices=frozenset(by_name[key] for key in demand.failed_on if key in by_name),
        failed_cost=weights.sla_risk * weights.failed_risk_permille * demand.sla_weight,
        load=demand.load_percent,
    )


def _costs(weights: Objective, demand: Demand, option: int, device: Device) -> tuple[int, int, int]:
    permille = demand.risk_permille.get(device.product, demand.risk_permille.get(device.kind, 0))
    permille += weights.spot_risk_permille if device.spot else 0
    permille += weights.taint_risk_permille if prefers_others(demand, device) else 0
    return (
        weights.sla_risk * permille * demand.sla_weight,
        weights.precision * option * demand.sla_weight,
        (weights.price * device.price if "cost-sensitive" in demand.tags else 0) + weights.dearer * (device.price - 1),
    )


def _limits(version: Sequence[int], count: int, wanted: Sequence[int | None]) -> tuple[int, ...]:
    """By version: the smallest limit of its replicas; without one, more than there are replicas."""
    limits = [len(version) + 1] * count
    for number, limit in zip(version, wanted, strict=True):
        if limit is not None:
            limits[number] = min(limits[number], limit)
    return tuple(limits)


def _first_costs(problem: Problem, version: Sequence[int], count: int) -> tuple[int, ...]:
    costs = [0] * count
    for demand, number in zip(problem.demands, version, strict=True):
        if demand.purpose == "serve":
            costs[number] = max(costs[number], problem.objective.first_replica * demand.sla_weight)
    return tuple(costs)


def _server_weights(problem: Problem, version: Sequence[int], count: int) -> tuple[int, ...]:
    costs = [0] * count
    for demand, number in zip(problem.demands, version, strict=True):
        costs[number] = max(costs[number], problem.objective.same_server * demand.sla_weight)
    return tuple(costs)


def _move_cost(weights: Objective, demand: Demand, seat: Seat | None) -> int:
    if seat is None:
        return 0
    loaded = demand.options[seat[1]].memory_bytes * len(seat[0])
    return weights.move + weights.move_gib * -(-loaded // GIB) + (weights.settled if demand.settled else 0)
