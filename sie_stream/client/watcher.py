"""Waits for terminal records on a thread of its own and hands each to whoever asked for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future

from schemas.codec import CodecError, decode_result
from sie_stream.client.requests import InferenceResult, from_record
from sie_stream.errors import Retriable, SieError
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader

POLL_MS = 100
BATCH = 2_000


class ResultWatcher:
    """Reads the results topic from its end at construction; results nobody waits for are skipped."""

    def __init__(self, reader: LogReader, topic: str) -> None:
        self._reader = reader
        self._waiting: dict[str, Future[InferenceResult]] = {}
        self._lock = threading.Lock()
        self._failed: SieError | None = None
        self._stopping = threading.Event()
        partitions = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
        reader.assign(reader.end_offsets(partitions))
        self._thread = threading.Thread(target=self._run, name="sie-results", daemon=True)
        self._thread.start()

    def expect(self, request_id: str) -> Future[InferenceResult]:
        """A future for the terminal record of `request_id`; call it before the request is sent."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            future = self._waiting.get(request_id)
            if future is None:
                future = self._waiting[request_id] = Future()
            return future

    def forget(self, request_ids: Iterable[str]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._waiting.pop(request_id, None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._take_batch()
        except SieError as error:  # raised again for whoever waits, now or later
            self._fail_all(error)
        finally:
            self._reader.close()

    def _take_batch(self) -> None:
        try:
            records = self._reader.poll(BATCH, POLL_MS)
        except Retriable:
            return
        for record in records:
            try:
                result = from_record(decode_result(record.value))
            except CodecError:
                continue  # no result: somebody else wrote it, and nobody waits for it
            with self._lock:
                future = self._waiting.pop(result.request_id, None)
            if future is not None:
                future.set_result(result)

    def _fail_all(self, error: SieError) -> None:
        with self._lock:
            self._failed = error
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(error)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)
