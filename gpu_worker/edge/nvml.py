"""Asks NVML about the GPUs of this machine. Answers records; what they mean is decided in sie_stream/topology.

pynvml (package nvidia-ml-py) is imported on the first call, by name: a worker without GPUs needs neither the package
nor the driver. Older releases of it answer bytes where newer ones answer text; both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from sie_stream.errors import SieError
from sie_stream.telemetry import GpuSample
from sie_stream.topology.assemble import NvmlGpu, NvmlMig, NvmlNvLink
from sie_stream.topology.records import NUMA_UNKNOWN

NODE_WORDS = 4
"""64-bit words of the NUMA mask that is asked for: 256 nodes."""

AnswerT = TypeVar("AnswerT")


class NvmlUnavailable(SieError):
    """There is no NVML here: the package, the library or the driver is missing. Says which."""

    code = "nvml_unavailable"


def read_gpus(load: Callable[[], Any] = lambda: import_module("pynvml")) -> tuple[NvmlGpu, ...]:
    """Every GPU that NVML sees, by index. `load` gives the pynvml module.

    Raises NvmlUnavailable when NVML cannot be used at all; NVML's own errors for a GPU that fails while it is asked
    (lost, reset required). What a GPU merely does not support is left empty.
    """
    with nvml_session(load) as nvml:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(_gpu(nvml, index, handles) for index in range(len(handles)))


@contextmanager
def nvml_session(load: Callable[[], Any]) -> Iterator[Any]:
    """pynvml with NVML started. Raises NvmlUnavailable when it cannot be used."""
    try:
        nvml = load()
    except ImportError as error:
        raise NvmlUnavailable(
            f"pynvml cannot be imported ({error}); only a machine with NVIDIA GPUs needs nvidia-ml-py"
        ) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML does not start: {error}") from error
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, handles: list[Any]) -> NvmlGpu:
    handle = handles[index]
    mig_mode = _supported(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0)
    mig_enabled = mig_mode == nvml.NVML_DEVICE_MIG_ENABLE
    return NvmlGpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        pci_bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        numa_node=_numa_node(nvml, handle),
        pcie_generation=_supported(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle), 0),
        pcie_generation_max=_supported(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), 0),
        pcie_width=_supported(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle), 0),
        pcie_width_max=_supported(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle), 0),
        mig_enabled=mig_enabled,
        mig=_mig(nvml, handle) if mig_enabled else (),
        nvlinks=_nvlinks(nvml, handle),
        ancestors=_ancestors(nvml, index, handles),
    )


def sample_gpu(nvml: Any, index: int) -> GpuSample:
    """How the GPU is now. What it does not tell is None. Raises NVML's own errors for a GPU in trouble."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    tx_kib, rx_kib = _nvlink_traffic(nvml, handle)
    return GpuSample(
        utilisation_pct=_supported(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu), None),
        memory_used_bytes=int(memory.used),
        memory_total_bytes=int(memory.total),
        temperature_c=_supported(
            nvml, lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)), None
        ),
        power_mw=_supported(nvml, lambda: int(nvml.nvmlDeviceGetPowerUsage(handle)), None),
        sm_clock_mhz=_supported(nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), None),
        memory_clock_mhz=_supported(nvml, lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)), None),
        ecc_uncorrected=_supported(
            nvml, lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)), None
        ),
        nvlink_tx_kib=tx_kib,
        nvlink_rx_kib=rx_kib,
    )


def _nvlink_traffic(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """KiB sent and received over all links since the counters began; None where the GPU does not count."""
    fields = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    answers = _supported(nvml, lambda: nvml.nvmlDeviceGetFieldValues(handle, fields), ())
    counted = [int(one.value.ullVal) if one.nvmlReturn == nvml.NVML_SUCCESS else None for one in answers]
    return (counted[0], counted[1]) if len(counted) == 2 else (None, None)


def _numa_node(nvml: Any, handle: Any) -> int:
    """The lowest node of the mask of memory that is near the GPU."""
    words = _supported(
        nvml, lambda: nvml.nvmlDeviceGetMemoryAffinity(handle, NODE_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE), ()
    )
    for place, word in enumerate(words):
        if word:
            return place * 64 + (word & -word).bit_length() - 1
    return NUMA_UNKNOWN


def _mig(nvml: Any, handle: Any) -> tuple[NvmlMig, ...]:
    """The instances that exist. Slots that hold none answer NotFound."""
    found: list[NvmlMig] = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError_NotFound:
            continue
        found.append(
            NvmlMig(
                index,
                _text(nvml.nvmlDeviceGetUUID(instance)),
                _text(nvml.nvmlDeviceGetName(instance)),
                int(nvml.nvmlDeviceGetMemoryInfo(instance).total),
            )
        )
    return tuple(found)


def _nvlinks(nvml: Any, handle: Any) -> tuple[NvmlNvLink, ...]:
    """The active links. A link number that the GPU does not have answers InvalidArgument or NotSupported."""
    kinds = {nvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu", nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch"}
    found: list[NvmlNvLink] = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = kinds.get(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link), "unknown")
            remote = _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId) if kind == "gpu" else ""
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
            continue
        found.append(NvmlNvLink(link, remote, kind))
    return tuple(found)


def _ancestors(nvml: Any, index: int, handles: list[Any]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for other in range(len(handles)):
        if other == index:
            continue
        level = _supported(
            nvml, lambda o=other: nvml.nvmlDeviceGetTopologyCommonAncestor(handles[index], handles[o]), -1
        )
        if level >= 0:
            found.append((other, level))
    return tuple(found)


def _supported(nvml: Any, ask: Callable[[], AnswerT], otherwise: AnswerT) -> AnswerT:
    """The answer, or `otherwise` when this GPU, driver or library does not know the question."""
    try:
        return ask()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
