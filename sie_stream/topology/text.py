"""What the parsers of tool output share: one error, PCI addresses, lists of CPUs; and sizes in words."""

from __future__ import annotations

import re

from sie_stream.errors import SieError

ANSI = re.compile(r"\x1b\[[0-9;]*m")
"""nvidia-smi underlines the header of its matrix, also into a pipe."""
_PCI = re.compile(r"(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<rest>[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
LINE_CHARS_MAX = 120
GIB = 1024 * 1024 * 1024
CPUS_MAX = 65_536
"""Above what any kernel supports: a larger number is a misread line."""


class TopologyError(SieError):
    """The output of a tool is not what that tool prints. Names the tool, the line (from 1; 0: all) and its text."""

    code = "invalid_topology"

    def __init__(self, tool: str, line: int, text: str, message: str) -> None:
        shown = text if len(text) <= LINE_CHARS_MAX else text[: LINE_CHARS_MAX - 3] + "..."
        place = f"{tool}, line {line}" if line else tool
        super().__init__(f"{place}: {message}" + (f" The line is {shown!r}." if line else ""))
        self.tool = tool
        self.line = line
        self.text = text
        self.message = message


def pci_address(text: str) -> str | None:
    """`0000:07:00.0` for any spelling of a PCI address (NVML writes eight digits of domain, lspci none); else None."""
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return None
    domain = int(match["domain"] or "0", 16)
    return f"{domain:04x}:{match['rest'].lower()}"


def cpu_list(text: str) -> tuple[int, ...] | None:
    """The CPUs of `0-3,8,10-11` or of `0 1 2 3`, rising and without repeats; None when it is neither."""
    found: set[int] = set()
    for part in text.replace(",", " ").split():
        match = _RANGE.fullmatch(part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= CPUS_MAX:
            return None
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def cpu_ranges(cpus: tuple[int, ...]) -> str:
    """The kernel's notation of rising CPU numbers: (0, 1, 2, 8) is `0-2,8`."""
    parts: list[str] = []
    start = 0
    for place, cpu in enumerate(cpus):
        if place + 1 == len(cpus) or cpus[place + 1] != cpu + 1:
            parts.append(str(cpu) if place == start else f"{cpus[start]}-{cpu}")
            start = place + 1
    return ",".join(parts)


def size_text(memory_bytes: int) -> str:
    """`39.5 GiB`, or `512 MiB` below one GiB; one decimal, rounded down, by whole numbers."""
    if memory_bytes < GIB:
        return f"{memory_bytes // (1024 * 1024)} MiB"
    tenths = memory_bytes * 10 // GIB
    return f"{tenths // 10}.{tenths % 10} GiB"
