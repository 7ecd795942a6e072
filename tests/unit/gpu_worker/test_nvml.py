"""How NVML is asked. A stand-in answers as the pynvml module does; no driver is needed.

What the answers mean is tested in tests/unit/topology; here: which calls, which of their failures are answers, and that
NVML is always shut down.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.edge.nvml import NvmlUnavailable, read_gpus
from sie_stream.topology.assemble import NvmlMig, NvmlNvLink, from_nvml
from sie_stream.topology.records import NUMA_UNKNOWN

GIB = 1024 * 1024 * 1024


class Failure(Exception):
    pass


class NotSupported(Failure):
    pass


class InvalidArgument(Failure):
    pass


class NotFound(Failure):
    pass


class FunctionNotFound(Failure):
    pass


def refuse(error: type[Failure]) -> Callable[..., Any]:
    def call(*_: object) -> Any:
        raise error

    return call


class Library:
    """Two GPUs, a pair of NVLinks between them; handles are their numbers. The first is cut into one MIG instance."""

    NVMLError = Failure
    NVMLError_NotSupported = NotSupported
    NVMLError_InvalidArgument = InvalidArgument
    NVMLError_NotFound = NotFound
    NVMLError_FunctionNotFound = FunctionNotFound
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_NVLINK_MAX_LINKS = 18
    NVML_AFFINITY_SCOPE_NODE = 0

    def __init__(self) -> None:
        self.sessions: list[str] = []

    def nvmlInit(self) -> None:
        self.sessions.append("init")

    def nvmlShutdown(self) -> None:
        self.sessions.append("shutdown")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}" if handle < 10 else f"MIG-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA A100" if handle < 10 else b"NVIDIA A100 MIG 3g.20gb"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=40 * GIB if handle < 10 else 19 * GIB)

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000000{handle}:07:00.0".encode())

    def nvmlDeviceGetMemoryAffinity(self, handle: int, words: int, scope: int) -> list[int]:
        mask = [0] * words
        mask[handle] = 0b1000
        return mask

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle == 1:
            raise NotSupported
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> int:
        if index != 2:
            raise NotFound
        return 12

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 3:
            raise InvalidArgument
        return 1 if link < 2 else 0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0 if link == 0 else 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000000{1 - handle}:07:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, two: int) -> int:
        return 30


def test_what_is_asked_becomes_records() -> None:
    library = Library()
    first, second = read_gpus(lambda: library)
    assert (first.uuid, first.name, first.memory_bytes, first.pci_bus_id) == (
        "GPU-0", "NVIDIA A100", 40 * GIB, "00000000:07:00.0"
    )  # fmt: skip
    assert (first.numa_node, second.numa_node) == (3, 67), "bit 3 of word 0, bit 3 of word 1"
    assert (first.pcie_generation, first.pcie_generation_max, first.pcie_width, first.pcie_width_max) == (1, 4, 8, 16)
    assert first.mig == (NvmlMig(2, "MIG-12", "NVIDIA A100 MIG 3g.20gb", 19 * GIB),)
    assert (second.mig_enabled, second.mig) == (False, ())
    assert second.nvlinks == (NvmlNvLink(0, "00000000:07:00.0", "gpu"), NvmlNvLink(1, "", "switch"))
    assert second.ancestors == ((0, 30),)
    assert library.sessions == ["init", "shutdown"]
    assert from_nvml((first, second)).links[0].label == "NV1"


def test_what_a_gpu_does_not_support_is_empty() -> None:
    library = Library()
    for name in dir(library):
        if name.startswith(("nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetCurr", "nvmlDeviceGetNvLinkState")):
            setattr(library, name, refuse(NotSupported))
    library.nvmlDeviceGetTopologyCommonAncestor = refuse(FunctionNotFound)
    first = read_gpus(lambda: library)[0]
    assert (first.numa_node, first.pcie_generation, first.nvlinks, first.ancestors) == (NUMA_UNKNOWN, 0, (), ())
    assert from_nvml((first,)).gpus[0].pcie is None


def test_a_gpu_that_fails_is_no_answer_and_nvml_is_shut_down() -> None:
    library = Library()
    library.nvmlDeviceGetMemoryInfo = refuse(Failure)
    with pytest.raises(Failure):
        read_gpus(lambda: library)
    assert library.sessions == ["init", "shutdown"]


def test_no_driver_and_no_package_are_told_apart() -> None:
    library = Library()
    library.nvmlInit = refuse(Failure)
    with pytest.raises(NvmlUnavailable, match="NVML does not start"):
        read_gpus(lambda: library)
    assert library.sessions == [], "what did not start is not shut down"

    def no_package() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'")

    with pytest.raises(NvmlUnavailable, match="only a machine with NVIDIA GPUs needs nvidia-ml-py"):
        read_gpus(no_package)
