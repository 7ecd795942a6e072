"""A member of a consumer group over confluent-kafka (ingress, egress): KIP-447 transactions need its generation.

Assignor: cooperative-sticky. A member's dedupe window is rebuilt for every partition it is given, so a rebalance must
move only the partitions that have to move; eager assignors take all of them away from everybody. With a static
instance id, a restart within the session timeout moves none at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from sie_stream.edge.kafka_config import reader_config
from sie_stream.edge.kafka_errors import from_exception, logger, retry_until
from sie_stream.edge.kafka_pulse import Pulse
from sie_stream.edge.kafka_reader import (
    FETCH_WAIT_MS,
    OFFSET_EARLIEST,
    PREFETCH_BYTES,
    PREFETCH_RECORDS,
    LostPositions,
    committed_offsets,
    list_offsets,
    poll_messages,
    to_records,
)
from sie_stream.edge.kafka_stuck import close_client
from sie_stream.ids import TopicPartition
from sie_stream.ports import GroupEvents
from sie_stream.records import LogRecord

POSITION_BUDGET_MS = 30_000
"""How long an assignment may wait for stable committed offsets; an open transaction of the last owner delays them."""


class KafkaGroupReader:
    """Implements ports.GroupReader. poll() runs the GroupEvents callbacks on the caller's thread.

    `instance_id` makes the membership static; empty: a dynamic member, which leaves the group on close().
    """

    def __init__(
        self,
        bootstrap: str,
        group: str,
        instance_id: str = "",
        overrides: Mapping[str, str] | None = None,
        session_timeout_ms: int = 6_000,
        poll_interval_max_ms: int = 60_000,
        prefetch_bytes: int = PREFETCH_BYTES,
        prefetch_records: int = PREFETCH_RECORDS,
    ) -> None:
        config = reader_config(bootstrap, group, None, prefetch_bytes, prefetch_records, FETCH_WAIT_MS) | {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_timeout_ms,
            "heartbeat.interval.ms": max(100, min(2_000, session_timeout_ms // 3)),
            "max.poll.interval.ms": max(poll_interval_max_ms, session_timeout_ms),
        }
        if instance_id:
            config["group.instance.id"] = instance_id
        self._consumer = Consumer(config | dict(overrides or {}), logger=logger)
        self._positions = LostPositions(
            self._consumer, lambda place: list_offsets(self._consumer, [place], OFFSET_EARLIEST)[place]
        )
        self._pulse = Pulse(f"no membership in group {group}")
        self._events: GroupEvents | None = None
        self._assigned: dict[TopicPartition, None] = {}
        self._revoked_in_poll: set[TopicPartition] = set()

    def subscribe(self, topics: Sequence[str], events: GroupEvents) -> None:
        self._events = events
        try:
            self._consumer.subscribe(
                list(topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
            )
        except KafkaException as raised:
            raise from_exception(raised, f"subscribe {list(topics)}") from raised

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        """Records of partitions this member owns when poll returns.

        Raises Fenced when its instance id was taken, FatalLogError when it has been outside its group for too long.
        """
        self._revoked_in_poll.clear()
        messages = poll_messages(self._consumer, records_max, wait_ms)
        # To ask for the member id is a round trip to the client's main thread, dearer than an idle poll itself.
        if messages or (self._pulse.look_due() and self._consumer.memberid()):
            self._pulse.alive()
        self._pulse.check()
        if not messages:
            return []
        records = to_records(messages)
        if len(records) != len(messages):
            for message in messages:
                if message.error() is not None:
                    self._positions.handle(message)
        if self._revoked_in_poll:
            gone = self._revoked_in_poll
            records = [record for record in records if (record.topic, record.partition) not in gone]
        return records

    def rewind(self) -> None:
        self.seek(self._starts(list(self._assigned)))

    def seek(self, positions: Mapping[TopicPartition, int]) -> None:
        for place, offset in positions.items():
            retry_until(POSITION_BUDGET_MS, lambda place=place, offset=offset: self._seek(place, offset))

    def lost_positions(self) -> dict[TopicPartition, tuple[int, int]]:
        """As ports.LogReader.lost_positions."""
        return self._positions.take()

    def membership(self) -> object:
        """Group metadata of this moment: it carries the generation."""
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        close_client(self._consumer.close)

    def _seek(self, place: TopicPartition, offset: int) -> None:
        try:
            self._consumer.seek(ClientPartition(place.topic, place.partition, offset))
        except KafkaException as raised:
            raise from_exception(raised, f"seek {place}") from raised
        self._positions.started_at[place] = offset

    def _starts(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Committed offset of each partition, or its earliest where nothing was committed."""
        starts: dict[TopicPartition, int] = {}

        def look_up() -> None:
            committed = committed_offsets(self._consumer, places)
            fresh = [place for place, found in committed.items() if found is None]
            starts.update({place: found.offset for place, found in committed.items() if found is not None})
            starts.update(list_offsets(self._consumer, fresh, OFFSET_EARLIEST))

        retry_until(POSITION_BUDGET_MS, look_up)
        return starts

    def _on_assign(self, consumer: Consumer, partitions: list[ClientPartition]) -> None:
        places = [TopicPartition(one.topic, one.partition) for one in partitions]
        starts = self._starts(places)
        consumer.incremental_assign([ClientPartition(place.topic, place.partition, starts[place]) for place in places])
        self._positions.started_at.update(starts)
        self._assigned.update(dict.fromkeys(places))
        self._revoked_in_poll.difference_update(places)
        if places and self._events is not None:
            self._events.partitions_assigned(places)

    def _on_revoke(self, consumer: Consumer, partitions: list[ClientPartition]) -> None:
        """Also when the membership was lost; then what the owner still tries to commit is refused."""
        places = [TopicPartition(one.topic, one.partition) for one in partitions]
        try:
            if places and self._events is not None:
                self._events.partitions_revoked(places)
        finally:
            consumer.incremental_unassign(partitions)
            for place in places:
                self._assigned.pop(place, None)
                self._positions.started_at.pop(place, None)
            self._revoked_in_poll.update(places)
