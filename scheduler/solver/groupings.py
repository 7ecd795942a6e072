"""Which devices are near each other: groups that a replica may span, NVLink islands, domains that exchange KV.

Everything is numbered: a device is its place in `problem.devices`, a group a number in the order of asking.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from scheduler.solver.model import SPANS, Demand, Device, Problem

CPU = "cpu"
"""Kind of the devices that reach each other through host memory: those of one worker are one group."""


class Numbers:
    """Consecutive numbers for whatever is asked for, in the order of asking."""

    def __init__(self) -> None:
        self.seen: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> int:
        return self.seen.setdefault(key, len(self.seen))

    def __len__(self) -> int:
        return len(self.seen)


def numbered(keys: Iterable[Hashable]) -> tuple[int, ...]:
    numbers = Numbers()
    return tuple(numbers.of(key) for key in keys)


def members_of(numbers: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    members: list[list[int]] = [[] for _ in range(count)]
    for place, number in enumerate(numbers):
        if number >= 0:
            members[number].append(place)
    return tuple(tuple(places) for places in members)


def level_of(demand: Demand) -> int:
    """Place in SPANS of what a replica may span; 0 for one device."""
    return SPANS.index(demand.span) if demand.tensor_parallel_size > 1 else 0


def groupings(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """By level of SPANS and device: its group. A wider group holds whole nearer ones; numbers go on from level to
    level; a level that no demand asks for is as the one before."""
    devices = problem.devices
    widest = max((level_of(demand) for demand in problem.demands), default=0)
    found = [numbered(_nearest(device) for device in devices)]
    for key in (_same_node, _same_product)[:widest]:
        start = 1 + max(found[-1], default=-1)
        found.append(tuple(start + number for number in _joined(devices, found[-1], key)))
    return (*found, *[found[-1]] * (len(SPANS) - len(found)))


def _nearest(device: Device) -> Hashable:
    if device.kind == CPU:
        return (device.worker, device.kind, None)
    linked = device.island is not None
    return (device.worker, device.island, None) if linked else (device.worker, None, device.name)


def _same_node(device: Device) -> Hashable:
    """None: it keeps to its group."""
    if device.numa_node is None:
        return None
    return (device.worker, device.kind, device.product, device.numa_node)


def _same_product(device: Device) -> Hashable:
    return (device.worker, device.kind, device.product)


def _joined(devices: Sequence[Device], group: Sequence[int], key_of: Callable[[Device], Hashable]) -> tuple[int, ...]:
    """Groups with a key in common are one."""
    leader = list(group)
    first: dict[Hashable, int] = {}
    for number, device in enumerate(devices):
        key = key_of(device)
        if key is None:
            continue
        low, high = sorted((leader[first.setdefault(key, number)], leader[number]))
        if low != high:
            leader = [low if found == high else found for found in leader]
    return numbered(leader)


def are_near(problem: Problem, demand: Demand) -> bool:
    """Whether one replica of the demand may span all devices of the problem."""
    return len(set(groupings(problem)[level_of(demand)])) <= 1


def members_of_all(group_at: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """By number of a group, of all levels: its devices."""
    members: dict[int, list[int]] = {}
    for numbers in dict.fromkeys(group_at):
        for device, number in enumerate(numbers):
            members.setdefault(number, []).append(device)
    return tuple(tuple(members[number]) for number in sorted(members))


def domain_of(device: Device) -> Hashable:
    """Devices that exchange KV."""
    if device.kind == CPU:
        return (device.server, device.kind, None)
    linked = device.island is not None
    return (device.server, device.island, None) if linked else (device.server, None, device.numa_node)


def islands_of(devices: Sequence[Device]) -> tuple[int, ...]:
    """By device: its NVLink island of two or more; -1: none."""
    sizes: dict[Hashable, int] = {}
    for device in devices:
        sizes[device.server, device.island] = sizes.get((device.server, device.island), 0) + 1
    numbers = Numbers()
    return tuple(
        numbers.of((device.server, device.island))
        if device.island is not None and sizes[device.server, device.island] > 1
        else -1
        for device in devices
    )
