"""Consumer groups of the simulated cluster: committed offsets, membership, generations.

Rebalances are eager and have two phases, as in Kafka: every member gives up what it has in its own poll(), and only
when all have rejoined (or timed out) does the next generation share the partitions out.
"""

from __future__ import annotations

from collections.abc import Sequence

from sie_stream.ids import TopicPartition
from sie_stream.records import CommittedOffset


class SimMember:
    """What the coordinator knows about one member."""

    __slots__ = ("generation", "instance", "joined", "member", "seen_at_ms", "topics")

    def __init__(self, member: str, instance: str, topics: tuple[str, ...], now_ms: int) -> None:
        self.member = member
        self.instance = instance
        self.topics = topics
        self.seen_at_ms = now_ms
        self.generation = -1
        """Generation whose assignment this member has taken up."""
        self.joined = True
        """Has (re)joined the rebalance in progress."""


class SimGroup:
    """Offsets and members of one group."""

    def __init__(self, name: str, session_timeout_ms: int) -> None:
        self.name = name
        self.session_timeout_ms = session_timeout_ms
        self.committed: dict[TopicPartition, CommittedOffset] = {}
        self.generation = 0
        self.members: dict[str, SimMember] = {}
        self.fenced: dict[str, None] = {}
        """Members whose static instance id was taken by a newer member."""
        self.assignments: dict[str, tuple[TopicPartition, ...]] = {}
        self.rebalancing = False
        self._pending: dict[TopicPartition, dict[str, None]] = {}
        self._names = 0

    # ------------------------------------------------------------ offsets

    def unstable(self, place: TopicPartition) -> bool:
        """An open transaction has sent an offset for this partition."""
        return bool(self._pending.get(place))

    def hold_offset(self, place: TopicPartition, transactional_id: str) -> None:
        self._pending.setdefault(place, {})[transactional_id] = None

    def release_offset(self, place: TopicPartition, transactional_id: str) -> None:
        self._pending[place].pop(transactional_id, None)

    # ------------------------------------------------------------ members

    def join(self, instance: str, topics: Sequence[str], now_ms: int) -> SimMember:
        """A new member. One with a known static instance takes that one's place, without a rebalance."""
        self._names += 1
        member = SimMember(f"{instance or 'member'}-{self._names:06d}", instance, tuple(topics), now_ms)
        for known in list(self.members.values()):
            if instance and known.instance == instance:
                self._replace(known, member)
                return member
        self.members[member.member] = member
        self.rebalance()
        member.joined = True
        return member

    def _replace(self, old: SimMember, new: SimMember) -> None:
        del self.members[old.member]
        self.fenced[old.member] = None
        self.members[new.member] = new
        self.assignments[new.member] = self.assignments.pop(old.member, ())
        new.joined = True
        if old.topics != new.topics:
            self.rebalance()
            new.joined = True

    def leave(self, member: str) -> None:
        if self.members.pop(member, None) is not None:
            self.assignments.pop(member, None)
            self.rebalance()

    def rebalance(self) -> None:
        self.rebalancing = True
        for member in self.members.values():
            member.joined = False

    def expire(self, now_ms: int) -> int | None:
        """Remove members that were not heard of within the session timeout; returns when to look again."""
        for member in list(self.members.values()):
            if now_ms - member.seen_at_ms >= self.session_timeout_ms:
                self.leave(member.member)
        if not self.members:
            return None
        return min(member.seen_at_ms for member in self.members.values()) + self.session_timeout_ms

    def complete(self, partitions: dict[str, int]) -> None:
        """Share partitions out once every member has rejoined. `partitions`: topic -> number."""
        if not self.rebalancing or not all(member.joined for member in self.members.values()):
            return
        self.generation += 1
        self.rebalancing = False
        order = sorted(self.members.values(), key=lambda one: (one.instance, one.member))
        shares: dict[str, list[TopicPartition]] = {one.member: [] for one in order}
        for topic in sorted({topic for one in order for topic in one.topics}):
            takers = [one.member for one in order if topic in one.topics]
            for number in range(partitions.get(topic, 0)):
                shares[takers[number % len(takers)]].append(TopicPartition(topic, number))
        self.assignments = {member: tuple(share) for member, share in shares.items()}
