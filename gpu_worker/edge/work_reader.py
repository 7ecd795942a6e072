"""The reader of work partitions, whose waiting fetches end when what is read changes.

A broker answers the requests of one connection in their order. A fetch without records holds its connection for
`fetch.wait.max.ms`, and what comes behind it waits: the first fetch of a partition that was just assigned or resumed,
and every look-up of offsets. Short waits make that quick and idle workers dear, since every fetch lists every
partition. So a worker that needs its connection writes an empty record to sie.wakeups, which every worker reads along
with its work: the fetch under way ends at once. That does not hold for a topic which the client has not met: it looks
for its leader once a second, and behind the fetch. Therefore the waits stay short.

For the same reason the placements are read along, only as a sign: the worker's loop waits in this reader when it has
nothing to do, and the rows themselves come through a reader of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from sie_stream.edge.kafka_reader import OFFSET_LATEST, KafkaReader
from sie_stream.errors import Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import Clock, PlainWriter
from sie_stream.records import LogRecord, LogWrite

FETCH_WAIT_MS = 100
"""With a second the first fetch of a topic new to the client took up to three, and look-ups as long."""
AGAIN_MS = (15.0, 60.0, 250.0)
"""After a change: the client may have needed longer than a wake-up to take the partition into its next fetch."""
LISTEN_AGAIN_MS = 10_000.0
"""How often the topics of the signs are looked for while they are missing."""
ALERT_MS, ALERT_POLL_MS = 50.0, 5
"""So long after the sign of a placement, polls wait no longer than this: the row comes by another connection."""


class WorkReader(KafkaReader):
    """Implements ports.LogReader. Records of its own signs are never returned; they end a poll early."""

    def __init__(
        self,
        bootstrap: str,
        names: TopicNames,
        overrides: Mapping[str, str],
        wakeups: PlainWriter,
        clock: Clock,
        fetch_wait_ms: int = FETCH_WAIT_MS,
    ) -> None:
        """`wakeups`: must not wait for a topic that is missing."""
        super().__init__(bootstrap, names.worker_group, overrides, fetch_wait_ms=fetch_wait_ms)
        self._names = names
        self._wakeups = wakeups
        self._clock = clock
        self._bells: list[LogWrite] = []
        """One empty record for each partition of sie.wakeups; none while it is not there."""
        self._signs: frozenset[str] = frozenset()
        self._listen_at_ms = float("-inf")
        self._ring_at_ms: deque[float] = deque()
        self._alert_until_ms = float("-inf")

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        super().assign(positions)
        if positions:
            self._wake()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        super().resume(partitions)
        self._wake()

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._ring()
        return super().beginning_offsets(partitions)

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._ring()
        return super().end_offsets(partitions)

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        now_ms = self._clock.monotonic_ms()
        if not self._signs and now_ms >= self._listen_at_ms:
            self._listen_at_ms = now_ms + LISTEN_AGAIN_MS
            self._listen()
        if self._ring_at_ms and now_ms >= self._ring_at_ms[0]:
            self._ring_at_ms.popleft()
            self._ring()
        if now_ms < self._alert_until_ms:
            wait_ms = min(wait_ms, ALERT_POLL_MS)
        records = super().poll(records_max, wait_ms)
        work = [record for record in records if record.topic not in self._signs]
        if len(work) != len(records) and any(record.topic == self._names.placements for record in records):
            self._alert_until_ms = self._clock.monotonic_ms() + ALERT_MS
        return work

    def lost_positions(self) -> dict[TopicPartition, tuple[int, int]]:
        return {place: lost for place, lost in super().lost_positions().items() if place.topic not in self._signs}

    def _listen(self) -> None:
        """Read along from the end on, once both topics are there. The worker polls before it assigns anything: nothing
        holds the connection then.
        """
        counts = {topic: self.partitions_of(topic) for topic in (self._names.wakeups, self._names.placements)}
        if not all(counts.values()):
            return
        places = [TopicPartition(topic, number) for topic, count in counts.items() for number in range(count)]
        super().assign(dict.fromkeys(places, OFFSET_LATEST))
        self._signs = frozenset(counts)
        self._bells = [LogWrite(topic, b"", None, number) for topic, number in places if topic == self._names.wakeups]

    def _wake(self) -> None:
        """Now, and again when the client surely fetches what has changed."""
        now_ms = self._clock.monotonic_ms()
        self._ring_at_ms = deque(now_ms + later for later in AGAIN_MS)
        self._ring()

    def _ring(self) -> None:
        try:
            self._wakeups.write(self._bells)
        except Retriable:
            pass  # nobody is woken: the fetch under way ends by itself
