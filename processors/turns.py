"""What the hosts of ingress, egress and bridge share: sources, and one transaction per turn. Over ports only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Protocol

from msgspec import Struct

from sie_stream.errors import RecordTooLarge, Retriable, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.ports import (
    TRANSACTION_REST_MS,
    Clock,
    GroupReader,
    LogReader,
    PlainWriter,
    TransactionalWriter,
)
from sie_stream.records import CommittedOffset, LogRecord, LogWrite

TOPIC_KNOWN_MS = 60_000
TOPIC_MISSING_MS = 2_000
UNKNOWN = -1
PACE_MS = 10.0
"""Least time between two turns that find little. A transaction costs the broker the same for one record as for a
thousand; one after another, they would take a whole core from those who answer."""
LITTLE = 256
"""Records. A turn that finds more has waited long enough."""


class Ports(Struct, frozen=True):
    """The world as a host sees it.

    make_reader:       a reader without membership whose offsets are those of the group.
    make_group_reader: a member of the group.
    make_plain_writer: for sie.cluster, outside any transaction: an open one there would hold up the scheduler.
    make_latest_reader: its end offsets are high watermarks, so with what transactions hold that are open still.
    """

    make_reader: Callable[[str], LogReader]
    make_group_reader: Callable[[str], GroupReader]
    writer: TransactionalWriter
    make_plain_writer: Callable[[], PlainWriter]
    make_latest_reader: Callable[[str], LogReader]
    clock: Clock


class Watcher(Protocol):
    """Told about what a host does; decides nothing."""

    def event(self, name: str, **facts: object) -> None: ...


class Silence:
    """A watcher that does not care."""

    def event(self, name: str, **facts: object) -> None:
        return None


class Pace:
    """When a host that finds little may begin its next turn."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found = 0
        self._began_at = self._ended_at = float("-inf")

    def began(self) -> None:
        """A turn begins; it may have to wait for its first record."""
        self._found = 0
        self._began_at = self._clock.monotonic_ms()

    def ended(self, found: int) -> None:
        """It found so many records, and its transaction has ended."""
        self._found = found
        self._ended_at = self._clock.monotonic_ms()

    def pause_ms(self) -> int:
        """What is left of PACE_MS since the last turn began and of TRANSACTION_REST_MS since it ended."""
        if not 0 < self._found < LITTLE:
            return 0
        until = max(self._began_at + PACE_MS, self._ended_at + TRANSACTION_REST_MS)
        return max(0, ceil(until - self._clock.monotonic_ms()))


class Source:
    """One group reader, and what its callbacks said since it was last asked."""

    def __init__(self, group: str, reader: GroupReader) -> None:
        self.group = group
        self.reader = reader
        self.assigned: dict[TopicPartition, None] = {}
        self.offset_reset = "earliest"
        self.topics: tuple[str, ...] = ()
        """As subscribed; topics that do not exist yet are wanted, not subscribed."""
        self.wanted: tuple[str, ...] = ()
        self._fresh: list[TopicPartition] = []
        self._changed = False
        self._misplaced = False

    def partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self.assigned.update(dict.fromkeys(partitions))
        self._fresh += [partition for partition in partitions if partition not in self._fresh]
        self._changed = True

    def partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        for partition in partitions:
            self.assigned.pop(partition, None)
            if partition in self._fresh:
                self._fresh.remove(partition)
        self._changed = True

    def take_fresh(self) -> list[TopicPartition]:
        """Partitions given to this member since the last call, and still its own."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def still_fresh(self, partitions: Sequence[TopicPartition]) -> None:
        """These could not be prepared: take_fresh() gives them again."""
        self._fresh += [partition for partition in partitions if partition in self.assigned]

    def take_changed(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    def subscribe(self, topics: tuple[str, ...]) -> None:
        if topics and topics != self.topics:
            self.reader.subscribe(topics, self)
            self.topics = topics

    def rewind(self) -> None:
        """Back to the committed positions before anything is polled again."""
        self._misplaced = True

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        """As GroupReader.poll, but passing trouble only means that there is nothing now."""
        if not self.topics:
            return []
        try:
            if self._misplaced:
                self.reader.rewind()
                self._misplaced = False
            return self.reader.poll(records_max, wait_ms)
        except Retriable:
            return []


class TopicLookup:
    """Which topics exist, asked at most once a minute (every two seconds for those that are missing)."""

    def __init__(self, reader: LogReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._known: dict[str, tuple[int, float]] = {}

    def __call__(self, topic: str) -> bool:
        """While Kafka cannot say, the last answer stands, and a topic never asked about is believed to exist.

        A batch that is wrong about that is aborted and comes again; a request that is refused would be over.
        """
        return self._look_up(topic) != 0

    def partitions(self, topic: str) -> int:
        """Number of partitions, 0 if the topic is missing. While Kafka cannot say, the last answer stands (or 0)."""
        return max(0, self._look_up(topic))

    def forget(self) -> None:
        """Ask again: a transaction was aborted, perhaps because a topic is gone."""
        self._known = {topic: (count, 0.0) for topic, (count, _) in self._known.items()}

    def _look_up(self, topic: str) -> int:
        """Number of partitions; UNKNOWN while Kafka has never said."""
        now_ms = self._clock.monotonic_ms()
        count, until_ms = self._known.get(topic, (UNKNOWN, 0.0))
        if now_ms < until_ms:
            return count
        try:
            count = self._reader.partitions_of(topic)
        except Retriable:
            return count
        self._known[topic] = (count, now_ms + (TOPIC_KNOWN_MS if count else TOPIC_MISSING_MS))
        return count


def commit_turn(
    writer: TransactionalWriter,
    writes: Sequence[LogWrite],
    offsets: Sequence[tuple[GroupReader, Mapping[TopicPartition, CommittedOffset]]],
) -> TransactionAborted | RecordTooLarge | Retriable | None:
    """One transaction: all writes and all offsets, or nothing.

    Returns None when it is durable, and why not when it was aborted: the caller rewinds and goes on. Everything else
    (Fenced, FatalLogError) is raised: this process must not go on.
    """
    try:
        writer.begin()
        writer.write(writes)
        for reader, positions in offsets:
            writer.send_offsets(reader, positions)
        writer.commit()
    except (TransactionAborted, RecordTooLarge, Retriable) as refusal:
        writer.abort()
        return refusal
    return None
