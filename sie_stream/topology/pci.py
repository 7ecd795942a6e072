"""Reads `lspci -vv`: NUMA nodes, link speeds and widths, the tree of buses, and how far two devices are apart.

A device is a paragraph: its first line has the address (with the domain when there are several), the class and the
name; indented lines follow. Read by anybody but root, capabilities are `<access denied>` and the link is not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from sie_stream.topology.records import NUMA_UNKNOWN, LinkKind, PcieLink
from sie_stream.topology.text import TopologyError, pci_address

TOOL = "lspci -vv"
_HEADER = re.compile(r"(\S+) ([^:\[]+?)(?: \[[0-9a-f]{4}\])?: (.+?)(?: \(rev [0-9a-f]+\))?(?: \(prog-if .*\))?")
_NUMA = re.compile(r"NUMA node: (-?\d+)")
_BUS = re.compile(r"Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})\b.*")
_LINK = re.compile(
    r"Lnk(?:Cap|Sta):\s.*?Speed (?P<speed>[\d.]+GT/s|unknown)(?: \(\w+\))?, Width (?P<width>x\d+|unknown)\b.*"
)


class PciDevice(Struct, frozen=True):
    address: str
    """domain:bus:device.function, such as 0000:07:00.0."""
    kind: str
    """The class in words: PCI bridge, 3D controller."""
    description: str
    numa_node: int = NUMA_UNKNOWN
    pcie: PcieLink | None = None
    secondary_bus: int | None = None
    """Of a bridge: the bus that it leads to."""

    @property
    def bus(self) -> int:
        return int(self.address.split(":")[1], 16)

    @property
    def domain(self) -> str:
        return self.address.split(":")[0]


class _Paragraph(Struct):
    address: str
    kind: str
    description: str
    numa_node: int = NUMA_UNKNOWN
    capable: tuple[int, int] | None = None
    """(tenths of GT/s, lanes), from LnkCap."""
    running: tuple[int, int] | None = None
    secondary_bus: int | None = None

    def device(self) -> PciDevice:
        pcie = PcieLink(*self.running, *self.capable) if self.running and self.capable else None
        return PciDevice(self.address, self.kind, self.description, self.numa_node, pcie, self.secondary_bus)


def parse_lspci(text: str) -> tuple[PciDevice, ...]:
    """All devices, in the order of the output; lines that say nothing about topology are ignored.

    Raises TopologyError naming the line: a first line that is none, a repeated address, a malformed NUMA node, bus or
    link line.
    """
    found: list[_Paragraph] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not line[0].isspace():
            paragraph = _header(line, number)
            if any(paragraph.address == earlier.address for earlier in found):
                raise TopologyError(TOOL, number, line, f"{paragraph.address} stands twice.")
            found.append(paragraph)
        elif not found:
            raise TopologyError(TOOL, number, line, "an indented line stands before any device.")
        else:
            _detail(found[-1], line, number)
    return tuple(paragraph.device() for paragraph in found)


def _header(line: str, number: int) -> _Paragraph:
    match = _HEADER.fullmatch(line.rstrip())
    address = pci_address(match[1]) if match else None
    if match is None or address is None:
        raise TopologyError(TOOL, number, line, "expected `07:00.0 3D controller: NAME`, a device's first line.")
    return _Paragraph(address, match[2], match[3])


def _detail(paragraph: _Paragraph, line: str, number: int) -> None:
    stripped = line.strip()
    if stripped.startswith("NUMA node:"):
        match = _NUMA.fullmatch(stripped)
        if match is None:
            raise TopologyError(TOOL, number, line, "expected `NUMA node: 0`.")
        paragraph.numa_node = max(int(match[1]), NUMA_UNKNOWN)
    elif stripped.startswith("Bus: primary="):
        match = _BUS.fullmatch(stripped)
        if match is None:
            raise TopologyError(TOOL, number, line, "expected `Bus: primary=00, secondary=01, subordinate=05`.")
        paragraph.secondary_bus = _secondary(paragraph.address, int(match[2], 16), number, line)
    elif stripped.startswith(("LnkCap:", "LnkSta:")):
        match = _LINK.fullmatch(stripped)
        if match is None:
            raise TopologyError(TOOL, number, line, "expected `LnkCap: ... Speed 16GT/s, Width x16`.")
        link = _speed_and_width(match)
        if stripped.startswith("LnkCap:"):
            paragraph.capable = link
        else:
            paragraph.running = link


def _secondary(address: str, secondary: int, number: int, line: str) -> int | None:
    """None for a bridge that firmware left without a bus (00). Buses rise away from the root: paths to it end."""
    own = int(address.split(":")[1], 16)
    if secondary == 0:
        return None
    if secondary <= own:
        raise TopologyError(TOOL, number, line, f"a bridge on bus {own:02x} cannot lead to bus {secondary:02x}.")
    return secondary


def _speed_and_width(match: re.Match[str]) -> tuple[int, int] | None:
    if "unknown" in (match["speed"], match["width"]):
        return None
    whole, _, tenth = match["speed"].removesuffix("GT/s").partition(".")
    return int(whole) * 10 + int(tenth[:1] or "0"), int(match["width"][1:])


def bridges_above(devices: Sequence[PciDevice], address: str) -> tuple[PciDevice, ...]:
    """The bridges between the host and the device, the root port first. Raises KeyError for an unknown address."""
    by_address = {device.address: device for device in devices}
    leads_to = {(d.domain, d.secondary_bus): d for d in devices if d.secondary_bus is not None}
    return _bridges_above(by_address[address], leads_to)


def _bridges_above(device: PciDevice, leads_to: Mapping[tuple[str, int], PciDevice]) -> tuple[PciDevice, ...]:
    above: list[PciDevice] = []
    current = device
    while (bridge := leads_to.get((current.domain, current.bus))) is not None:
        above.append(bridge)
        current = bridge
    return tuple(reversed(above))


def pci_distance(devices: Sequence[PciDevice], a: str, b: str) -> LinkKind:
    """How the PCIe way between two addresses is called by nvidia-smi's legend; never NV, which PCI does not show.

    PIX: they share a switch, and nothing but its own ports is on the way. PXB: they share a bridge further up. PHB:
    only the root bus is shared. NODE: other host bridges of one NUMA node. SYS: anything further, or not known.
    """
    by_address = {device.address: device for device in devices}
    leads_to = {(d.domain, d.secondary_bus): d for d in devices if d.secondary_bus is not None}
    one, two = by_address[a], by_address[b]
    above_one, above_two = _bridges_above(one, leads_to), _bridges_above(two, leads_to)
    shared = 0
    while shared < min(len(above_one), len(above_two)) and above_one[shared] == above_two[shared]:
        shared += 1
    if shared:
        ports = max(len(above_one), len(above_two)) - shared
        return "PIX" if ports <= 1 else "PXB"
    root_one = (one.domain, (above_one[0] if above_one else one).bus)
    root_two = (two.domain, (above_two[0] if above_two else two).bus)
    if root_one == root_two:
        return "PHB"
    return "NODE" if one.numa_node == two.numa_node != NUMA_UNKNOWN else "SYS"
