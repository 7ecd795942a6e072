"""What a server is made of: GPUs, MIG instances, NICs, NUMA nodes, and how near each is to each.

Memory is bytes. NUMA_UNKNOWN (-1, as Linux itself says it) stands for a node or socket that nobody told us.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

NUMA_UNKNOWN = -1

LinkKind = Literal["NV", "PIX", "PXB", "PHB", "NODE", "SYS"]
LINK_KINDS: tuple[LinkKind, ...] = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Nearest first, with the words of `nvidia-smi topo -m`: NVLink; one PCIe switch; several PCIe switches; one PCIe host
bridge; one NUMA node; across the sockets."""
LINK_RANK: dict[LinkKind, int] = {kind: rank for rank, kind in enumerate(LINK_KINDS)}


class Link(Struct, frozen=True):
    """The nearest way between two things of one server, once per pair. `a` and `b` are names: GPU0, NIC1."""

    a: str
    b: str
    kind: LinkKind
    nvlinks: int = 0
    """Bonded NVLinks; above 0 exactly when `kind` is NV."""

    @property
    def label(self) -> str:
        """As nvidia-smi writes it: NV12, PXB."""
        return f"NV{self.nvlinks}" if self.kind == "NV" else self.kind


class PcieLink(Struct, frozen=True):
    """A PCIe link as it runs now, and as it could: speeds in tenths of GT/s (160 is PCIe 4), widths in lanes."""

    speed_tenths: int
    width: int
    speed_max_tenths: int
    width_max: int

    @property
    def downgraded(self) -> bool:
        """Runs narrower than it could. (Speed alone drops on every idle GPU, to save power.)"""
        return self.width < self.width_max


class MigInstance(Struct, frozen=True):
    """A slice of a GPU that is a device of its own. `index` counts within its GPU."""

    gpu: int
    index: int
    uuid: str
    profile: str
    """Such as 3g.20gb: compute slices and nominal memory."""
    memory_bytes: int

    @property
    def device(self) -> str:
        return f"mig:{self.gpu}:{self.index}"


class Gpu(Struct, frozen=True):
    index: int
    uuid: str
    product: str
    memory_bytes: int
    pci_bus_id: str
    """domain:bus:device.function in lower case, such as 0000:07:00.0."""
    numa_node: int = NUMA_UNKNOWN
    socket: int = NUMA_UNKNOWN
    pcie: PcieLink | None = None
    mig_enabled: bool = False
    mig: tuple[MigInstance, ...] = ()

    @property
    def name(self) -> str:
        return f"GPU{self.index}"

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


class Nic(Struct, frozen=True):
    """A network card that GPUs may read and write directly."""

    name: str
    """As in links: NIC0."""
    device: str
    """As in /sys/class/infiniband: mlx5_0."""
    numa_node: int = NUMA_UNKNOWN


class CpuDevice(Struct, frozen=True):
    """One NUMA node with cores: a place where models run without a GPU."""

    numa_node: int
    socket: int
    cpus: str
    """List of logical CPUs in the kernel's notation: 0-31,64-95."""
    memory_bytes: int
    """Size of the node's memory; 0 when not told."""

    @property
    def device(self) -> str:
        return f"cpu:{self.numa_node}"


class GpuTopology(Struct, frozen=True):
    """One server. Lists are in order of index or node; `links` holds each pair of GPUs and NICs once, a before b."""

    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    links: tuple[Link, ...] = ()
    cpus: tuple[CpuDevice, ...] = ()
