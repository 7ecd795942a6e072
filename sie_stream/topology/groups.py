"""How near GPUs are to each other: islands, distances, and the best groups for a tensor-parallel size. All pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from msgspec import Struct

from sie_stream.topology.records import LINK_KINDS, LINK_RANK, Gpu, GpuTopology, Link, LinkKind

EXACT_MAX = 1_000
"""Up to so many subsets are all compared (12 GPUs in any size: at most 924); above it groups are grown greedily."""

Cost = tuple[int, int, int, int, int, int, int, tuple[int, ...]]


class DeviceGroup(Struct, frozen=True):
    """GPUs of one server for one tensor-parallel replica, by index."""

    gpus: tuple[int, ...]
    worst: LinkKind | None
    """The furthest pair inside; None for a group of one."""
    numa_nodes: tuple[int, ...]
    islands: tuple[int, ...]
    """Places in `islands(topology)` that it touches; one when it is aligned."""


def islands(topology: GpuTopology) -> tuple[tuple[int, ...], ...]:
    """GPU indices that NVLink connects, directly or through others; a GPU without NVLink is an island of one.

    Each rising; ordered by first member. A GPU in MIG mode is alone: its instances cannot use NVLink.
    """
    usable = {gpu.name for gpu in topology.gpus if not gpu.mig_enabled}
    leader = {gpu.name: gpu.index for gpu in topology.gpus}
    for link in topology.links:
        if link.kind == "NV" and link.a in usable and link.b in usable:
            low, high = sorted((leader[link.a], leader[link.b]))
            leader = {name: low if found == high else found for name, found in leader.items()}
    members: dict[int, list[int]] = {}
    for gpu in topology.gpus:
        members.setdefault(leader[gpu.name], []).append(gpu.index)
    return tuple(sorted(tuple(sorted(group)) for group in members.values()))


def distance(topology: GpuTopology, a: str, b: str) -> Link | None:
    """The link between two names (GPU0, NIC1), either way round; None for a thing and itself.

    Pairs that nobody reported count as SYS. Raises KeyError for a name that the server does not have.
    """
    names = [*(gpu.name for gpu in topology.gpus), *(nic.name for nic in topology.nics)]
    for name in (a, b):
        if name not in names:
            raise KeyError(name)
    if a == b:
        return None
    return next((link for link in topology.links if {link.a, link.b} == {a, b}), Link(a, b, "SYS"))


def best_groups(topology: GpuTopology, size: int, free: Sequence[int] | None = None) -> tuple[DeviceGroup, ...]:
    """Disjoint groups of `size` GPUs, the best first, as many as there are GPUs for.

    Each is the best of what is left, by: its furthest pair; the sum of all pairs; fewest NVLinks missing; sockets, then
    NUMA nodes spanned; GPUs left in the islands it touches that make no whole group any more, then all GPUs left there
    (so a small island is used up before a big one is broken); lowest indices. With more than EXACT_MAX subsets they
    are grown from each GPU by its nearest neighbours instead, which on an NVSwitch, where all pairs are equal, is the
    same. `free`: the GPUs to choose from, default all. GPUs in MIG mode are never chosen. Raises ValueError for a size
    below 1 or an index that the server does not have.
    """
    if size < 1:
        raise ValueError(f"size {size}: at least 1 is allowed")
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    left = sorted(by_index) if free is None else sorted(dict.fromkeys(free))
    for index in left:
        if index not in by_index:
            raise ValueError(f"free {index}: allowed {', '.join(map(str, sorted(by_index)))}")
    left = [index for index in left if not by_index[index].mig_enabled]
    view = _View(topology, by_index)
    groups: list[DeviceGroup] = []
    while len(left) >= size:
        chosen = view.best(left, size)
        groups.append(view.group(chosen))
        left = [index for index in left if index not in chosen]
    return tuple(groups)


class _View:
    """Lookups of one server, made once per call."""

    def __init__(self, topology: GpuTopology, by_index: dict[int, Gpu]) -> None:
        self._gpus = by_index
        self._islands = islands(topology)
        self._island_of = {index: place for place, island in enumerate(self._islands) for index in island}
        index_of = {gpu.name: gpu.index for gpu in topology.gpus}
        self._links = {
            _pair(index_of[link.a], index_of[link.b]): link
            for link in topology.links
            if link.a in index_of and link.b in index_of
        }
        self._nvlinks_max = max((link.nvlinks for link in topology.links), default=0)

    def link(self, a: int, b: int) -> Link:
        low, high = _pair(a, b)
        return self._links.get((low, high)) or Link(f"GPU{low}", f"GPU{high}", "SYS")

    def best(self, left: Sequence[int], size: int) -> tuple[int, ...]:
        if math.comb(len(left), size) <= EXACT_MAX:
            candidates = list(itertools.combinations(left, size))
        else:
            candidates = [self._grown(seed, left, size) for seed in left]
        return min(candidates, key=lambda group: self._cost(group, left))

    def _grown(self, seed: int, left: Sequence[int], size: int) -> tuple[int, ...]:
        group = [seed]
        while len(group) < size:
            rest = [index for index in left if index not in group]
            group.append(min(rest, key=lambda index: self._cost((*group, index), left)))
        return tuple(sorted(group))

    def _cost(self, group: tuple[int, ...], left: Sequence[int]) -> Cost:
        links = [self.link(a, b) for a, b in itertools.combinations(group, 2)]
        ranks = [LINK_RANK[link.kind] for link in links]
        missing = sum(self._nvlinks_max - link.nvlinks for link in links)
        touched = {self._island_of[index] for index in group}
        remaining = [index for index in left if self._island_of[index] in touched and index not in group]
        sockets = len({self._gpus[index].socket for index in group})
        nodes = len({self._gpus[index].numa_node for index in group})
        alone = (len(remaining) % len(group), len(remaining))
        return (max(ranks, default=0), sum(ranks), missing, sockets, nodes, *alone, tuple(sorted(group)))

    def group(self, chosen: tuple[int, ...]) -> DeviceGroup:
        kinds: list[LinkKind] = [self.link(a, b).kind for a, b in itertools.combinations(chosen, 2)]
        return DeviceGroup(
            tuple(sorted(chosen)),
            LINK_KINDS[max(LINK_RANK[kind] for kind in kinds)] if kinds else None,
            tuple(sorted({self._gpus[index].numa_node for index in chosen})),
            tuple(sorted({self._island_of[index] for index in chosen})),
        )


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
