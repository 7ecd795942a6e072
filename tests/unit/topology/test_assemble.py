"""One server out of several tools, and out of NVML."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from msgspec import structs

from sie_stream.topology.assemble import NvmlGpu, NvmlMig, NvmlNvLink, assemble, from_nvml
from sie_stream.topology.cpus import cpu_devices, parse_lscpu
from sie_stream.topology.gpu_query import MIB, parse_gpu_query
from sie_stream.topology.groups import distance
from sie_stream.topology.pci import parse_lspci, pci_distance
from sie_stream.topology.records import NUMA_UNKNOWN, GpuTopology, Link, PcieLink
from sie_stream.topology.text import TopologyError
from sie_stream.topology.topo_matrix import parse_topo_matrix
from tests.unit.topology.machines import MACHINES, text, topology


def test_dgx_knows_sockets_and_nodes() -> None:
    dgx = topology("dgx-a100")
    assert [(gpu.socket, gpu.numa_node) for gpu in dgx.gpus] == [
        (0, 3),
        (0, 3),
        (0, 1),
        (0, 1),
        *[(1, 7)] * 2,
        *[(1, 5)] * 2,
    ]
    assert [nic.numa_node for nic in dgx.nics] == [3, 3, 1, 1, 7, 7, 5, 5, 3, 7]
    assert len(dgx.cpus) == 8


@pytest.mark.parametrize("machine", MACHINES)
def test_every_pair_has_one_link(machine: str) -> None:
    found = topology(machine)
    names = [gpu.name for gpu in found.gpus] + [nic.name for nic in found.nics]
    assert [(link.a, link.b) for link in found.links] == list(itertools.combinations(names, 2))
    assert all((link.nvlinks > 0) == (link.kind == "NV") for link in found.links)


def test_the_bus_tree_says_what_the_matrix_says() -> None:
    rows = parse_gpu_query(text("l40s-4", "query-gpu.csv"))
    pci = parse_lspci(text("l40s-4", "lspci-vv.txt"))
    cpus = cpu_devices(parse_lscpu(text("l40s-4", "lscpu.txt")))
    assert assemble(rows, None, pci, cpus) == topology("l40s-4"), "without NVLink the tree alone gives the same server"


@pytest.mark.parametrize(
    ("machine", "addresses"),
    [
        ("a100-pcie-4", {"GPU0": "19", "GPU1": "1a", "GPU2": "b1", "GPU3": "ca", "NIC0": "1b", "NIC1": "cb"}),
        ("dgx-a100", {"GPU0": "07", "GPU1": "0f", "NIC0": "0c", "NIC1": "0e"}),
    ],
)
def test_the_bus_tree_agrees_with_the_matrix_where_there_is_no_nvlink(machine: str, addresses: dict[str, str]) -> None:
    found = topology(machine)
    devices = parse_lspci(text(machine, "lspci-vv.txt"))
    compared = 0
    for a, b in itertools.combinations(addresses, 2):
        link = distance(found, a, b)
        assert link is not None
        if link.kind != "NV":
            assert pci_distance(devices, f"0000:{addresses[a]}:00.0", f"0000:{addresses[b]}:00.0") == link.kind, (a, b)
            compared += 1
    assert compared >= 5


def test_what_nobody_told_is_unknown() -> None:
    bare = assemble(parse_gpu_query(text("l40s-4", "query-gpu.csv")))
    assert {gpu.numa_node for gpu in bare.gpus} == {NUMA_UNKNOWN}
    assert {link.kind for link in bare.links} == {"SYS"}


def test_a_matrix_of_other_gpus_is_refused() -> None:
    rows = parse_gpu_query(text("a100-mig", "query-gpu.csv"))
    with pytest.raises(TopologyError, match="it lists GPU0, GPU1, but the topology matrix has GPU0, GPU1, GPU2, GPU3"):
        assemble(rows, parse_topo_matrix(text("l40s-4", "topo-m.txt")))


def nvml_of(server: GpuTopology, links: Sequence[NvmlNvLink]) -> list[NvmlGpu]:
    """What NVML would say about the GPUs of `server`, if each had `links`."""
    levels = {"NV": 50, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
    records: list[NvmlGpu] = []
    for gpu in server.gpus:
        domain, rest = gpu.pci_bus_id.split(":", 1)
        others = [other for other in server.gpus if other != gpu]
        ancestors = tuple(
            (other.index, levels[found.kind]) for other in others if (found := distance(server, gpu.name, other.name))
        )
        records.append(
            NvmlGpu(
                index=gpu.index,
                uuid=gpu.uuid,
                name=gpu.product,
                memory_bytes=gpu.memory_bytes,
                pci_bus_id=f"{domain:0>8}:{rest.upper()}",
                numa_node=gpu.numa_node,
                pcie_generation=4 if gpu.pcie and gpu.pcie.speed_tenths == 160 else 1,
                pcie_generation_max=4,
                pcie_width=16,
                pcie_width_max=16,
                nvlinks=tuple(links),
                ancestors=ancestors,
            )
        )
    return records


def test_nvml_and_the_tools_describe_one_dgx_alike() -> None:
    dgx = topology("dgx-a100")
    through_switches = [NvmlNvLink(number, "", "switch") for number in range(12)]
    tools = structs.replace(dgx, nics=(), links=tuple(link for link in dgx.links if link.b.startswith("GPU")))
    assert from_nvml(nvml_of(dgx, through_switches), dgx.cpus) == tools


def test_nvml_and_the_tools_describe_l40s_alike() -> None:
    server = topology("l40s-4")
    assert from_nvml(nvml_of(server, ())[::-1], server.cpus) == server


def test_direct_nvlinks_count_per_pair() -> None:
    ends = [
        NvmlGpu(0, "GPU-0", "V100", 1, "00000000:06:00.0", nvlinks=_to("07", 2) + _to("0A", 1)),
        NvmlGpu(1, "GPU-1", "V100", 1, "00000000:07:00.0", nvlinks=_to("06", 2)),
        NvmlGpu(2, "GPU-2", "V100", 1, "00000000:0A:00.0", nvlinks=_to("06", 1), ancestors=((1, 20),)),
    ]
    assert [link.label for link in from_nvml(ends).links] == ["NV2", "NV1", "SYS"], "levels are asked of the first end"
    both = [structs.replace(ends[1], ancestors=((2, 20),)), ends[2]]
    assert [link.label for link in from_nvml(both).links] == ["PXB"]


def _to(bus: str, count: int) -> tuple[NvmlNvLink, ...]:
    return tuple(NvmlNvLink(number, f"00000000:{bus}:00.0", "gpu") for number in range(count))


def test_links_to_anything_else_are_no_way() -> None:
    npu = (NvmlNvLink(0, "", "npu"), NvmlNvLink(1, "", "unknown"))
    ends = [
        NvmlGpu(n, f"GPU-{n}", "V100", 1, f"0000000{n}:01:00.0", nvlinks=npu, ancestors=((1 - n, 30),)) for n in (0, 1)
    ]
    assert from_nvml(ends).links == (Link("GPU0", "GPU1", "PHB"),)


def test_mig_of_nvml_has_exact_sizes() -> None:
    mig = NvmlMig(3, "MIG-1", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864 * MIB)
    gpu = from_nvml([NvmlGpu(1, "GPU-1", "A100", 1, "07:00.0", mig_enabled=True, mig=(mig,))]).gpus[0]
    assert [(m.device, m.profile, m.memory_bytes) for m in gpu.mig] == [("mig:1:3", "1g.5gb", 4864 * MIB)]


def test_pcie_is_known_only_as_a_whole() -> None:
    def link(now: int, most: int, width: int, width_max: int) -> PcieLink | None:
        record = NvmlGpu(0, "GPU-0", "T4", 1, "07:00.0", NUMA_UNKNOWN, now, most, width, width_max)
        return from_nvml([record]).gpus[0].pcie

    assert link(3, 4, 8, 16) == PcieLink(80, 8, 160, 16)
    assert link(0, 4, 8, 16) is None
    assert link(3, 4, 0, 16) is None


def test_what_nvml_cannot_mean_is_refused() -> None:
    with pytest.raises(TopologyError, match="GPU0: 'here' is no PCI address"):
        from_nvml([NvmlGpu(0, "GPU-0", "T4", 1, "here")])
    ends = [NvmlGpu(n, f"GPU-{n}", "T4", 1, f"0{n}:00.0", ancestors=((1 - n, 35),)) for n in (0, 1)]
    with pytest.raises(TopologyError, match=r"GPU0 to GPU1: level 35 is not known\. Allowed: 0, 10, 20"):
        from_nvml(ends)
