"""The reader of work partitions, whose waiting fetches end when what is read changes.

A broker answers the requests of one connection in their order. A fetch without records holds its connection for
`fetch.wait.max.ms`, and what comes behind it waits: the first fetch of a partition that was just assigned or resumed,
and every look-up of offsets. Short waits make that quick and idle workers dear, since every fetch lists every
partition. So the waits are long here, and a worker that needs its connection writes an empty record to sie.wakeups,
which every worker reads along with its work: the fetch under way ends at once.

Of a topic that it has not met, a client looks for the leader once a second, which made its first record two seconds
late. A look-up of offsets asks for leaders at once and remembers them, so `assign` makes one for what no look-up met.

For the same reason the placements are read along, only as a sign: the worker's loop waits in this reader when it has
nothing to do, and the rows themselves come through a reader of their own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from sie_stream.edge.kafka_reader import OFFSET_EARLIEST, OFFSET_LATEST, KafkaReader, list_offsets
from sie_stream.errors import LogError, Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import Clock
from sie_stream.records import LogRecord, LogWrite

FETCH_WAIT_MS = 1_000
FETCH_WAIT_UNWOKEN_MS = 100
"""Where sie.wakeups is missing: the loop, which sends the heartbeats, would wait too long for look-ups of offsets."""
AGAIN_MS = (15.0, 60.0, 250.0, 1_000.0)
"""After a change: the client may have needed longer than a wake-up to take the partition into its next fetch; on a
machine that is overloaded much longer."""
RING_S, RING_S_MAX = 0.015, 0.25
"""Pauses between wake-ups while a look-up is not answered: the first, each later one twice as long, the longest."""
MEET_MS = 1_000
"""How long `assign` looks for leaders; then the client finds them by itself, later."""
LISTEN_AGAIN_MS = 10_000.0
"""How often the topics of the signs are looked for while they are missing."""
ALERT_MS, ALERT_POLL_MS = 50.0, 5
"""So long after the sign of a placement, polls wait no longer than this: the row comes by another connection."""


class Wakeups(Protocol):
    """What a worker rings with; KafkaPlainWriter is one. Its connections hold no fetches."""

    def write(self, writes: Iterable[LogWrite]) -> None: ...

    def partitions_of(self, topic: str) -> int:
        """As ports.LogReader.partitions_of."""
        ...


def fetch_wait_ms(wakeups: Wakeups, names: TopicNames) -> int:
    """How long fetches of work may wait in this installation."""
    try:
        return FETCH_WAIT_MS if wakeups.partitions_of(names.wakeups) else FETCH_WAIT_UNWOKEN_MS
    except Retriable:
        return FETCH_WAIT_UNWOKEN_MS


class WorkReader(KafkaReader):
    """Implements ports.LogReader. Records of its own signs are never returned; they end a poll early."""

    def __init__(
        self,
        bootstrap: str,
        names: TopicNames,
        overrides: Mapping[str, str],
        wakeups: Wakeups,
        clock: Clock,
        fetch_wait_ms: int,
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
        self._met: set[TopicPartition] = set()
        """Looked up since the last `assign`: the client knows their leaders."""

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._meet(place for place in positions if place not in self._met)
        self._met.clear()
        super().assign(positions)
        if positions:
            self._wake()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        super().resume(partitions)
        self._wake()

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        with self._ringing():
            found = super().beginning_offsets(partitions)
        self._met.update(found)
        return found

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        with self._ringing():
            return super().end_offsets(partitions)

    def partitions_of(self, topic: str) -> int:
        return self._wakeups.partitions_of(topic)  # a question of our own would wait behind the fetch under way

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
        # The client meets them: what wakes its fetches must not itself be looked for behind one.
        list_offsets(self._consumer, places, OFFSET_EARLIEST, self._call_timeout_ms)
        super().assign(dict.fromkeys(places, OFFSET_LATEST))
        self._signs = frozenset(counts)
        self._bells = [LogWrite(topic, b"", None, number) for topic, number in places if topic == self._names.wakeups]

    def _meet(self, places: Iterable[TopicPartition]) -> None:
        strangers = list(places)
        if not strangers:
            return
        try:
            with self._ringing():
                list_offsets(self._consumer, strangers, OFFSET_EARLIEST, MEET_MS)
        except Retriable:
            pass  # also a topic that is missing: the client goes on looking

    @contextmanager
    def _ringing(self) -> Iterator[None]:
        """Wake-ups while a look-up waits for its answers: the client may send a fetch before each of its requests."""
        answered = threading.Event()
        bell = threading.Thread(target=self._ring_until, args=(answered,), name="wakeups", daemon=True)
        bell.start()
        try:
            yield
        finally:
            answered.set()
            bell.join()  # the writer is the loop's again

    def _ring_until(self, answered: threading.Event) -> None:
        pause_s = RING_S
        try:
            self._ring()
            while not answered.wait(pause_s):
                self._ring()
                pause_s = min(2 * pause_s, RING_S_MAX)
        except LogError:
            pass  # the loop's own next write says so

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
