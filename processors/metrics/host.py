"""Follows results, telemetry and routes from now on, and publishes what they add up to. Over ports only."""

from __future__ import annotations

from collections.abc import Callable

from processors.follow import RouteFollower
from processors.metrics.book import MetricsBook
from processors.metrics.families import Family, HistogramFamily
from processors.turns import Ports, Silence, Watcher
from schemas.codec import decode_result, decode_row
from schemas.wire import CodecError
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord
from sie_stream.settings import Settings
from sie_stream.telemetry import MODELS_TOLD_EVERY_MS, DeviceSample, implausible

POLL_MAX = 5_000
WAIT_MS = 200
PUBLISH_EVERY_MS = 1_000.0
TELEMETRY_BACK_MS = MODELS_TOLD_EVERY_MS + 5_000
"""So far back the newest sample of every model is found."""

Publish = Callable[[tuple[Family | HistogramFamily, ...]], None]


class MetricsHost:
    """Call start() once, then turn() for ever, then close()."""

    def __init__(self, settings: Settings, ports: Ports, publish: Publish, watcher: Watcher | None = None) -> None:
        self._topics = settings.topics
        self._clock = ports.clock
        self._watcher = watcher or Silence()
        self._publish = publish
        group = f"{settings.topic_prefix}metrics"
        self._routes = RouteFollower(ports.make_reader(group), settings.topics.routes)
        self._reader = ports.make_reader(group)
        self._book = MetricsBook()
        self._published_at = float("-inf")
        self.results = 0
        self.samples = 0
        self.undecodable = 0
        self.implausible = 0

    def start(self) -> None:
        """Raises FatalLogError when routes, results or telemetry cannot be read."""
        for model, row in self._routes.read_table():
            self._book.route(model, row)
        try:
            results = self._partitions(self._topics.results)
            starts = self._reader.end_offsets(results)
            telemetry = self._partitions(self._topics.telemetry)
            starts |= self._reader.offsets_at(telemetry, self._clock.now_ms() - TELEMETRY_BACK_MS)
            self._reader.assign(starts)
        except Retriable as trouble:
            raise FatalLogError(f"results and telemetry cannot be read: {trouble}") from trouble

    def turn(self) -> int:
        """Returns how many records were read."""
        for model, row in self._routes.changes():
            self._book.route(model, row)
        try:
            records = self._reader.poll(POLL_MAX, WAIT_MS)
        except Retriable as trouble:
            self._watcher.event("unreadable", reason=str(trouble))
            records = []
        for record in records:
            self._add(record)
        if self._clock.monotonic_ms() - self._published_at >= PUBLISH_EVERY_MS:
            self._published_at = self._clock.monotonic_ms()
            self._publish(self._book.families(self._clock.now_ms()))
        return len(records)

    def close(self) -> None:
        self._reader.close()

    def _partitions(self, topic: str) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for number in range(self._reader.partitions_of(topic))]

    def _add(self, record: LogRecord) -> None:
        try:
            if record.topic == self._topics.telemetry:
                self._sample(decode_row(record.value, DeviceSample))
            else:
                self._book.result(decode_result(record.value))
                self.results += 1
        except CodecError:
            self.undecodable += 1

    def _sample(self, sample: DeviceSample) -> None:
        """What cannot be true is not shown, and told: the topic is written by many."""
        problem = implausible(sample, self._clock.now_ms()) or self._book.sample(sample)
        if not problem:
            self.samples += 1
            return
        if not self.implausible:  # the first only: whoever floods the topic must not flood the log
            self._watcher.event("implausible_sample", worker=sample.worker[:100], reason=problem)
        self.implausible += 1
