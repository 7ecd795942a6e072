"""A scheduler that does not lead: it watches the ticks on sie.cluster and says when the leader has fallen silent."""

from __future__ import annotations

from schemas.codec import decode_cluster
from schemas.wire import CodecError
from sie_stream.control import Tick
from sie_stream.ids import TopicPartition
from sie_stream.ports import Clock, LogReader
from sie_stream.settings import Settings

TAKE_OVER_TICKS = 6
"""Silence that makes a standby take over, in ticks: 1.5 s at the default of 250 ms."""
BATCH_MAX = 1_000
WAIT_MS = 100


class Standby:
    """Reads from a moment before now, so that a leader that ticks is seen before anything is decided."""

    def __init__(self, settings: Settings, reader: LogReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._patience_ms = TAKE_OVER_TICKS * settings.tick_ms
        self._cluster = TopicPartition(settings.topics.cluster, 0)
        self._heard_ms = -float("inf")
        self._end = 0

    def start(self) -> None:
        since_ms = self._clock.now_ms() - self._patience_ms
        start = self._reader.offsets_at([self._cluster], since_ms)[self._cluster]
        self._end = self._reader.end_offsets([self._cluster])[self._cluster]
        self._reader.assign({self._cluster: min(start, self._end)})

    def turn(self) -> bool:
        """Read what is there. True once no leader was heard for the whole patience: take over."""
        for record in self._reader.poll(BATCH_MAX, WAIT_MS):
            try:
                fact = decode_cluster(record.value)
            except CodecError:
                continue
            if isinstance(fact, Tick):
                self._heard_ms = self._clock.monotonic_ms()
        caught_up = self._reader.position(self._cluster) >= self._end
        return caught_up and self._clock.monotonic_ms() - self._heard_ms >= self._patience_ms

    def stop(self) -> None:
        """Give the reader back, reading nothing."""
        self._reader.unassign([self._cluster])
