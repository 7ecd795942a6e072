"""Puts together what the tools, or NVML, said about one server."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec import Struct

from sie_stream.topology.gpu_query import GT_TENTHS, TOOL, GpuRow
from sie_stream.topology.pci import PciDevice, pci_distance
from sie_stream.topology.records import (
    NUMA_UNKNOWN,
    CpuDevice,
    Gpu,
    GpuTopology,
    Link,
    LinkKind,
    MigInstance,
    Nic,
    PcieLink,
)
from sie_stream.topology.text import TopologyError, pci_address
from sie_stream.topology.topo_matrix import TopoMatrix

# nvmlGpuTopologyLevel_t: the nearest common ancestor of two GPUs in the PCIe tree. 0 is two chips on one board.
NVML_LEVELS: dict[int, LinkKind] = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def assemble(
    rows: Sequence[GpuRow],
    matrix: TopoMatrix | None = None,
    pci: Sequence[PciDevice] = (),
    cpus: Sequence[CpuDevice] = (),
    mig: Sequence[MigInstance] = (),
) -> GpuTopology:
    """One server from parsed tool outputs; each is optional but the query.

    Without a matrix the links come from the PCI tree (so NVLink is not seen), without both every pair is SYS.
    Raises TopologyError when the matrix and the query do not name the same GPUs.
    """
    if matrix is not None and [a.gpu for a in matrix.gpus] != [row.index for row in rows]:
        named = ", ".join(f"GPU{affinity.gpu}" for affinity in matrix.gpus)
        listed = ", ".join(f"GPU{row.index}" for row in rows)
        raise TopologyError(TOOL, 0, "", f"it lists {listed or 'no GPU'}, but the topology matrix has {named}.")
    by_address = {device.address: device for device in pci}
    sockets = {cpu.numa_node: cpu.socket for cpu in cpus}
    nodes = {affinity.gpu: affinity.numa_node for affinity in matrix.gpus} if matrix else {}
    gpus: list[Gpu] = []
    for row in rows:
        device = by_address.get(row.pci_bus_id)
        node = nodes.get(row.index, NUMA_UNKNOWN)
        if node == NUMA_UNKNOWN and device is not None:
            node = device.numa_node
        gpus.append(
            Gpu(
                index=row.index,
                uuid=row.uuid,
                product=row.product,
                memory_bytes=row.memory_bytes,
                pci_bus_id=row.pci_bus_id,
                numa_node=node,
                socket=sockets.get(node, NUMA_UNKNOWN),
                pcie=row.pcie or (device.pcie if device else None),
                mig_enabled=row.mig_enabled,
                mig=tuple(instance for instance in mig if instance.gpu == row.index),
            )
        )
    links = matrix.links if matrix else _pci_links(gpus, pci)
    return GpuTopology(tuple(gpus), _nics(matrix, gpus), links, tuple(cpus))


def _pci_links(gpus: Sequence[Gpu], pci: Sequence[PciDevice]) -> tuple[Link, ...]:
    known = {device.address for device in pci}
    return tuple(
        Link(
            a.name,
            b.name,
            pci_distance(pci, a.pci_bus_id, b.pci_bus_id) if {a.pci_bus_id, b.pci_bus_id} <= known else "SYS",
        )
        for a, b in itertools.combinations(gpus, 2)
    )


def _nics(matrix: TopoMatrix | None, gpus: Sequence[Gpu]) -> tuple[Nic, ...]:
    """A NIC is on the NUMA node of any GPU that it reaches without crossing sockets: every class but SYS says so."""
    if matrix is None:
        return ()
    nodes = {gpu.name: gpu.numa_node for gpu in gpus}
    near: dict[str, int] = {}
    for link in matrix.links:
        if link.kind != "SYS" and link.a in nodes and link.b not in nodes:
            near.setdefault(link.b, nodes[link.a])
    return tuple(Nic(name, device, near.get(name, NUMA_UNKNOWN)) for name, device in matrix.nics)


# ---------------------------------------------------------------- NVML


class NvmlNvLink(Struct, frozen=True):
    """One active NVLink of a GPU: to another GPU by its PCI address, or to an NVSwitch."""

    link: int
    remote: str
    """PCI address of the other end, in any spelling; only looked at for `gpu`."""
    remote_kind: str
    """gpu, switch, or another word (npu, unknown), which is no way to another GPU."""


class NvmlMig(Struct, frozen=True):
    index: int
    uuid: str
    name: str
    """As nvmlDeviceGetName says it: `NVIDIA A100-SXM4-40GB MIG 3g.20gb`."""
    memory_bytes: int


class NvmlGpu(Struct, frozen=True):
    """One GPU as NVML describes it. What NVML does not support on it is empty, 0 or NUMA_UNKNOWN."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    pci_bus_id: str
    numa_node: int = NUMA_UNKNOWN
    pcie_generation: int = 0
    pcie_generation_max: int = 0
    pcie_width: int = 0
    pcie_width_max: int = 0
    mig_enabled: bool = False
    mig: tuple[NvmlMig, ...] = ()
    nvlinks: tuple[NvmlNvLink, ...] = ()
    ancestors: tuple[tuple[int, int], ...] = ()
    """(index of another GPU, nvmlGpuTopologyLevel_t)."""


