"""Reads `nvidia-smi --query-gpu=... --format=csv` and `nvidia-smi -L` (which lists MIG instances).

The CSV has a header with the field names and units (`memory.total [MiB]`); values repeat the unit unless `nounits` was
asked for; what a GPU does not know is [N/A], N/A, [Not Supported] or [Unknown Error].
"""

from __future__ import annotations

import re

from msgspec import Struct

from sie_stream.errors import did_you_mean
from sie_stream.topology.records import MigInstance, PcieLink
from sie_stream.topology.text import TopologyError, pci_address

TOOL = "nvidia-smi --query-gpu"
LIST_TOOL = "nvidia-smi -L"
MIB = 1024 * 1024
GIB = 1024 * MIB

REQUIRED = ("index", "uuid", "name", "memory.total", "pci.bus_id")
QUERY_FIELDS = (
    *REQUIRED,
    "mig.mode.current",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
"""What to ask for: `nvidia-smi --query-gpu=index,uuid,... --format=csv`."""

GT_TENTHS = {1: 25, 2: 50, 3: 80, 4: 160, 5: 320, 6: 640}
"""PCIe generation -> tenths of GT/s per lane."""
_NOT_TOLD = re.compile(r"\[?(N/A|Not Supported|Unknown Error|Not Active|GPU requires reset)\]?")
_SIZE = re.compile(r"(\d+)(?: (MiB|GiB|B))?")
_UNITS = {None: MIB, "MiB": MIB, "GiB": GIB, "B": 1}
_GPU_LINE = re.compile(r"GPU (\d+): (.+) \(UUID: ([^)\s]+)\)")
_MIG_LINE = re.compile(r"MIG (\S+)\s+Device\s+(\d+): \(UUID: ([^)\s]+)\)")
_PROFILE = re.compile(r"(?:\d+c\.)?\d+g\.(\d+)gb(?:[+.].*)?")

MIG_MEMORY_PERCENT = 95
"""Of the gigabytes in a profile's name, so much is there at least (1g.5gb has 4.75 GiB, 3g.40gb has 39.25): NVIDIA's
table of profiles, smallest case. NVML tells the exact size; the listing does not."""


class GpuRow(Struct, frozen=True):
    index: int
    uuid: str
    product: str
    memory_bytes: int
    pci_bus_id: str
    mig_enabled: bool
    pcie: PcieLink | None


def parse_gpu_query(text: str) -> tuple[GpuRow, ...]:
    """The GPUs of the CSV, by index. Fields that were asked for besides QUERY_FIELDS are ignored.

    Raises TopologyError naming the line: no header, a required field missing, a value of the wrong form.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise TopologyError(TOOL, 0, text, "the output is empty.")
    number, header = lines[0]
    fields = [field.split(" [")[0].strip() for field in header.split(",")]
    for field in REQUIRED:
        if field not in fields:
            message = f"the header lacks {field}.{did_you_mean(field, fields)} Ask for {','.join(QUERY_FIELDS)}."
            raise TopologyError(TOOL, number, header, message)
    rows: list[GpuRow] = []
    for number, line in lines[1:]:
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(fields):
            raise TopologyError(TOOL, number, line, f"{len(values)} values, the header has {len(fields)} fields.")
        row = _row(dict(zip(fields, values, strict=True)), number, line)
        if any(row.index == earlier.index for earlier in rows):
            raise TopologyError(TOOL, number, line, f"GPU {row.index} stands twice.")
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: row.index))


def _row(values: dict[str, str], number: int, line: str) -> GpuRow:
    def wrong(field: str, wanted: str) -> TopologyError:
        return TopologyError(TOOL, number, line, f"{field} is {values[field]!r}, {wanted} is expected.")

    if not values["index"].isdecimal():
        raise wrong("index", "a number from 0")
    size = _SIZE.fullmatch(values["memory.total"])
    if size is None:
        raise wrong("memory.total", "a size such as 40960 MiB")
    address = pci_address(values["pci.bus_id"])
    if address is None:
        raise wrong("pci.bus_id", "an address such as 00000000:07:00.0")
    if not values["uuid"] or not values["name"]:
        raise wrong("uuid" if not values["uuid"] else "name", "a name")
    memory_bytes = int(size[1]) * _UNITS[size[2]]
    mig_enabled = values.get("mig.mode.current") == "Enabled"
    return GpuRow(
        int(values["index"]),
        values["uuid"],
        values["name"],
        memory_bytes,
        address,
        mig_enabled,
        _pcie(values, number, line),
    )


def _pcie(values: dict[str, str], number: int, line: str) -> PcieLink | None:
    """The link, when all four fields were asked for and are known."""
    found: list[int] = []
    for field in QUERY_FIELDS[-4:]:
        value = values.get(field, "N/A")
        if _NOT_TOLD.fullmatch(value):
            return None
        if not value.isdecimal() or (".gen." in field and int(value) not in GT_TENTHS):
            raise TopologyError(TOOL, number, line, f"{field} is {value!r}, a PCIe generation or width is expected.")
        found.append(int(value))
    generation, generation_max, width, width_max = found
    return PcieLink(GT_TENTHS[generation], width, GT_TENTHS[generation_max], width_max)


def parse_gpu_list(text: str) -> tuple[MigInstance, ...]:
    """The MIG instances that `nvidia-smi -L` lists below their GPUs, in that order; other lines are ignored.

    `memory_bytes` is MIG_MEMORY_PERCENT of what the profile's name says. Raises TopologyError for a malformed line.
    """
    gpu: int | None = None
    found: list[MigInstance] = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("GPU "):
            match = _GPU_LINE.fullmatch(stripped)
            if match is None:
                raise TopologyError(LIST_TOOL, number, line, "expected `GPU 0: PRODUCT (UUID: GPU-...)`.")
            gpu = int(match[1])
        elif stripped.startswith("MIG "):
            match = _MIG_LINE.fullmatch(stripped)
            if match is None:
                raise TopologyError(LIST_TOOL, number, line, "expected `MIG 3g.20gb Device 0: (UUID: MIG-...)`.")
            if gpu is None:
                raise TopologyError(LIST_TOOL, number, line, "a MIG instance stands before any GPU.")
            size = mig_memory_bytes(match[1])
            if size is None:
                raise TopologyError(LIST_TOOL, number, line, f"profile {match[1]!r} is not of the form 3g.20gb.")
            found.append(MigInstance(gpu, int(match[2]), match[3], match[1], size))
    return tuple(found)


def mig_memory_bytes(profile: str) -> int | None:
    """Memory of a profile such as 3g.20gb or 1g.10gb+me, at the least; None when the name has another form."""
    match = _PROFILE.fullmatch(profile)
    return None if match is None else int(match[1]) * GIB * MIG_MEMORY_PERCENT // 100
