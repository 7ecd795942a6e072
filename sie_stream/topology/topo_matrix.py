"""Reads `nvidia-smi topo -m`: the matrix of GPUs and NICs, their affinities, the legend of NICs.

The format, from public outputs of drivers 384 to 580: a header of names, then `CPU Affinity`, `NUMA Affinity` and, in
newer drivers, `GPU NUMA ID`; one row per name, tabs between cells (spaces once it was pasted somewhere); rows of NICs
end after the matrix; after an empty line `Legend:`, and in newer drivers `NIC Legend:` with `NIC0: mlx5_0`.
"""

from __future__ import annotations

import re

from msgspec import Struct

from sie_stream.topology.records import LINK_KINDS, NUMA_UNKNOWN, Link, LinkKind
from sie_stream.topology.text import ANSI, TopologyError, cpu_list, cpu_ranges

TOOL = "nvidia-smi topo -m"
_GPU = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV(\d+)")
_NIC_LEGEND = re.compile(r"(NIC\d+):\s*(\S+)")
_KINDS: dict[str, LinkKind] = {**{kind: kind for kind in LINK_KINDS[1:]}, "SOC": "SYS"}
"""SOC is what SYS was called before driver 384: a way over the link between the sockets."""
_NOT_TOLD = ("", "N/A")


class GpuAffinity(Struct, frozen=True):
    gpu: int
    cpus: str
    """In the kernel's notation; empty when not told."""
    numa_node: int
    """The nearest node when several are listed."""


class TopoMatrix(Struct, frozen=True):
    """`links`: each pair once, in the order of the header. `nics`: (name in links, device name), same order."""

    gpus: tuple[GpuAffinity, ...]
    nics: tuple[tuple[str, str], ...]
    links: tuple[Link, ...]


class _Row(Struct, frozen=True):
    name: str
    cells: tuple[str, ...]
    affinity: tuple[str, ...]
    line: int
    text: str


def parse_topo_matrix(text: str) -> TopoMatrix:
    """The matrix in `text`. Columns after the known ones are ignored.

    Raises TopologyError naming the line: no header, unknown link class, a cell too few, a missing or repeated row, a
    diagonal that is not X, or two directions of one pair that differ.
    """
    lines = ANSI.sub("", text).splitlines()
    start = next((number for number, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        raise TopologyError(TOOL, 0, text, "there is no header line that names GPUs (GPU0 ...).")
    names = _names(lines[start], start + 1)
    rows: dict[str, _Row] = {}
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if "Legend:" in line:
            break
        if not line.strip():
            continue
        row = _row(line, number, names)
        if row.name in rows:
            raise TopologyError(
                TOOL, number, line, f"{row.name} has a second row, the first is line {rows[row.name].line}."
            )
        rows[row.name] = row
    for name in names:
        if name not in rows:
            raise TopologyError(TOOL, start + 1, lines[start], f"{name} is in the header but has no row.")
    legend = {match[1]: match[2] for line in lines if (match := _NIC_LEGEND.fullmatch(line.strip()))}
    return TopoMatrix(
        tuple(_affinity(rows[name]) for name in names if _GPU.fullmatch(name)),
        tuple((name, legend.get(name, name)) for name in names if not _GPU.fullmatch(name)),
        _links(names, rows),
    )


def _is_header(line: str) -> bool:
    words = line.split()
    return bool(words) and words[0] == "GPU0" and (len(words) == 1 or words[1] != "X")


def _names(header: str, number: int) -> list[str]:
    names = header.partition("CPU Affinity")[0].split()
    if len(names) != len(dict.fromkeys(names)):
        raise TopologyError(TOOL, number, header, "a name stands twice in the header.")
    return names


def _row(line: str, number: int, names: list[str]) -> _Row:
    words = line.split("\t") if "\t" in line else line.split()
    words = [word.strip() for word in words]
    if words and not words[0]:
        words = words[1:]
    if not words or words[0] not in names:
        raise TopologyError(TOOL, number, line, f"a row starts with one of the header's names ({', '.join(names)}).")
    cells = [word for word in words[1 : len(names) + 1] if word]
    if len(cells) < len(names):
        raise TopologyError(
            TOOL, number, line, f"{words[0]} has {len(cells)} cells, the header has {len(names)} names."
        )
    return _Row(words[0], tuple(cells), tuple(words[len(names) + 1 :]), number, line)


def _affinity(row: _Row) -> GpuAffinity:
    gpu = int(row.name.removeprefix("GPU"))
    cpus_text = row.affinity[0] if row.affinity else ""
    cpus = () if cpus_text in _NOT_TOLD else cpu_list(cpus_text)
    if cpus is None:
        raise TopologyError(
            TOOL, row.line, row.text, f"CPU affinity {cpus_text!r} is no list of CPUs such as 0-15,32-47."
        )
    nodes_text = row.affinity[1] if len(row.affinity) > 1 else ""
    nodes = () if nodes_text in _NOT_TOLD else cpu_list(nodes_text)
    if nodes is None:
        raise TopologyError(TOOL, row.line, row.text, f"NUMA affinity {nodes_text!r} is no NUMA node such as 0 or 0-1.")
    return GpuAffinity(gpu, cpu_ranges(cpus), nodes[0] if nodes else NUMA_UNKNOWN)


def _links(names: list[str], rows: dict[str, _Row]) -> tuple[Link, ...]:
    links: list[Link] = []
    for place, a in enumerate(names):
        if rows[a].cells[place] != "X":
            raise TopologyError(TOOL, rows[a].line, rows[a].text, f"{a} to itself is {rows[a].cells[place]!r}, not X.")
        for other, b in enumerate(names[place + 1 :], place + 1):
            there, back = _link(rows[a], a, b, other), _link(rows[b], a, b, place)
            if there != back:
                message = f"{b} to {a} is {back.label}, but line {rows[a].line} says {there.label}."
                raise TopologyError(TOOL, rows[b].line, rows[b].text, message)
            links.append(there)
    return tuple(links)


def _link(row: _Row, a: str, b: str, place: int) -> Link:
    cell = row.cells[place]
    nvlink = _NVLINK.fullmatch(cell)
    if nvlink is not None and int(nvlink[1]) > 0:
        return Link(a, b, "NV", int(nvlink[1]))
    kind = _KINDS.get(cell)
    if kind is None:
        allowed = ", ".join(("NV#", *LINK_KINDS[1:]))
        raise TopologyError(TOOL, row.line, row.text, f"{cell!r} is no link class. Allowed: {allowed}.")
    return Link(a, b, kind)
