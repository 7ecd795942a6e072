"""Steady load on one model for `demo-canary`, and what came of it: statuses, latencies by variant."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from schemas.codec import decode_result
from sie_stream.cli.canary_rate import Tried, next_rate
from sie_stream.cli.demo.tally import percentile
from sie_stream.client.requests import Request, to_write
from sie_stream.edge.connection import Connection
from sie_stream.errors import Retriable
from sie_stream.ids import TopicPartition
from sie_stream.records import LogWrite

TURN_S = 0.02
KEYS = 5_003
SLICE_MS = 2_000
SETTLE_S, TRY_S = 1.0, 3.0
"""At each rate that is tried: not counted, and counted."""


class Load:
    """Sends at a steady rate from one thread and counts results in another. Nothing is sent before `pace`."""

    def __init__(self, connection: Connection, model: str, rows: list[dict[str, Any]]) -> None:
        self._topics = connection.settings.topics
        self._writer = connection.plain_writer()
        self._reader = connection.reader()
        self._model = model
        self._rows = itertools.cycle(rows)
        self._rate = 0
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._count)]
        self._latencies: dict[str, list[tuple[int, float]]] = {}
        """By variant: (when it ended, milliseconds)."""
        self.sent = 0
        self.statuses: dict[str, int] = {}

    def __enter__(self) -> Load:
        places = [
            TopicPartition(self._topics.results, n) for n in range(self._reader.partitions_of(self._topics.results))
        ]
        self._reader.assign(self._reader.end_offsets(places))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._writer.close()
        self._reader.close()

    def pace(self, rate: int) -> None:
        """Requests per second from now on."""
        self._rate = rate

    def stop(self) -> None:
        self._stopping.set()
        self._threads[0].join()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything sent is answered, or as long as this."""
        deadline = time.monotonic() + timeout_s
        while self.answered < self.sent and time.monotonic() < deadline:
            time.sleep(TURN_S)

    @property
    def answered(self) -> int:
        return sum(self.statuses.values())

    def forget(self) -> None:
        """Latencies count from now on."""
        self._latencies = {}

    def percentile_ms(self, variant: str, share: float) -> float | None:
        found = [ms for _, ms in list(self._latencies.get(variant, []))]
        return round(percentile(found, share), 1) if found else None

    def p99_ms(self, variant: str) -> float | None:
        return self.percentile_ms(variant, 0.99)

    def p99_by_slice(self, variant: str) -> list[float]:
        """p99 of each SLICE_MS, ascending: how much it moves by itself."""
        slices: dict[int, list[float]] = {}
        for at_ms, ms in list(self._latencies.get(variant, [])):
            slices.setdefault(at_ms // SLICE_MS, []).append(ms)
        return sorted(round(percentile(values, 0.99), 1) for values in slices.values())

    def _send(self) -> None:
        looked, owed = time.monotonic(), 0.0
        while not self._stopping.is_set():
            now = time.monotonic()
            owed += (now - looked) * self._rate
            looked, due = now, int(owed)
            owed -= due
            writes: list[LogWrite] = []
            for number in range(self.sent, self.sent + due):
                request = Request(model=self._model, inputs=next(self._rows), session=f"customer-{number % KEYS}")
                writes.append(to_write(request, f"canary-{number}", self._topics.requests))
            if writes:
                self._writer.write(writes)
                self.sent += len(writes)
            time.sleep(TURN_S)
        self._writer.flush(10_000)

    def _count(self) -> None:
        while not self._closing.is_set():
            try:
                records = self._reader.poll(5_000, 100)
            except Retriable:
                continue
            for record in records:
                result = decode_result(record.value)
                self.statuses[result.status] = self.statuses.get(result.status, 0) + 1
                if result.status == "ok":
                    found = self._latencies.setdefault(result.variant, [])
                    found.append((record.timestamp_ms, result.timings_ms.total))


def try_rates(load: Load, wait: Callable[[float], None]) -> list[Tried]:
    """One rate after the other, until requests wait for each other. `wait` gets seconds."""
    tried: list[Tried] = []
    while (rate := next_rate(tried)) is not None:
        load.pace(rate)
        wait(SETTLE_S)
        load.forget()
        sent, answered = load.sent, load.answered
        wait(TRY_S)
        share = (load.answered - answered) / max(1, load.sent - sent)
        tried.append(Tried(rate, load.percentile_ms("stable", 0.9) or math.inf, share))
    return tried
