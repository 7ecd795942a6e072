"""Devices that are the same for placement: their memory, what they compute, and how many stand together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from msgspec import Struct, structs

from sie_stream.spec.model import Precision
from sie_stream.topology.groups import islands
from sie_stream.topology.records import GpuTopology
from sie_stream.topology.text import GIB, size_text

DeviceKind = Literal["cuda", "mig", "cpu"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
CPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "int8", "int4")
"""What the torch and ONNX backends compute on a CPU (int4 as weights only)."""
BASE_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "int4")
"""What every CUDA device since Volta computes (int4 as weights only)."""

# bf16 came with Ampere, fp8 with Ada and Hopper (NVIDIA's data sheets). Letters may follow: A10G, L40S.
_BF16 = re.compile(r"\b((A100|A800|A40|A30|A16|A10|A2)[A-Z]{0,2}|RTX A\d+|RTX 30\d\d)\b")
_FP8 = re.compile(
    r"\b((H100|H200|H800|H20|GH200|B100|B200|B300|GB200|GB300|GB10|L40|L20|L4|L2)[A-Z]{0,3}"
    r"|RTX [45]0\d\d|Ada|Blackwell)\b"
)


class DeviceClass(Struct, frozen=True):
    """`name` is the product, with the size where a product comes in several sizes."""

    name: str
    kind: DeviceKind
    memory_bytes: int
    precisions: tuple[Precision, ...]
    group_max: int = 1
    """Most devices of this class on one server: the largest tensor-parallel size."""
    island_max: int = 1
    """Most of them in one NVLink island."""


def precisions_of(kind: DeviceKind, product: str) -> tuple[Precision, ...]:
    """What a product computes, by its name. An unknown CUDA product is taken to know neither bf16 nor fp8."""
    if kind == "cpu":
        return CPU_PRECISIONS
    if _FP8.search(product):
        return PRECISIONS
    if _BF16.search(product):
        return tuple(precision for precision in PRECISIONS if precision != "fp8")
    return BASE_PRECISIONS


def classes_of(servers: Sequence[GpuTopology]) -> tuple[DeviceClass, ...]:
    """The classes among the servers' devices, by kind, product and size. Recompute it when hardware joins.

    GPUs of one product and size are one class, MIG instances of one profile another. cpu devices are one class per size
    in whole GiB (no two NUMA nodes have the same number of bytes); those of unknown size are left out. A GPU in MIG
    mode is no device itself, its instances are.
    """
    found: dict[tuple[DeviceKind, str, int], tuple[int, int]] = {}
    for server in servers:
        for kind, product, size, group, island in _devices(server):
            most = found.get((kind, product, size), (0, 0))
            found[kind, product, size] = (max(most[0], group), max(most[1], island))
    classes = [
        DeviceClass(product, kind, size, precisions_of(kind, product), *found[kind, product, size])
        for kind, product, size in sorted(found)
    ]
    names = [device_class.name for device_class in classes]
    return tuple(
        structs.replace(found, name=f"{found.name} ({size_text(found.memory_bytes)})")
        if names.count(found.name) > 1
        else found
        for found in classes
    )


def _devices(server: GpuTopology) -> list[tuple[DeviceKind, str, int, int, int]]:
    """(kind, product, bytes, devices like it on the server, devices like it in its island) for every device."""
    whole = [gpu for gpu in server.gpus if not gpu.mig_enabled]
    alike = {
        gpu.index: [g.index for g in whole if (g.product, g.memory_bytes) == (gpu.product, gpu.memory_bytes)]
        for gpu in whole
    }
    island_of = {index: members for members in islands(server) for index in members}
    found: list[tuple[DeviceKind, str, int, int, int]] = []
    for gpu in whole:
        together = sum(index in alike[gpu.index] for index in island_of[gpu.index])
        found.append(("cuda", gpu.product, gpu.memory_bytes, len(alike[gpu.index]), together))
    for gpu in server.gpus:
        found.extend(("mig", f"{gpu.product} MIG {m.profile}", m.memory_bytes, 1, 1) for m in gpu.mig)
    found.extend(("cpu", "cpu", _whole_gib(cpu.memory_bytes), 1, 1) for cpu in server.cpus if cpu.memory_bytes)
    return found


def _whole_gib(memory_bytes: int) -> int:
    """Rounded down; below one GiB as it is."""
    return memory_bytes // GIB * GIB or memory_bytes
