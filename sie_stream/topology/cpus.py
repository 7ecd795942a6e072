"""Reads `lscpu` and `numactl --hardware`: the NUMA nodes, their CPUs and their memory, as cpu devices."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from sie_stream.topology.records import NUMA_UNKNOWN, CpuDevice
from sie_stream.topology.text import TopologyError, cpu_list, cpu_ranges

LSCPU = "lscpu"
NUMACTL = "numactl --hardware"
MIB = 1024 * 1024
_NODE_CPUS = re.compile(r"NUMA node(\d+) CPU\(s\)")
_AVAILABLE = re.compile(r"available: (\d+) nodes? \(([\d,-]+)\)")
_NODE = re.compile(r"node (\d+) (cpus|size|free):(.*)")
_SIZE = re.compile(r"(\d+) MB")


class NumaNode(Struct, frozen=True):
    node: int
    cpus: tuple[int, ...]
    """Rising; empty for a node that is memory only."""
    memory_bytes: int = 0
    """0 when not told (lscpu does not)."""


class CpuSummary(Struct, frozen=True):
    """What lscpu says. `sockets` is 0 when it does not know (some ARM machines)."""

    model: str
    sockets: int
    nodes: tuple[NumaNode, ...]


def parse_lscpu(text: str) -> CpuSummary:
    """Sockets and NUMA nodes; a machine without NUMA lines is one node with all CPUs.

    Raises TopologyError naming the line: a malformed list or number, a NUMA node missing, no list of CPUs at all.
    """
    values: dict[str, tuple[int, str]] = {}
    nodes: list[NumaNode] = []
    for number, line in enumerate(text.splitlines(), 1):
        key, colon, value = (part.strip() for part in line.partition(":"))
        if not colon:
            continue
        values.setdefault(key, (number, value))
        if (match := _NODE_CPUS.fullmatch(key)) is not None:
            nodes.append(NumaNode(int(match[1]), _cpus(LSCPU, number, line, value)))
    if not nodes:
        if "On-line CPU(s) list" not in values:
            raise TopologyError(LSCPU, 0, text, "neither `NUMA node0 CPU(s):` nor `On-line CPU(s) list:` is there.")
        number, value = values["On-line CPU(s) list"]
        nodes = [NumaNode(0, _cpus(LSCPU, number, value, value))]
    number, count = values.get("NUMA node(s)", (0, str(len(nodes))))
    if count != str(len(nodes)):
        raise TopologyError(LSCPU, number, f"NUMA node(s): {count}", f"{len(nodes)} nodes are listed below.")
    number, sockets = values.get("Socket(s)", (0, "-"))
    if sockets != "-" and not sockets.isdecimal():
        raise TopologyError(LSCPU, number, f"Socket(s): {sockets}", "a number is expected.")
    ordered = tuple(sorted(nodes, key=lambda node: node.node))
    return CpuSummary(values.get("Model name", (0, ""))[1], 0 if sockets == "-" else int(sockets), ordered)


def parse_numactl(text: str) -> tuple[NumaNode, ...]:
    """The nodes of `numactl --hardware`, by number. Raises TopologyError naming the line that is malformed."""
    cpus: dict[int, tuple[int, ...]] = {}
    sizes: dict[int, int] = {}
    wanted: tuple[int, tuple[int, ...]] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("node distances"):
            break
        if line.startswith("available:"):
            match = _AVAILABLE.fullmatch(line.strip())
            listed = cpu_list(match[2]) if match else None
            if match is None or listed is None or len(listed) != int(match[1]):
                raise TopologyError(NUMACTL, number, line, "expected `available: 2 nodes (0-1)`.")
            wanted = (number, listed)
        elif (match := _NODE.fullmatch(line.strip())) is not None:
            node, value = int(match[1]), match[3].strip()
            if match[2] == "cpus":
                cpus[node] = _cpus(NUMACTL, number, line, value)
            elif match[2] == "size":
                sizes[node] = _size(number, line, value)
        elif line.strip():
            raise TopologyError(NUMACTL, number, line, "expected `node 0 cpus: 0 1 2` or `node 0 size: 257840 MB`.")
    if wanted is None:
        raise TopologyError(NUMACTL, 0, text, "there is no `available:` line.")
    for node in wanted[1]:
        if node not in cpus or node not in sizes:
            message = f"node {node} is available but has no `node {node} {'size' if node in cpus else 'cpus'}:` line."
            raise TopologyError(NUMACTL, wanted[0], text.splitlines()[wanted[0] - 1], message)
    return tuple(NumaNode(node, cpus[node], sizes[node]) for node in wanted[1])


def _cpus(tool: str, number: int, line: str, value: str) -> tuple[int, ...]:
    cpus = cpu_list(value)
    if cpus is None:
        raise TopologyError(tool, number, line, f"{value!r} is no list of CPUs such as 0-31,64-95.")
    return cpus


def _size(number: int, line: str, value: str) -> int:
    match = _SIZE.fullmatch(value)
    if match is None:
        raise TopologyError(NUMACTL, number, line, f"size {value!r}: expected a size such as 257840 MB.")
    return int(match[1]) * MIB


def cpu_devices(summary: CpuSummary, nodes: Sequence[NumaNode] = ()) -> tuple[CpuDevice, ...]:
    """One device per NUMA node that has CPUs. `nodes` (numactl) adds the sizes, and wins where both tell the CPUs.

    lscpu does not say which socket a node is on. Linux numbers the nodes of a socket in a row, so they are dealt out
    evenly in order; when that does not come out even the socket is NUMA_UNKNOWN.
    """
    known = {node.node: node for node in (*summary.nodes, *nodes)}
    populated = [known[number] for number in sorted(known) if known[number].cpus]
    even = summary.sockets > 0 and len(populated) % summary.sockets == 0
    per_socket = len(populated) // summary.sockets if even else 1
    return tuple(
        CpuDevice(node.node, place // per_socket if even else NUMA_UNKNOWN, cpu_ranges(node.cpus), node.memory_bytes)
        for place, node in enumerate(populated)
    )
