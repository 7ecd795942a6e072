"""Follows the results topic while the demo runs and keeps the numbers its screen shows."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict

from schemas.codec import decode_result
from sie_stream.client.requests import InferenceResult, from_record
from sie_stream.errors import Retriable, SieError
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader

POLL_MS = 100


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Tally:
    """Counts terminal records on a thread of its own. Times are end to end, request to result timestamp, in ms."""

    def __init__(self, reader: LogReader, topic: str, service_types: dict[str, str]) -> None:
        self.statuses: Counter[str] = Counter()
        self.latencies_ms: dict[str, list[float]] = defaultdict(list)
        self.samples: dict[str, InferenceResult] = {}
        self.served_by: dict[str, str] = {}
        """Model -> the worker incarnation that gave its latest answer."""
        self.orphans: dict[str, str] = {}
        """Models whose worker incarnation was killed and that nobody has answered for since."""
        self.adopted_at: list[float] = []
        """When (time.monotonic) each of them was answered for again."""
        self._service_types = service_types
        self._reader = reader
        self._stopping = threading.Event()
        self.error: SieError | None = None
        partitions = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
        reader.assign(reader.end_offsets(partitions))
        self._thread = threading.Thread(target=self._run, name="demo-tally", daemon=True)
        self._thread.start()

    @property
    def terminal(self) -> int:
        return sum(self.statuses.values())

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take()
        except SieError as error:  # raised by the demo on its own thread
            self.error = error
        finally:
            self._reader.close()

    def _take(self) -> None:
        try:
            records = self._reader.poll(5_000, POLL_MS)
        except Retriable:
            return
        for record in records:
            result = decode_result(record.value or b"")
            service_type = self._service_types.get(result.model, "unknown")
            self.statuses[result.status] += 1
            self._note_server(result.model, result.provenance.incarnation)
            if result.status == "ok":
                self.latencies_ms[service_type].append(result.timings_ms.total)
                if service_type not in self.samples:
                    self.samples[service_type] = from_record(result)

    def _note_server(self, model: str, incarnation: str) -> None:
        self.served_by[model] = incarnation
        if model in self.orphans and self.orphans[model] != incarnation:
            del self.orphans[model]
            self.adopted_at.append(time.monotonic())

    def orphan(self, incarnation: str) -> None:
        """That incarnation was killed: watch who answers for its models next."""
        self.orphans = {model: served for model, served in self.served_by.items() if served == incarnation}

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)
