"""Reading partitions that somebody else chose: no group membership, read_committed, explicit positions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as ClientPartition

from sie_stream.edge.kafka_config import reader_config
from sie_stream.edge.kafka_errors import RETRIABLE_CODES, classify, from_exception, logger
from sie_stream.edge.kafka_hearing import Hearing
from sie_stream.edge.kafka_stuck import NeverReturned, close_client, within
from sie_stream.errors import FatalLogError
from sie_stream.ids import TopicPartition
from sie_stream.records import CommittedOffset, LogRecord

LOST_CODES = frozenset((KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION))
GONE_CODES = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION))
OFFSET_EARLIEST = -2
OFFSET_LATEST = -1
"""Kafka's own numbers in a ListOffsets request; with read_committed, latest is the last stable offset."""

PREFETCH_BYTES = 8 * 1024 * 1024
PREFETCH_RECORDS = 10_000
FETCH_WAIT_MS = 250
"""A newly assigned partition (and a look-up of offsets) waits this long at most for the fetch that is under way.

Idle cost of one reader with 345 partitions: 0.8 % of a core here and 4 % in the broker; at 50 ms 1.3 and 7 %, at 250 ms
0.4 and 0.5 %."""
CALL_TIMEOUT_MS = 10_000
"""Budget of a call that asks the brokers something."""


def to_records(messages: Sequence[Message]) -> list[LogRecord]:
    """Messages without errors, as records (0.5 us each)."""
    return [
        LogRecord(
            m.topic(),  # type: ignore[arg-type]  # None only on errors
            m.partition(),  # type: ignore[arg-type]
            m.offset(),  # type: ignore[arg-type]
            m.timestamp()[1],
            m.key(),
            m.value(),
            tuple(m.headers() or ()),  # type: ignore[arg-type]  # values are bytes or None
        )
        for m in messages
        if m.error() is None
    ]


def poll_messages(consumer: Consumer, records_max: int, wait_ms: int) -> list[Message]:
    """Waits for the first message only: consume() with a timeout would wait until all `records_max` are there."""
    try:
        first = consumer.poll(wait_ms / 1000.0)
        if first is None:
            return []
        messages = [first]
        if records_max > 1:
            messages += consumer.consume(records_max - 1, 0)
    except KafkaException as raised:
        raise from_exception(raised, "poll") from raised
    return messages


def list_offsets(
    consumer: Consumer, partitions: Iterable[TopicPartition], spec: int, timeout_ms: int = CALL_TIMEOUT_MS
) -> dict[TopicPartition, int]:
    """One ListOffsets call per broker. `spec`: a timestamp in ms, or OFFSET_EARLIEST, or OFFSET_LATEST."""
    asked = [ClientPartition(topic, partition, spec) for topic, partition in partitions]
    if not asked:
        return {}
    try:
        answered = consumer.offsets_for_times(asked, timeout=timeout_ms / 1000.0)
    except KafkaException as raised:
        raise from_exception(raised, "list offsets") from raised
    found: dict[TopicPartition, int] = {}
    for one in answered:
        if one.error is not None:
            raise classify(one.error, f"list offsets of {one.topic}[{one.partition}]")
        found[TopicPartition(one.topic, one.partition)] = one.offset
    return found


def committed_offsets(
    consumer: Consumer, partitions: Iterable[TopicPartition], timeout_ms: int = CALL_TIMEOUT_MS
) -> dict[TopicPartition, CommittedOffset | None]:
    """Stable committed offsets: librdkafka asks with require_stable under read_committed, and retries."""
    asked = [ClientPartition(topic, partition) for topic, partition in partitions]
    if not asked:
        return {}
    try:
        answered = consumer.committed(asked, timeout=timeout_ms / 1000.0)
    except KafkaException as raised:
        raise from_exception(raised, "committed offsets") from raised
    found: dict[TopicPartition, CommittedOffset | None] = {}
    for one in answered:
        if one.error is not None:
            raise classify(one.error, f"committed offset of {one.topic}[{one.partition}]")
        place = TopicPartition(one.topic, one.partition)
        found[place] = CommittedOffset(one.offset, one.metadata or "") if one.offset >= 0 else None
    return found


def count_partitions(client: Consumer | Producer, topic: str, timeout_ms: int = CALL_TIMEOUT_MS) -> int:
    """0 if the topic does not exist. Of a consumer the question may wait behind a fetch."""
    try:
        found = client.list_topics(topic, timeout=timeout_ms / 1000.0).topics.get(topic)
    except KafkaException as raised:
        raise from_exception(raised, f"metadata of {topic}") from raised
    if found is None:
        return 0
    if found.error is not None:
        if found.error.code() in GONE_CODES:
            return 0
        raise classify(found.error, f"metadata of {topic}")
    return len(found.partitions)


