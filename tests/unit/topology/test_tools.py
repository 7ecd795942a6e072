"""The other tools: nvidia-smi's CSV and list, lspci, lscpu, numactl."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.topology.cpus import cpu_devices, parse_lscpu, parse_numactl
from sie_stream.topology.gpu_query import MIB, QUERY_FIELDS, mig_memory_bytes, parse_gpu_list, parse_gpu_query
from sie_stream.topology.pci import bridges_above, parse_lspci, pci_distance
from sie_stream.topology.records import NUMA_UNKNOWN, CpuDevice, PcieLink
from sie_stream.topology.text import TopologyError, pci_address
from tests.unit.topology.machines import text


def test_csv_of_a_dgx() -> None:
    rows = parse_gpu_query(text("dgx-a100", "query-gpu.csv"))
    assert [row.pci_bus_id for row in rows][:2] == ["0000:07:00.0", "0000:0f:00.0"]
    assert {row.product for row in rows} == {"NVIDIA A100-SXM4-40GB"}
    assert {row.memory_bytes for row in rows} == {40960 * MIB}
    assert rows[0].pcie == PcieLink(160, 16, 160, 16)


def test_csv_ignores_more_columns_and_unknown_values() -> None:
    assert len(parse_gpu_query(text("hgx-h100", "query-gpu.csv"))) == 8, "driver_version was asked for as well"
    l40s = parse_gpu_query(text("l40s-4", "query-gpu.csv"))
    assert not any(row.mig_enabled for row in l40s), "[N/A] is not Enabled"
    row = "index, uuid, name, memory.total [MiB], pci.bus_id\n0, GPU-1, T4, 15360, 00000000:00:04.0\n"
    assert parse_gpu_query(row)[0].memory_bytes == 15360 * MIB, "nounits leaves the number in MiB"
    assert parse_gpu_query(row)[0].pcie is None


def test_a_link_that_runs_narrow_is_seen() -> None:
    rows = parse_gpu_query(text("a100-pcie-4", "query-gpu.csv"))
    assert [row.pcie is not None and row.pcie.downgraded for row in rows] == [False, False, False, True]


def test_mig_instances_are_listed_below_their_gpu() -> None:
    found = parse_gpu_list(text("a100-mig", "list-gpus.txt"))
    assert [(m.device, m.profile) for m in found] == [
        ("mig:0:0", "3g.20gb"), ("mig:0:1", "2g.10gb"), ("mig:0:2", "1g.5gb"), ("mig:0:3", "1g.5gb")
    ]  # fmt: skip
    assert found[2].memory_bytes == 4864 * MIB, "1g.5gb has 4.75 GiB"


@pytest.mark.parametrize(
    ("profile", "real_mib"), [("1g.5gb", 4864), ("3g.20gb", 19968), ("3g.40gb", 40192), ("7g.80gb", 81152)]
)
def test_mig_memory_never_promises_more_than_the_profile_has(profile: str, real_mib: int) -> None:
    size = mig_memory_bytes(profile)
    assert size is not None
    assert size <= real_mib * MIB
    assert mig_memory_bytes(f"1c.{profile}") == mig_memory_bytes(f"{profile}+me") == size


def test_lspci_of_nested_switches() -> None:
    devices = parse_lspci(text("dgx-a100", "lspci-vv.txt"))
    gpu = next(device for device in devices if device.address == "0000:07:00.0")
    assert (gpu.kind, gpu.numa_node, gpu.pcie) == ("3D controller", 3, PcieLink(160, 16, 160, 16))
    assert gpu.description == "NVIDIA Corporation GA100 [A100 SXM4 40GB]"
    above = [bridge.address for bridge in bridges_above(devices, "0000:07:00.0")]
    assert above == ["0000:00:01.1", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"]
    assert pci_distance(devices, "0000:0c:00.0", "0000:0e:00.0") == "PIX", "two ports of one switch"
    assert pci_distance(devices, "0000:07:00.0", "0000:0c:00.0") == "PXB", "two switches below one root port"


def test_a_downgraded_link_and_the_host_bridge() -> None:
    devices = parse_lspci(text("a100-pcie-4", "lspci-vv.txt"))
    links = {device.address: device.pcie for device in devices if device.kind == "3D controller"}
    assert links["0000:b1:00.0"] == PcieLink(25, 16, 160, 16), "an idle GPU slows its link down"
    assert not PcieLink(25, 16, 160, 16).downgraded
    assert links["0000:ca:00.0"] == PcieLink(160, 8, 160, 16)
    assert pci_distance(devices, "0000:b1:00.0", "0000:ca:00.0") == "PHB"
    assert pci_distance(devices, "0000:19:00.0", "0000:ca:00.0") == "SYS"


def test_lspci_without_root_and_with_numbers() -> None:
    found = parse_lspci(
        "10000:01:00.0 3D controller [0302]: NVIDIA Corporation X [10de:20b0] (rev a1)\n"
        "\tCapabilities: <access denied>\n"
        "0000:02:00.0 PCI bridge: Y (rev 01) (prog-if 00 [Normal decode])\n"
        "\tBus: primary=00, secondary=00, subordinate=00, sec-latency=0\n\t\tLnkSta:\tSpeed unknown, Width x0\n"
    )
    assert [(device.address, device.pcie, device.secondary_bus) for device in found] == [
        ("10000:01:00.0", None, None),
        ("0000:02:00.0", None, None),
    ]
    assert found[0].numa_node == NUMA_UNKNOWN


def test_lscpu_and_numactl_of_two_nodes() -> None:
    summary = parse_lscpu(text("cpu-two-numa", "lscpu.txt"))
    assert (summary.model, summary.sockets) == ("AMD EPYC 7413 24-Core Processor", 2)
    assert cpu_devices(summary, parse_numactl(text("cpu-two-numa", "numactl.txt"))) == (
        CpuDevice(0, 0, "0-23,48-71", 128561 * MIB),
        CpuDevice(1, 1, "24-47,72-95", 129012 * MIB),
    )
    assert cpu_devices(summary)[0].memory_bytes == 0, "lscpu does not tell sizes"


def test_sockets_are_dealt_out_in_order_or_not_told() -> None:
    dgx = cpu_devices(parse_lscpu(text("dgx-a100", "lscpu.txt")))
    assert [cpu.socket for cpu in dgx] == [0, 0, 0, 0, 1, 1, 1, 1]
    uneven = "Socket(s): 2\nNUMA node(s): 3\nNUMA node0 CPU(s): 0\nNUMA node1 CPU(s): 1\nNUMA node2 CPU(s): 2\n"
    assert [cpu.socket for cpu in cpu_devices(parse_lscpu(uneven))] == [NUMA_UNKNOWN] * 3
    arm = "Socket(s): -\nOn-line CPU(s) list: 0-7\n"
    assert cpu_devices(parse_lscpu(arm)) == (CpuDevice(0, NUMA_UNKNOWN, "0-7", 0),)


def test_a_node_without_cpus_is_no_device() -> None:
    nodes = parse_numactl(
        "available: 2 nodes (0-1)\nnode 0 cpus: 0 1\nnode 0 size: 100 MB\nnode 0 free: 5 MB\nnode 1 cpus:\n"
        "node 1 size: 900 MB\nnode 1 free: 800 MB\nnode distances:\nnode 0 1\n 0: 10 20\n 1: 20 10\n"
    )
    assert nodes[1].cpus == ()
    assert [cpu.device for cpu in cpu_devices(parse_lscpu("On-line CPU(s) list: 0-1\n"), nodes)] == ["cpu:0"]


CSV = "index, uuid, name, memory.total [MiB], pci.bus_id\n0, GPU-1, T4, 15360 MiB, 00000000:00:04.0\n"
PCI = "07:00.0 3D controller: NVIDIA (rev a1)\n\tNUMA node: 3\n"
NUMA = "available: 1 nodes (0)\nnode 0 cpus: 0\nnode 0 size: 10 MB\n"
BROKEN: list[tuple[Callable[[str], object], str, int, str]] = [
    (parse_gpu_query, "", 0, "is empty"),
    (parse_gpu_query, CSV.replace("name", "nam"), 1, "lacks name. Did you mean 'nam'?"),
    (parse_gpu_query, CSV.replace("T4, ", "T4, x, "), 2, "6 values, the header has 5"),
    (parse_gpu_query, CSV.replace("\n0,", "\nzero,"), 2, "index is 'zero'"),
    (parse_gpu_query, CSV.replace("15360 MiB", "15360 MB"), 2, "memory.total is '15360 MB'"),
    (parse_gpu_query, CSV.replace("15360 MiB", "[N/A]"), 2, "memory.total is '[N/A]'"),
    (parse_gpu_query, CSV.replace("00000000:00:04.0", "4"), 2, "pci.bus_id is '4'"),
    (parse_gpu_query, CSV.replace("GPU-1", ""), 2, "uuid is ''"),
    (parse_gpu_query, CSV + CSV.splitlines()[1], 3, "GPU 0 stands twice"),
    (
        parse_gpu_query,
        f"{', '.join(QUERY_FIELDS)}\n0, GPU-1, T4, 1 MiB, 0:04.0, N/A, 9, 4, 16, 16\n".replace("0:04.0", "00:04.0"),
        2,
        "pcie.link.gen.current is '9'",
    ),
    (parse_gpu_list, "GPU zero\n", 1, "expected `GPU 0:"),
    (parse_gpu_list, "  MIG 1g.5gb Device 0: (UUID: MIG-1)\n", 1, "before any GPU"),
    (parse_gpu_list, "GPU 0: A (UUID: GPU-1)\n  MIG 1g.5gb\n", 2, "expected `MIG"),
    (parse_gpu_list, "GPU 0: A (UUID: GPU-1)\n  MIG huge Device 0: (UUID: MIG-1)\n", 2, "'huge' is not of the form"),
    (parse_lspci, "\tNUMA node: 3\n", 1, "before any device"),
    (parse_lspci, "lspci: cannot open\n", 1, "a device's first line"),
    (parse_lspci, PCI.replace("node: 3", "node: three"), 2, "expected `NUMA node: 0`"),
    (parse_lspci, PCI + PCI, 3, "0000:07:00.0 stands twice"),
    (parse_lspci, PCI + "\tBus: primary=07, secondary=zz, subordinate=09\n", 3, "expected `Bus: primary"),
    (parse_lspci, PCI + "\tBus: primary=07, secondary=03, subordinate=09\n", 3, "cannot lead to bus 03"),
    (parse_lspci, PCI + "\t\tLnkCap:\tPort #0, fast\n", 3, "expected `LnkCap:"),
    (parse_lscpu, "Architecture: x86_64\n", 0, "neither"),
    (parse_lscpu, "NUMA node0 CPU(s): few\n", 1, "'few' is no list of CPUs"),
    (parse_lscpu, "NUMA node(s): 2\nNUMA node0 CPU(s): 0\n", 1, "1 nodes are listed below"),
    (parse_lscpu, "Socket(s): two\nNUMA node0 CPU(s): 0\n", 1, "a number is expected"),
    (parse_numactl, "No NUMA available on this system\n", 1, "expected `node 0 cpus"),
    (parse_numactl, "", 0, "no `available:` line"),
    (parse_numactl, NUMA.replace("1 nodes", "2 nodes"), 1, "expected `available:"),
    (parse_numactl, NUMA.replace("node 0 size: 10 MB\n", ""), 1, "node 0 is available but has no `node 0 size:`"),
    (parse_numactl, NUMA.replace("10 MB", "10 GB"), 3, "'10 GB': expected a size"),
    (parse_numactl, NUMA.replace("cpus: 0", "cpus: all"), 2, "'all' is no list of CPUs"),
]


@pytest.mark.parametrize(
    ("parse", "broken", "line", "says"), BROKEN, ids=[f"{p.__name__}-{s}" for p, _, _, s in BROKEN]
)
def test_garbage_is_named_with_its_line(parse: Callable[[str], object], broken: str, line: int, says: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse(broken)
    assert (caught.value.line, says in str(caught.value)) == (line, True), str(caught.value)


@given(st.integers(0, 0xFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_every_spelling_of_an_address_is_one(domain: int, bus: int, device: int, function: int) -> None:
    rest = f"{bus:02x}:{device:02x}.{function}"
    assert pci_address(f"{domain:08X}:{rest.upper()}") == pci_address(f"{domain:04x}:{rest}") == f"{domain:04x}:{rest}"
    assert pci_address(rest) == f"0000:{rest}"
