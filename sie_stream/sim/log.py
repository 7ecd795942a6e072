"""SimLog: a whole Kafka cluster in memory, under virtual time, for simulation and contract tests.

What it keeps of Kafka: offsets taken by transaction markers, aborted records, the last stable offset, transaction
timeouts, producer epochs and fencing, committed offsets with metadata and its cap, stable offsets, group generations
with static members and session timeouts, record size limits, retention. Compaction is left out: the latest value of a
key wins anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import LogRecord
from sie_stream.sim.clock import SimClock
from sie_stream.sim.cluster import SimCluster
from sie_stream.sim.readers import SimGroupReader, SimLatestReader, SimReader
from sie_stream.sim.writers import RECORD_BYTES_MAX, SimPlainWriter, SimTransactionalWriter


class SimAdmin:
    """Implements ports.TopicAdmin."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster

    def ensure(self, topics: Sequence[TopicSpec]) -> None:
        self._cluster.enter("ensure", "admin")
        for spec in topics:
            self._cluster.ensure_topic(spec)

    def describe(self, topics: Sequence[str]) -> dict[str, TopicSpec]:
        """Topics that exist, with the configuration that was set."""
        found = {}
        for topic in topics:
            if topic in self._cluster.topics:
                config = dict(self._cluster.configs[topic])
                found[topic] = TopicSpec(topic, len(self._cluster.topics[topic]), config)
        return found

    def delete(self, topics: Sequence[str]) -> None:
        for topic in topics:
            self._cluster.delete_topic(topic)


class SimLog:
    """The cluster and its clients. `client` names appear in fault hooks; they default to group or id."""

    def __init__(self, clock: SimClock | None = None, session_timeout_ms: int = 6_000) -> None:
        self.clock = clock or SimClock()
        self.cluster = SimCluster(self.clock, session_timeout_ms)

    def reader(self, group: str, client: str = "") -> SimReader:
        return SimReader(self.cluster, group, client or group)

    def latest_reader(self, group: str, client: str = "") -> SimReader:
        """Its end offsets are high watermarks; it is not meant to be polled."""
        return SimLatestReader(self.cluster, group, client or group)

    def group_reader(self, group: str, instance: str = "", client: str = "") -> SimGroupReader:
        return SimGroupReader(self.cluster, group, instance, client or instance or group)

    def transactional_writer(
        self,
        transactional_id: str,
        transaction_timeout_ms: int = 10_000,
        record_bytes_max: int = RECORD_BYTES_MAX,
        client: str = "",
    ) -> SimTransactionalWriter:
        return SimTransactionalWriter(
            self.cluster, transactional_id, transaction_timeout_ms, record_bytes_max, client or transactional_id
        )

    def plain_writer(self, record_bytes_max: int = RECORD_BYTES_MAX, client: str = "plain") -> SimPlainWriter:
        return SimPlainWriter(self.cluster, record_bytes_max, client)

    def admin(self) -> SimAdmin:
        return SimAdmin(self.cluster)

    # ------------------------------------------------------------ what only a simulator can do

    def hold(self, place: TopicPartition, until_ms: int) -> None:
        """Fault: nothing of this partition is delivered before `until_ms`."""
        self.cluster.existing(place).held_until_ms = until_ms

    def delete_before(self, place: TopicPartition, offset: int) -> None:
        """Retention removed everything below `offset`."""
        self.cluster.existing(place).delete_before(offset)

    def evict(self, group: str, member_index: int = 0) -> None:
        """Fault: the coordinator throws the n-th member out, as after a missed session."""
        found = self.cluster.group(group)
        members = sorted(found.members)
        if members:
            found.leave(members[member_index % len(members)])

    def visible(self, topic: str) -> list[LogRecord]:
        """Every record a read_committed reader can see now, partition by partition. For checkers."""
        records: list[LogRecord] = []
        for partition in self.cluster.topics.get(topic, ()):
            partition.read(partition.start, 1 << 62, records)
        return records

    def digest(self) -> str:
        """Fingerprint of all topics and committed offsets: equal for equal histories."""
        state = hashlib.blake2b(digest_size=16)
        for topic in sorted(self.cluster.topics):
            for partition in self.cluster.topics[topic]:
                state.update(repr((topic, partition.start, partition.end, partition.entries)).encode())
        for name in sorted(self.cluster.groups):
            state.update(repr(sorted(self.cluster.groups[name].committed.items())).encode())
        return state.hexdigest()
