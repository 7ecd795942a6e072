"""Sends the samples of a worker to sie.telemetry, about once a second. Watches the loop from the side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import psutil

from gpu_worker.facts import TimePassed, WorkerCommand, WorkerEvent
from gpu_worker.telemetry import ProcessSample, Telemetry
from schemas.codec import encode_row
from sie_stream.errors import RecordTooLarge, Retriable
from sie_stream.ports import PlainWriter
from sie_stream.records import LogWrite
from sie_stream.telemetry import DeviceMemorySample, GpuSample


class TelemetryObserver:
    """Implements loop.Observer. Samples may be lost: nothing waits for them and nothing decides by them."""

    def __init__(
        self,
        telemetry: Telemetry,
        writer: PlainWriter,
        topic: str,
        gpus: Callable[[], Mapping[str, GpuSample]],
        memories: Callable[[], Mapping[str, DeviceMemorySample]] = dict,
    ) -> None:
        self._telemetry = telemetry
        self._writer = writer
        self._topic = topic
        self._gpus = gpus
        self._memories = memories
        self.lost = 0

    def saw(self, events: Sequence[WorkerEvent], commands: Sequence[WorkerCommand]) -> None:
        self._telemetry.saw(events, commands)
        if events and isinstance(now := events[0], TimePassed) and self._telemetry.due(now.at_ms):
            self._send(now)

    def _send(self, now: TimePassed) -> None:
        seen = processes(self._telemetry.pids), self._gpus(), self._memories()
        samples = self._telemetry.take(now.at_ms, now.now_ms, *seen)
        writes = [LogWrite(self._topic, encode_row(one), f"{one.worker}:{one.device}".encode(), 0) for one in samples]
        try:
            self._writer.write(writes)
        except (Retriable, RecordTooLarge):
            self.lost += len(writes)


def processes(pids: Sequence[int]) -> dict[int, ProcessSample]:
    """How those that still live are."""
    found: dict[int, ProcessSample] = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
            found[pid] = ProcessSample(process.memory_info().rss, round(1_000 * (times.user + times.system)))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
