"""Watches the GPUs that this worker offers: how they are, which are gone, and what the driver says about it.

NVML may take long to answer about a GPU in trouble, so a thread of its own asks. A GPU counts as lost while NVML says
so (lost, reset required) and, for the life of the process, after an XID that its contents do not survive. XIDs that an
application causes (a bad kernel, an illegal address) are no fault of the device. XIDs: NVIDIA, "XID Errors".
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import structlog

from gpu_worker.edge.nvml import NvmlUnavailable, nvml_session, sample_gpu
from gpu_worker.facts import DeviceFailed, DeviceMended
from sie_stream.control import Device
from sie_stream.telemetry import GpuSample

KIND = "cuda"
WAIT_MS = 1_000
FATAL_XIDS: dict[int, str] = {
    48: "double bit ECC error",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    119: "the GSP does not answer",
    140: "unrecovered ECC error",
}


class GpuHealth:
    """`changes()` is for the loop; `start()` begins to look. Without a CUDA device it does nothing."""

    def __init__(
        self,
        devices: Sequence[Device],
        log: structlog.stdlib.BoundLogger,
        load: Callable[[], Any] = lambda: import_module("pynvml"),
    ) -> None:
        self._names = {int(d.device.partition(":")[2] or 0): d.device for d in devices if d.kind == KIND}
        self._log = log
        self._load = load
        self._events: deque[DeviceFailed | DeviceMended] = deque()
        self._lost: dict[int, str] = {}
        self._for_good: dict[int, str] = {}
        self._samples: dict[str, GpuSample] = {}
        """Replaced as a whole: the loop reads it from another thread."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._names:
            self._thread = threading.Thread(target=self._watch, name="gpu-health", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * WAIT_MS / 1000)

    def changes(self) -> list[DeviceFailed | DeviceMended]:
        """What happened since the last call."""
        found: list[DeviceFailed | DeviceMended] = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def samples(self) -> dict[str, GpuSample]:
        """How each GPU that answers was when it was last looked at, about a second ago; by device."""
        return self._samples

    def _watch(self) -> None:
        try:
            with nvml_session(self._load) as nvml:
                events = self._register(nvml)
                while not self._stop.is_set():
                    self.look(nvml, events)
        except NvmlUnavailable as reason:
            self._log.warning("gpu_health_unwatched", reason=str(reason))

    def _register(self, nvml: Any) -> Any:
        """The set of XID events; None where the driver has none."""
        try:
            events = nvml.nvmlEventSetCreate()
            for index in self._names:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            self._log.warning("xids_unwatched", reason=str(error))
            return None
        return events

    def look(self, nvml: Any, events: Any) -> None:
        """One round: wait a little for an XID, then ask every GPU whether it is there."""
        if events is None:
            self._stop.wait(WAIT_MS / 1000)
        else:
            self._take_xid(nvml, events)
        now = {index: cause for index in self._names if (cause := self._cause(nvml, index))}
        self._samples = {
            self._names[index]: sample
            for index in self._names
            if index not in now and (sample := self._sample(nvml, index)) is not None
        }
        for index, cause in now.items():
            if index not in self._lost:
                self._events.append(DeviceFailed(self._names[index], cause))
        for index in self._lost:
            if index not in now:
                self._events.append(DeviceMended(self._names[index]))
        self._lost = now

    def _take_xid(self, nvml: Any, events: Any) -> None:
        try:
            event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            xid, index = int(event.eventData), int(nvml.nvmlDeviceGetIndex(event.device))
        except nvml.NVMLError_Timeout:
            return  # nothing came
        except nvml.NVMLError:
            self._stop.wait(WAIT_MS / 1000)  # the GPU may be gone, which asking it will tell; this answers at once
            return
        if xid in FATAL_XIDS and index in self._names:
            self._for_good[index] = f"XID {xid}: {FATAL_XIDS[xid]}"
        else:
            self._log.info("xid", xid=xid, gpu=index)

    def _sample(self, nvml: Any, index: int) -> GpuSample | None:
        try:
            return sample_gpu(nvml, index)
        except nvml.NVMLError as error:
            self._log.info("gpu_not_sampled", gpu=index, reason=str(error))
            return None

    def _cause(self, nvml: Any, index: int) -> str:
        """Why the GPU is out of order; empty: it answers."""
        if index in self._for_good:
            return self._for_good[index]
        try:
            nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
            return f"NVML: {error}"
        except nvml.NVMLError as error:
            self._log.warning("gpu_unasked", gpu=index, reason=str(error))
        return ""