def from_nvml(records: Sequence[NvmlGpu], cpus: Sequence[CpuDevice] = ()) -> GpuTopology:
    """One server from NVML's records. NICs are not known to NVML.

    NVLinks count as nvidia-smi counts them: between two GPUs the direct links, or through NVSwitches as many as both
    have to switches (all switches of a server are taken for one fabric). Raises TopologyError for a malformed address.
    """
    sockets = {cpu.numa_node: cpu.socket for cpu in cpus}
    ordered = sorted(records, key=lambda record: record.index)
    gpus = tuple(_nvml_gpu(record, sockets) for record in ordered)
    links = tuple(_nvml_link(a, b, gpus) for a, b in itertools.combinations(ordered, 2))
    return GpuTopology(gpus, (), links, tuple(cpus))


def _nvml_gpu(record: NvmlGpu, sockets: dict[int, int]) -> Gpu:
    speeds = GT_TENTHS.get(record.pcie_generation), GT_TENTHS.get(record.pcie_generation_max)
    pcie = None
    if speeds[0] is not None and speeds[1] is not None and record.pcie_width and record.pcie_width_max:
        pcie = PcieLink(speeds[0], record.pcie_width, speeds[1], record.pcie_width_max)
    return Gpu(
        index=record.index,
        uuid=record.uuid,
        product=record.name,
        memory_bytes=record.memory_bytes,
        pci_bus_id=_address(record.pci_bus_id, record),
        numa_node=record.numa_node,
        socket=sockets.get(record.numa_node, NUMA_UNKNOWN),
        pcie=pcie,
        mig_enabled=record.mig_enabled,
        mig=tuple(
            MigInstance(record.index, m.index, m.uuid, m.name.rpartition("MIG ")[2], m.memory_bytes) for m in record.mig
        ),
    )


def _nvml_link(a: NvmlGpu, b: NvmlGpu, gpus: Sequence[Gpu]) -> Link:
    address_b = next(gpu.pci_bus_id for gpu in gpus if gpu.index == b.index)
    direct = sum(link.remote_kind == "gpu" and _address(link.remote, a) == address_b for link in a.nvlinks)
    switched = min(sum(link.remote_kind == "switch" for link in end.nvlinks) for end in (a, b))
    names = f"GPU{a.index}", f"GPU{b.index}"
    if direct or switched:
        return Link(*names, "NV", direct or switched)
    level = next((level for peer, level in a.ancestors if peer == b.index), 50)
    if level not in NVML_LEVELS:
        allowed = ", ".join(map(str, NVML_LEVELS))
        raise TopologyError("NVML", 0, "", f"{names[0]} to {names[1]}: level {level} is not known. Allowed: {allowed}.")
    return Link(*names, NVML_LEVELS[level])


def _address(text: str, record: NvmlGpu) -> str:
    address = pci_address(text)
    if address is None:
        raise TopologyError("NVML", 0, "", f"GPU{record.index}: {text!r} is no PCI address such as 00000000:07:00.0.")
    return address