class LostPositions:
    """Positions that retention took away: continue at the earliest offset, and remember having done so."""

    def __init__(self, consumer: Consumer, beginning_of: Callable[[TopicPartition], int]) -> None:
        self._consumer = consumer
        self._beginning_of = beginning_of
        self._lost: dict[TopicPartition, tuple[int, int]] = {}
        self.started_at: dict[TopicPartition, int] = {}
        """Where each partition was told to start: what was wanted if nothing was read yet."""
        self.paused: set[TopicPartition] = set()
        self.ends: dict[TopicPartition, int] = {}
        """Where the end of a partition was last reached: past markers and aborted records, which are never returned."""

    def handle(self, message: Message) -> None:
        """React to an error message of poll(). Raises what the owner must know; survives the rest."""
        error = message.error()
        assert error is not None
        code = error.code()
        if code in LOST_CODES and message.topic() is not None:
            self._continue_at_earliest(TopicPartition(message.topic(), message.partition()))  # type: ignore[arg-type]
        elif code == KafkaError._PARTITION_EOF:
            self.ends[TopicPartition(message.topic(), message.partition())] = message.offset()  # type: ignore[arg-type]
        elif not error.fatal() and (code in GONE_CODES or code in RETRIABLE_CODES or error.retriable()):
            logger.warning("poll %s[%s]: %s", message.topic(), message.partition(), error.str())
        elif code == KafkaError._MAX_POLL_EXCEEDED:
            logger.warning("poll: %s; the group took the partitions away, rejoining", error.str())
        else:
            raise classify(error, f"poll {message.topic()}[{message.partition()}]")

    def _continue_at_earliest(self, place: TopicPartition) -> None:
        position = self._consumer.position([ClientPartition(*place)])[0].offset
        wanted = position if position >= 0 else self.started_at.get(place, -1)
        earliest = self._beginning_of(place)
        # librdkafka has stopped fetching the partition, and refuses to seek a stopped one: assign it anew.
        restart = ClientPartition(place.topic, place.partition, earliest)
        try:
            self._consumer.incremental_unassign([restart])
            self._consumer.incremental_assign([restart])
            if place in self.paused:
                self._consumer.pause([restart])
        except KafkaException as raised:
            raise from_exception(raised, f"restart {place.topic}[{place.partition}]") from raised
        self.started_at[place] = earliest
        self._lost[place] = (wanted, earliest)
        logger.warning("%s[%d]: offset %d is gone, continuing at %d", place.topic, place.partition, wanted, earliest)

    def moved_to(self, consumer: Consumer, positions: Mapping[TopicPartition, int]) -> None:
        """Another client goes on there."""
        self._consumer = consumer
        self.started_at.update(positions)

    def take(self) -> dict[TopicPartition, tuple[int, int]]:
        lost, self._lost = self._lost, {}
        return lost


