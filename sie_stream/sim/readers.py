"""Readers of the simulated log. poll() never waits: the simulator moves time between turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sie_stream.errors import FatalLogError, Fenced, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import GroupEvents
from sie_stream.records import CommittedOffset, LogRecord
from sie_stream.sim.cluster import SimCluster
from sie_stream.sim.groups import SimMember


class SimReader:
    """Implements ports.LogReader."""

    def __init__(self, cluster: SimCluster, group: str, client: str) -> None:
        self._cluster = cluster
        self.group = group
        self.client = client
        self._positions: dict[TopicPartition, int] = {}
        self._paused: dict[TopicPartition, None] = {}
        self._ready: dict[TopicPartition, None] = {}
        """Partitions that may have something to read, in the order in which they will be asked."""
        self._lost: dict[TopicPartition, tuple[int, int]] = {}

    def stir(self, place: TopicPartition) -> None:
        """A partition of ours may have something new."""
        self._ready[place] = None

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        for place, offset in positions.items():
            if place in self._positions:
                raise FatalLogError(f"{place} is assigned already")
            self._positions[place] = offset
            self._watch(place)

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._positions[place] = offset
        self._ready[place] = None

    def _watch(self, place: TopicPartition) -> None:
        partition = self._cluster.find(place)
        if partition is not None:
            partition.watchers.append(self)
        self._ready[place] = None

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        for place in partitions:
            if self._positions.pop(place, None) is None:
                raise FatalLogError(f"{place} is not assigned")
            self._paused.pop(place, None)
            self._ready.pop(place, None)
            partition = self._cluster.find(place)
            if partition is not None and self in partition.watchers:
                partition.watchers.remove(self)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused.update(dict.fromkeys(partitions))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        for place in partitions:
            self._paused.pop(place, None)
            if place in self._positions:
                self._ready[place] = None

    def assigned(self) -> list[TopicPartition]:
        return list(self._positions)

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        """What is visible now; `wait_ms` only matters in the real world."""
        now_ms = self._cluster.enter("poll", self.client)
        if not self._ready:
            return []
        records: list[LogRecord] = []
        for place in list(self._ready):
            if self._read(place, now_ms, records_max, records):
                del self._ready[place]
            if len(records) >= records_max:
                # Whoever has more waits behind the others.
                if place in self._ready:
                    del self._ready[place]
                    self._ready[place] = None
                break
        return records

    def _read(self, place: TopicPartition, now_ms: int, records_max: int, into: list[LogRecord]) -> bool:
        """Read one partition; True when there is nothing more to come until it stirs."""
        if place in self._paused:
            return True
        partition = self._cluster.find(place)
        if partition is None:
            return False
        if self not in partition.watchers:
            partition.watchers.append(self)
        if now_ms < partition.held_until_ms:
            return False
        position = self._positions[place]
        if not partition.start <= position <= partition.end:
            self._lost[place] = (position, partition.start)
            position = partition.start
        position = partition.read(position, records_max - len(into), into)
        self._positions[place] = position
        return position >= partition.lso

    def position(self, partition: TopicPartition) -> int:
        return self._positions[partition]

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, CommittedOffset | None]:
        self._cluster.enter("committed", self.client)
        return self._cluster.stable_offsets(self.group, list(partitions))

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._cluster.enter("offsets", self.client)
        return {place: self._cluster.existing(place).start for place in partitions}

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._cluster.enter("offsets", self.client)
        return {place: self._cluster.existing(place).lso for place in partitions}

    def offsets_at(self, partitions: Iterable[TopicPartition], timestamp_ms: int) -> dict[TopicPartition, int]:
        self._cluster.enter("offsets", self.client)
        return {place: self._cluster.existing(place).offset_at(timestamp_ms) for place in partitions}

    def partitions_of(self, topic: str) -> int:
        self._cluster.enter("metadata", self.client)
        return len(self._cluster.topics.get(topic, ()))

    def lost_positions(self) -> dict[TopicPartition, tuple[int, int]]:
        lost, self._lost = self._lost, {}
        return lost

    def close(self) -> None:
        self.unassign(list(self._positions))


class SimLatestReader(SimReader):
    """Sees where partitions end for those who write, also inside transactions that are open."""

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._cluster.enter("offsets", self.client)
        return {place: self._cluster.existing(place).end for place in partitions}


class SimGroupReader:
    """Implements ports.GroupReader. A member that is not polled for the session timeout is put out of the group."""

    def __init__(self, cluster: SimCluster, group: str, instance: str, client: str) -> None:
        self._cluster = cluster
        self._group = cluster.group(group)
        self._reader = SimReader(cluster, group, client)
        self.group = group
        self.instance = instance
        self.client = client
        self._topics: tuple[str, ...] = ()
        self._events: GroupEvents | None = None
        self._member: SimMember | None = None
        self._generation = -1

    def subscribe(self, topics: Sequence[str], events: GroupEvents) -> None:
        self._topics = tuple(topics)
        self._events = events
        if self._member is not None and self._member.member in self._group.members:
            self._member.topics = self._topics
            self._group.rebalance()

    def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        now_ms = self._cluster.enter("poll", self.client)
        member = self._current_member(now_ms)
        if self._group.rebalancing and not member.joined:
            self._give_up()
            member.joined = True
        self._cluster.settle_group(self._group)
        if self._group.rebalancing:
            return []
        if member.generation != self._group.generation and not self._take_up(member):
            return []
        return self._reader.poll(records_max, wait_ms)

    def _current_member(self, now_ms: int) -> SimMember:
        """Our membership, joining again when the group threw us out. Raises Fenced when our instance id was taken."""
        member = self._member
        if member is not None and member.member in self._group.fenced:
            raise Fenced(f"{self.client}: instance id {self.instance!r} was taken by a newer member")
        if member is None or member.member not in self._group.members:
            self._give_up()
            member = self._member = self._group.join(self.instance, self._topics, now_ms)
        member.seen_at_ms = now_ms
        self._cluster.look_at(now_ms + self._group.session_timeout_ms)
        return member

    def _give_up(self) -> None:
        places = self._reader.assigned()
        if places and self._events is not None:
            self._events.partitions_revoked(places)
        self._reader.unassign(places)

    def _take_up(self, member: SimMember) -> bool:
        """Start the partitions of the new generation; False while their committed offsets are not stable."""
        places = self._group.assignments.get(member.member, ())
        try:
            starts = self._starts(places)
        except Retriable:
            return False
        member.generation = self._group.generation
        self._reader.assign(starts)
        if places and self._events is not None:
            self._events.partitions_assigned(places)
        return True

    def _starts(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        committed = self._cluster.stable_offsets(self.group, places)
        return {
            place: self._cluster.existing(place).start if found is None else found.offset
            for place, found in committed.items()
        }

    def rewind(self) -> None:
        self._cluster.enter("committed", self.client)
        self.seek(self._starts(self._reader.assigned()))

    def seek(self, positions: Mapping[TopicPartition, int]) -> None:
        for place, offset in positions.items():
            self._reader.seek(place, offset)

    def lost_positions(self) -> dict[TopicPartition, tuple[int, int]]:
        return self._reader.lost_positions()

    def refusal(self) -> Fenced | str | None:
        """Why the coordinator would refuse offsets of this member now (KIP-447); None when it would not."""
        member = self._member
        if member is not None and member.member in self._group.fenced:
            return Fenced(f"{self.client}: instance id {self.instance!r} was taken by a newer member")
        if member is None or member.member not in self._group.members:
            return "unknown member"
        if member.generation != self._group.generation:
            return "illegal generation"
        return None

    def close(self) -> None:
        """A dynamic member leaves the group; a static one is awaited for its session timeout."""
        self._give_up()
        if self._member is not None and not self.instance:
            self._group.leave(self._member.member)
            self._cluster.settle_group(self._group)
