"""What a worker notices about its GPUs. A stand-in answers as the pynvml module does; no driver is needed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import structlog

from gpu_worker.edge.gpu_health import GpuHealth
from gpu_worker.facts import DeviceFailed, DeviceMended
from sie_stream.control import Device
from sie_stream.telemetry import GpuSample

GPUS = (Device("cpu:0", "cpu", 1 << 30), Device("cuda:0", "cuda", 1 << 30), Device("cuda:1", "cuda", 1 << 30))


class Failure(Exception):
    pass


class GpuIsLost(Failure):
    pass


class ResetRequired(Failure):
    pass


class Timeout(Failure):
    pass


class NotSupported(Failure):
    pass


class FunctionNotFound(Failure):
    pass


class Library:
    NVMLError = Failure
    NVMLError_GpuIsLost = GpuIsLost
    NVMLError_ResetRequired = ResetRequired
    NVMLError_Timeout = Timeout
    NVMLError_NotSupported = NotSupported
    NVMLError_FunctionNotFound = FunctionNotFound
    NVML_SUCCESS = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def __init__(self) -> None:
        self.broken: dict[int, Failure] = {}
        self.xids: list[tuple[int, int]] = []

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle in self.broken:
            raise self.broken[handle]
        return SimpleNamespace(total=8, used=3)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=40 + handle)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise NotSupported

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 1_000 + clock

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return 2

    def nvmlDeviceGetFieldValues(self, handle: int, fields: Sequence[int]) -> list[SimpleNamespace]:
        sent = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=77))
        return [sent, SimpleNamespace(nvmlReturn=3, value=None)]

    def nvmlEventSetWait_v2(self, events: Any, wait_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise Timeout
        index, xid = self.xids.pop(0)
        return SimpleNamespace(eventData=xid, device=index)


def watched() -> tuple[GpuHealth, Library]:
    return GpuHealth(GPUS, structlog.get_logger()), Library()


def test_a_lost_gpu_is_said_once_and_again_when_it_is_back() -> None:
    health, library = watched()
    health.look(library, object())
    assert health.changes() == []
    library.broken[1] = GpuIsLost("GPU is lost")
    health.look(library, object())
    health.look(library, object())
    assert health.changes() == [DeviceFailed("cuda:1", "NVML: GPU is lost")]
    del library.broken[1]
    health.look(library, object())
    assert health.changes() == [DeviceMended("cuda:1")]
    assert health.changes() == []


def test_an_xid_of_the_hardware_is_for_good_and_one_of_an_application_is_not_a_fault() -> None:
    health, library = watched()
    library.xids = [(0, 13), (0, 79)]
    health.look(library, object())
    assert health.changes() == []
    for _ in range(3):
        health.look(library, object())
    assert health.changes() == [DeviceFailed("cuda:0", "XID 79: the GPU has fallen off the bus")]


def test_a_gpu_that_cannot_be_asked_for_another_reason_is_not_lost() -> None:
    health, library = watched()
    library.broken[0] = Failure("busy")
    health.look(library, object())
    assert health.changes() == []


def test_a_worker_without_gpus_starts_no_thread() -> None:
    health = GpuHealth(GPUS[:1], structlog.get_logger(), load=lambda: 1 / 0)
    health.start()
    health.close()
    assert health.changes() == []


def test_every_gpu_that_answers_is_sampled_and_what_it_does_not_tell_is_none() -> None:
    health, library = watched()
    library.broken[0] = GpuIsLost("GPU is lost")
    health.look(library, object())
    assert health.samples() == {"cuda:1": GpuSample(41, 3, 8, 61, None, 1_001, 1_002, 2, 77, None)}
    library.nvmlDeviceGetUtilizationRates = refuse
    del library.broken[0]
    health.look(library, object())
    assert health.samples() == {}, "an error of NVML's own is no answer, and nothing is made up"
    assert health.changes()[-1] == DeviceMended("cuda:0"), "the health of the GPUs is told all the same"


def refuse(handle: int) -> SimpleNamespace:
    raise Failure("unknown error")