class KafkaReader:
    """Implements ports.LogReader. Positions are its owner's; the group only stores committed offsets."""

    def __init__(
        self,
        bootstrap: str,
        group: str,
        overrides: Mapping[str, str] | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        prefetch_records: int = PREFETCH_RECORDS,
        call_timeout_ms: int = CALL_TIMEOUT_MS,
        fetch_wait_ms: int = FETCH_WAIT_MS,
    ) -> None:
        self._call_timeout_ms = call_timeout_ms
        config = reader_config(bootstrap, group, None, prefetch_bytes, prefetch_records, fetch_wait_ms)
        self._config = config | dict(overrides or {})
        self._consumer = Consumer(self._config, logger=logger)
        self._positions = LostPositions(self._consumer, lambda place: self.beginning_offsets([place])[place])
        self._hearing = Hearing(self._unread)
        self._asking: Consumer | None = None
        """Fetches nothing: for the questions of `_hearing`."""
        self._membership: object = None
        self._closed = False

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        self._change(
            self._consumer.incremental_assign,
            [ClientPartition(topic, partition, offset) for (topic, partition), offset in positions.items()],
            "assign",
        )
        self._positions.started_at.update(positions)

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        """After `close` there is nothing to give back: a generator that reads may end later than its reader."""
        if self._closed:
            return
        places = list(partitions)
        self._change(self._consumer.incremental_unassign, [ClientPartition(*place) for place in places], "unassign")
        for place in places:
            self._positions.started_at.pop(place, None)
            self._positions.ends.pop(place, None)
            self._positions.paused.discard(place)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        places = list(partitions)
        self._change(self._consumer.pause, [ClientPartition(*place) for place in places], "pause")
        self._positions.paused.update(places)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        places = list(partitions)
        self._change(self._consumer.resume, [ClientPartition(*place) for place in places], "resume")
        self._positions.paused.difference_update(places)

    def _change(
        self, change: Callable[[list[ClientPartition]], None], partitions: list[ClientPartition], doing: str
    ) -> None:
        if not partitions:
            return
        try:
            change(partitions)
        except KafkaException as raised:
            raise from_exception(raised, doing) from raised

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        messages = poll_messages(self._consumer, records_max, wait_ms)
        if not messages:
            if self._hearing.deaf():
                self._start_again()
            return []
        self._hearing.heard()
        records = to_records(messages)
        if len(records) != len(messages):
            for message in messages:
                if message.error() is not None:
                    self._positions.handle(message)
        return records

    def position(self, partition: TopicPartition) -> int:
        returned = self._consumer.position([ClientPartition(*partition)])[0].offset
        start = self._positions.started_at.get(partition, 0)
        return max(returned if returned >= 0 else start, self._positions.ends.get(partition, 0))

    def _unread(self) -> bool:
        """Whether a partition that is not paused has an end behind our position. Raises LogError."""
        places = [place for place in list(self._positions.started_at) if place not in self._positions.paused]
        # Beside the owner, so not with its client: until that has answered, which it does after the fetch under way,
        # the owner's poll() would stand still, and everything that its loop carries with it.
        if self._asking is None:
            self._asking = Consumer(self._config, logger=logger)
        ends = list_offsets(self._asking, places, OFFSET_LATEST, self._call_timeout_ms)
        return any(end > self.position(place) for place, end in ends.items())

    def _start_again(self) -> None:
        """Go on with a new client where this one stands. Raises FatalLogError when it cannot even tell where."""
        logger.warning("records are there and none comes: a new client goes on")
        places = list(self._positions.started_at)
        positions: dict[TopicPartition, int] = {}
        try:
            within(
                self._call_timeout_ms / 1000.0, lambda: positions.update({one: self.position(one) for one in places})
            )
        except (NeverReturned, KafkaException) as lost:
            raise FatalLogError("a reader hears nothing, and cannot tell where it stands") from lost
        deaf, self._consumer = self._consumer, Consumer(self._config, logger=logger)
        self._positions.moved_to(self._consumer, positions)
        self._membership = None
        self._hearing.heard()
        asking, self._asking = self._asking, None  # it may have lost the broker as well
        for client in (deaf, asking):
            if client is not None:
                threading.Thread(target=close_client, args=(client.close,), name="deaf-client", daemon=True).start()
        where = [ClientPartition(topic, partition, offset) for (topic, partition), offset in positions.items()]
        self._change(self._consumer.incremental_assign, where, "assign")
        paused = [ClientPartition(*place) for place in self._positions.paused]
        self._change(self._consumer.pause, paused, "pause")

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, CommittedOffset | None]:
        return committed_offsets(self._consumer, partitions, self._call_timeout_ms)

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return list_offsets(self._consumer, partitions, OFFSET_EARLIEST, self._call_timeout_ms)

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return list_offsets(self._consumer, partitions, OFFSET_LATEST, self._call_timeout_ms)

    def offsets_at(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        found = list_offsets(self._consumer, partitions, max(0, timestamp_ms), self._call_timeout_ms)
        none_later = [place for place, offset in found.items() if offset < 0]
        return found | self.end_offsets(none_later)

    def partitions_of(self, topic: str) -> int:
        return count_partitions(self._consumer, topic, self._call_timeout_ms)

    def topics(self) -> list[str]:
        """Names of all topics, sorted."""
        try:
            return sorted(self._consumer.list_topics(timeout=self._call_timeout_ms / 1000.0).topics)
        except KafkaException as raised:
            raise from_exception(raised, "list topics") from raised

    def cluster_id(self) -> str:
        """Kafka's own id of the cluster: tells two installations behind one address apart."""
        try:
            return str(self._consumer.list_topics(timeout=self._call_timeout_ms / 1000.0).cluster_id)
        except KafkaException as raised:
            raise from_exception(raised, "metadata of the cluster") from raised

    def lost_positions(self) -> dict[TopicPartition, tuple[int, int]]:
        return self._positions.take()

    def membership(self) -> object:
        """The group metadata that send_offsets needs: group without members, so it never changes."""
        if self._membership is None:
            self._membership = self._consumer.consumer_group_metadata()
        return self._membership

    def close(self) -> None:
        self._closed = True
        close_client(self._consumer.close)
        if self._asking is not None:
            close_client(self._asking.close)
