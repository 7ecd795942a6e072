"""The machines of tests/fixtures/topology, and matrices written the way nvidia-smi writes them."""

from __future__ import annotations

import functools
from pathlib import Path

from sie_stream.topology.assemble import assemble
from sie_stream.topology.cpus import cpu_devices, parse_lscpu, parse_numactl
from sie_stream.topology.gpu_query import parse_gpu_list, parse_gpu_query
from sie_stream.topology.pci import parse_lspci
from sie_stream.topology.records import NUMA_UNKNOWN, GpuTopology
from sie_stream.topology.topo_matrix import TopoMatrix, parse_topo_matrix

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "topology"
MACHINES = ("a100-mig", "a100-pcie-4", "cpu-two-numa", "dgx-a100", "hgx-h100", "l40s-4")


def text(machine: str, name: str) -> str:
    """One tool's output; empty when the machine has none."""
    path = FIXTURES / machine / name
    return path.read_text() if path.exists() else ""


@functools.cache
def topology(machine: str) -> GpuTopology:
    query, matrix, lspci = (text(machine, name) for name in ("query-gpu.csv", "topo-m.txt", "lspci-vv.txt"))
    numactl = text(machine, "numactl.txt")
    return assemble(
        parse_gpu_query(query) if query else (),
        parse_topo_matrix(matrix) if matrix else None,
        parse_lspci(lspci),
        cpu_devices(parse_lscpu(text(machine, "lscpu.txt")), parse_numactl(numactl) if numactl else ()),
        parse_gpu_list(text(machine, "list-gpus.txt")),
    )


def rendered(matrix: TopoMatrix, spaces: bool = False, underlined: bool = False, extra_column: bool = False) -> str:
    """`matrix` as nvidia-smi prints it: with tabs, or as it looks once pasted with spaces."""
    names = [f"GPU{gpu.gpu}" for gpu in matrix.gpus] + [name for name, _ in matrix.nics]
    labels = {(link.a, link.b): link.label for link in matrix.links}
    labels |= {(b, a): label for (a, b), label in labels.items()}
    titles = ["CPU Affinity", "NUMA Affinity", *(["GPU NUMA ID"] if extra_column else [])]
    table = [["", *(f"\x1b[4m{word}\x1b[0m" if underlined else word for word in [*names, *titles])]]
    affinity = {f"GPU{gpu.gpu}": gpu for gpu in matrix.gpus}
    for a in names:
        row = [a, *(" X " if a == b else labels[a, b] for b in names)]
        if a in affinity:
            node = affinity[a].numa_node
            row += [affinity[a].cpus or "N/A", "N/A" if node == NUMA_UNKNOWN else str(node)]
            row += ["", "N/A"] if extra_column else []
        table.append(row)
    lines = ["".join(f"{cell:<8} " for cell in row).rstrip() if spaces else "\t".join(row) for row in table]
    legend = "\n\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    nics = "".join(f"  {name}: {device}\n" for name, device in matrix.nics)
    return "\n".join(lines) + legend + (f"\nNIC Legend:\n\n{nics}" if nics else "")
