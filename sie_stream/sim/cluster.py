"""State of the simulated cluster: topics, groups, transactions, and the passing of their timeouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sie_stream.errors import Retriable
from sie_stream.ids import TopicPartition
from sie_stream.partitioner import keyed_partition
from sie_stream.ports import TopicSpec
from sie_stream.records import CommittedOffset
from sie_stream.sim.clock import SimClock
from sie_stream.sim.groups import SimGroup
from sie_stream.sim.partition import SimPartition

Hook = Callable[[str, str], None]
"""Called with (operation, client); raises a LogError to make that operation fail."""

METADATA_CHARS_MAX = 4_095
"""Kafka refuses 4,096 characters at its default offset.metadata.max.bytes = 4096."""
RECORD_BATCH_MAX = 1_048_588
"""Kafka's default max.message.bytes."""
NEVER = 1 << 62


class SimTransaction:
    """What the coordinator knows about one transactional id."""

    __slots__ = ("deadline_ms", "epoch", "offsets", "timeout_ms", "touched", "transactional_id")

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self.epoch = -1
        self.timeout_ms = 0
        self.deadline_ms = NEVER
        """When the open transaction is aborted; NEVER while none is open."""
        self.touched: dict[TopicPartition, tuple[SimPartition, list[int]]] = {}
        """Offsets written by the open transaction."""
        self.offsets: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        """Offsets sent by the open transaction, by group."""


class SimCluster:
    """Everything a broker would know. Clients are in readers.py, group_reader.py and writers.py."""

    def __init__(self, clock: SimClock, session_timeout_ms: int = 6_000) -> None:
        self.clock = clock
        self.session_timeout_ms = session_timeout_ms
        self.topics: dict[str, list[SimPartition]] = {}
        self.configs: dict[str, dict[str, str]] = {}
        self.groups: dict[str, SimGroup] = {}
        self.transactions: dict[str, SimTransaction] = {}
        self.before: Hook | None = None
        """Fault hook: an operation fails without any effect."""
        self.after: Hook | None = None
        """Fault hook: an operation took effect but its answer is lost."""
        self.on_commit: Callable[[SimTransaction], None] | None = None
        """Told about every transaction at the moment it commits, while it still knows its records and offsets."""
        self._keyless: dict[str, int] = {}
        self._look_at_ms = NEVER

    # ------------------------------------------------------------ topics

    def ensure_topic(self, spec: TopicSpec) -> None:
        partitions = self.topics.setdefault(spec.topic, [])
        while len(partitions) < spec.partitions:
            partitions.append(SimPartition(TopicPartition(spec.topic, len(partitions))))
        self.configs.setdefault(spec.topic, {}).update(spec.config)
        for group in self.groups.values():
            if any(spec.topic in member.topics for member in group.members.values()):
                group.rebalance()

    def delete_topic(self, topic: str) -> None:
        self.topics.pop(topic, None)
        self.configs.pop(topic, None)
        for group in self.groups.values():
            for place in [place for place in group.committed if place.topic == topic]:
                del group.committed[place]

    def find(self, place: TopicPartition) -> SimPartition | None:
        partitions = self.topics.get(place.topic)
        return partitions[place.partition] if partitions and place.partition < len(partitions) else None

    def existing(self, place: TopicPartition) -> SimPartition:
        """Raises Retriable for a partition that does not exist, as metadata calls of the real client do."""
        found = self.find(place)
        if found is None:
            raise Retriable(f"{place.topic}[{place.partition}] does not exist")
        return found

    def choose_partition(self, topic: str, key: bytes | None) -> int:
        """Keyed like Kafka's murmur2 partitioner; records without a key go round."""
        count = len(self.topics[topic])
        if key is not None:
            return keyed_partition(key, count)
        turn = self._keyless.get(topic, 0)
        self._keyless[topic] = turn + 1
        return turn % count

    def record_bytes_max(self, topic: str) -> int:
        return int(self.configs[topic].get("max.message.bytes", RECORD_BATCH_MAX))

    # ------------------------------------------------------------ groups

    def group(self, name: str) -> SimGroup:
        group = self.groups.get(name)
        if group is None:
            group = self.groups[name] = SimGroup(name, self.session_timeout_ms)
        return group

    def stable_offsets(
        self, name: str, places: Sequence[TopicPartition]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Raises Retriable while an open transaction has sent an offset for one of them (UNSTABLE_OFFSET_COMMIT)."""
        group = self.group(name)
        for place in places:
            if group.unstable(place):
                raise Retriable(f"committed offset of {place.topic}[{place.partition}]: not stable yet")
        return {place: group.committed.get(place) for place in places}

    def settle_group(self, group: SimGroup) -> None:
        if group.rebalancing:
            group.complete({topic: len(partitions) for topic, partitions in self.topics.items()})

    # ------------------------------------------------------------ time and faults

    def enter(self, operation: str, client: str) -> int:
        """Every client call starts here: timeouts that have passed take effect first. Returns the time."""
        if self.before is not None:
            self.before(operation, client)  # may let time pass
        now_ms = self.clock.now_ms()
        if now_ms >= self._look_at_ms:
            self._expire(now_ms)
        return now_ms

    def leave(self, operation: str, client: str) -> None:
        if self.after is not None:
            self.after(operation, client)

    def look_at(self, at_ms: int) -> None:
        """Something may time out then."""
        self._look_at_ms = min(self._look_at_ms, at_ms)

    def _expire(self, now_ms: int) -> None:
        following = NEVER
        for transaction in self.transactions.values():
            if transaction.deadline_ms <= now_ms:
                transaction.epoch += 1
                self.abort(transaction, now_ms)
            following = min(following, transaction.deadline_ms)
        for group in self.groups.values():
            again_ms = group.expire(now_ms)
            self.settle_group(group)
            following = min(following, NEVER if again_ms is None else again_ms)
        self._look_at_ms = following

    # ------------------------------------------------------------ transactions

    def take(self, transactional_id: str, timeout_ms: int, now_ms: int) -> int:
        """InitProducerId: aborts what is open, fences the last owner. Returns the new epoch."""
        transaction = self.transactions.setdefault(transactional_id, SimTransaction(transactional_id))
        transaction.epoch += 1
        self.abort(transaction, now_ms)
        transaction.timeout_ms = timeout_ms
        return transaction.epoch

    def touch(self, transaction: SimTransaction, now_ms: int) -> None:
        """The transaction reached the coordinator: its timeout runs."""
        if transaction.deadline_ms == NEVER:
            transaction.deadline_ms = now_ms + transaction.timeout_ms
            self.look_at(transaction.deadline_ms)

    def commit(self, transaction: SimTransaction, now_ms: int) -> None:
        """Records become visible and offsets committed in one step."""
        for group_name, sent in transaction.offsets.items():
            self.group(group_name).committed.update(sent)
        if self.on_commit is not None:
            self.on_commit(transaction)
        self._decide(transaction, now_ms)

    def abort(self, transaction: SimTransaction, now_ms: int) -> None:
        """Records of the open transaction, if any, are erased and its offsets forgotten."""
        for partition, offsets in transaction.touched.values():
            partition.erase(offsets)
        self._decide(transaction, now_ms)

    def _decide(self, transaction: SimTransaction, now_ms: int) -> None:
        name = transaction.transactional_id
        for partition, _offsets in transaction.touched.values():
            partition.decide(name, now_ms)
        for group_name, sent in transaction.offsets.items():
            group = self.group(group_name)
            for place in sent:
                group.release_offset(place, name)
        transaction.touched = {}
        transaction.offsets = {}
        transaction.deadline_ms = NEVER
