"""The cluster as a tree, as plain data: server > socket and NUMA node > island > device > what lives there.

An island that spans NUMA nodes (every NVSwitch does) appears below each of them with its share of devices. Islands of
one are not drawn: the device stands directly below its NUMA node. A GPU in MIG mode holds its instances, which hold the
models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from sie_stream.topology.groups import islands
from sie_stream.topology.records import NUMA_UNKNOWN, Gpu, GpuTopology

NodeKind = Literal["server", "numa", "island", "device", "resident"]


class Resident(Struct, frozen=True):
    """One replica on one device. A tensor-parallel replica is one resident on each of its devices."""

    device: str
    """cuda:0, mig:0:1, cpu:0."""
    model: str
    version: str
    state: str
    memory_bytes: int
    """Memory promised to it on this device."""
    spans: tuple[str, ...] = ()
    """All devices of a replica that has several; empty: this one."""

    @property
    def detail(self) -> str:
        return f"{self.state}, one replica across {'+'.join(self.spans)}" if self.spans else self.state


class Server(Struct, frozen=True):
    name: str
    topology: GpuTopology
    residents: tuple[Resident, ...] = ()
    declared: tuple[tuple[str, int], ...] = ()
    """(device, bytes) as workers declare them; wins over the measured size. A declared cpu device that is not among
    the topology's NUMA nodes is shown all the same."""
    workers: tuple[str, ...] = ()


class TreeNode(Struct, frozen=True):
    """`memory_bytes` and `used_bytes` are of all devices below; both 0 where no size is known."""

    kind: NodeKind
    name: str
    detail: str
    memory_bytes: int
    used_bytes: int
    children: tuple[TreeNode, ...] = ()

    @property
    def percent(self) -> int:
        """How full, in whole percent rounded down; above 100 when more is promised than there is."""
        return 100 * self.used_bytes // self.memory_bytes if self.memory_bytes else 0


def topology_tree(servers: Sequence[Server]) -> tuple[TreeNode, ...]:
    """One root per server, by name. Every resident appears exactly once: those on devices that the server does not
    report (any more) stand below `NUMA not known`."""
    return tuple(_server(server) for server in sorted(servers, key=lambda server: server.name))


def _server(server: Server) -> TreeNode:
    devices = _devices(server)
    places = sorted({place for place, _, _ in devices}, key=lambda place: (NUMA_UNKNOWN in place, place))
    children = tuple(
        _numa(place, [(island, node) for found, island, node in devices if found == place], server.topology)
        for place in places
    )
    workers = f"workers {', '.join(server.workers)}" if server.workers else ""
    return _parent("server", server.name, workers, children)


def _devices(server: Server) -> list[tuple[tuple[int, int], str, TreeNode]]:
    """((socket, NUMA node), island or nothing, device), GPUs first."""
    topology, sizes = server.topology, dict(server.declared)
    island_names = _island_names(topology)
    devices = [
        ((gpu.socket, gpu.numa_node), island_names.get(gpu.index, ""), _gpu(gpu, server, sizes))
        for gpu in topology.gpus
    ]
    for cpu in topology.cpus:
        size = sizes.get(cpu.device, cpu.memory_bytes)
        node = _device(cpu.device, f"CPUs {cpu.cpus}", size, server.residents)
        devices.append(((cpu.socket, cpu.numa_node), "", node))
    known = {*(gpu.device for gpu in topology.gpus), *(cpu.device for cpu in topology.cpus)}
    known |= {instance.device for gpu in topology.gpus for instance in gpu.mig}
    others = {*sizes, *(resident.device for resident in server.residents)} - known
    nowhere = (NUMA_UNKNOWN, NUMA_UNKNOWN)
    devices += [
        (nowhere, "", _device(name, "not in the topology", sizes.get(name, 0), server.residents))
        for name in sorted(others)
    ]
    return devices


def _numa(place: tuple[int, int], devices: Sequence[tuple[str, TreeNode]], topology: GpuTopology) -> TreeNode:
    socket, node = place
    if node == NUMA_UNKNOWN:
        name = "NUMA not known"
    else:
        name = f"NUMA {node}" if socket == NUMA_UNKNOWN else f"socket {socket}, NUMA {node}"
    nics = [nic.device for nic in topology.nics if nic.numa_node == node != NUMA_UNKNOWN]
    children: list[TreeNode] = []
    for island in dict.fromkeys(island for island, _ in devices):
        members = tuple(device for found, device in devices if found == island)
        if island:
            children.append(_parent("island", island, f"{len(members)} here", members))
        else:
            children.extend(members)
    return _parent("numa", name, f"NICs {', '.join(nics)}" if nics else "", tuple(children))


def _island_names(topology: GpuTopology) -> dict[int, str]:
    """GPU index -> `island 0 (NV12, 8 GPUs)`, for islands of two and more; the label is the weakest NVLink inside."""
    names: dict[int, str] = {}
    shared = [members for members in islands(topology) if len(members) > 1]
    for number, members in enumerate(shared):
        inside = {f"GPU{index}" for index in members}
        links = [x.nvlinks for x in topology.links if x.kind == "NV" and x.a in inside and x.b in inside]
        names |= dict.fromkeys(members, f"island {number} (NV{min(links)}, {len(members)} GPUs)")
    return names


def _gpu(gpu: Gpu, server: Server, sizes: Mapping[str, int]) -> TreeNode:
    if not gpu.mig_enabled:
        return _device(gpu.device, gpu.product, sizes.get(gpu.device, gpu.memory_bytes), server.residents)
    instances = tuple(
        _device(m.device, m.profile, sizes.get(m.device, m.memory_bytes), server.residents) for m in gpu.mig
    )
    misplaced = _residents(gpu.device, server.residents)
    return _parent("device", gpu.device, f"{gpu.product}, MIG", (*instances, *misplaced))


def _device(name: str, detail: str, memory_bytes: int, residents: Sequence[Resident]) -> TreeNode:
    children = _residents(name, residents)
    return TreeNode("device", name, detail, memory_bytes, sum(child.used_bytes for child in children), children)


def _residents(device: str, residents: Sequence[Resident]) -> tuple[TreeNode, ...]:
    found = [resident for resident in residents if resident.device == device]
    found.sort(key=lambda resident: (-resident.memory_bytes, resident.model, resident.version))
    return tuple(TreeNode("resident", f"{r.model}@{r.version}", r.detail, 0, r.memory_bytes) for r in found)


def _parent(kind: NodeKind, name: str, detail: str, children: tuple[TreeNode, ...]) -> TreeNode:
    return TreeNode(
        kind,
        name,
        detail,
        sum(child.memory_bytes for child in children),
        sum(child.used_bytes for child in children),
        children,
    )
