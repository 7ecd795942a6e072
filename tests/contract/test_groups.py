"""Group members: sharing, revoking, generations that fence, static members, rewinding."""

from __future__ import annotations

import pytest

from sie_stream.errors import Fenced, LogError, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.ports import GroupReader
from sie_stream.records import LogRecord, LogWrite
from tests.contract.world import SESSION_TIMEOUT_MS, Events, World, offset_at, values


def member(
    world: World, group: str, topic: str, instance: str = "", idle_ms: int = 30_000
) -> tuple[GroupReader, Events]:
    reader = world.group_reader(group, instance, idle_ms)
    events = Events()
    reader.subscribe([topic], events)
    return reader, events


def places(topic: str, count: int) -> set[TopicPartition]:
    return {TopicPartition(topic, number) for number in range(count)}


def poll_until_owned(world: World, readers: list[GroupReader], all_events: list[Events], count: int) -> list[LogRecord]:
    """Poll everybody until together they own `count` partitions, each something."""
    found: list[LogRecord] = []

    def shared() -> bool:
        for reader in readers:
            found.extend(reader.poll(1_000, 50))
        return sum(len(events.owned) for events in all_events) == count and all(events.owned for events in all_events)

    world.until(shared, f"{count} partitions shared by {len(readers)}")
    return found


def test_a_group_starts_at_the_earliest_and_continues_at_the_committed_offset(world: World) -> None:
    topic = world.topic()
    group = world.name("group")
    world.write(topic, [b"0", b"1", b"2"])
    reader, events = member(world, group, topic)
    assert values(world.collect(reader, 3)) == [b"0", b"1", b"2"]
    assert events.owned == places(topic, 1)
    writer = world.ready_writer()
    writer.begin()
    writer.send_offsets(reader, {TopicPartition(topic, 0): offset_at(2)})
    writer.commit()
    reader.close()
    again, _ = member(world, group, topic)
    assert values(world.collect(again, 1)) == [b"2"]


def test_partitions_are_shared_and_taken_over(world: World) -> None:
    topic = world.topic(4)
    group = world.name("group")
    first, first_events = member(world, group, topic)
    poll_until_owned(world, [first], [first_events], 4)
    second, second_events = member(world, group, topic)
    poll_until_owned(world, [first, second], [first_events, second_events], 4)
    assert first_events.owned | second_events.owned == places(topic, 4)
    assert not first_events.owned & second_events.owned
    assert second_events.owned <= set(first_events.revoked)
    second.close()
    assert second_events.owned == set()
    poll_until_owned(world, [first], [first_events], 4)


def test_what_was_done_can_be_committed_while_partitions_are_revoked(world: World) -> None:
    topic = world.topic(2)
    group = world.name("group")
    for partition in range(2):
        world.write(topic, [b"0", b"1"], partition)
    first, first_events = member(world, group, topic)
    assert len(world.collect(first, 4)) == 4
    writer = world.ready_writer()

    def promise() -> None:
        writer.begin()
        writer.send_offsets(first, {place: offset_at(2) for place in sorted(places(topic, 2))})
        writer.commit()

    first_events.on_revoked = promise
    second, second_events = member(world, group, topic)
    seen = poll_until_owned(world, [first, second], [first_events, second_events], 2)
    assert seen == [], "nothing is read again"
    first_events.on_revoked = lambda: None


def test_a_member_of_the_past_cannot_commit(world: World) -> None:
    """KIP-447: its partitions were given to somebody else while it was not looking."""
    topic, output = world.topic(), world.topic()
    group = world.name("group")
    world.write(topic, [b"0"])
    zombie_writer = world.ready_writer()
    zombie, _ = member(world, group, topic, idle_ms=SESSION_TIMEOUT_MS)
    assert len(world.collect(zombie, 1)) == 1
    zombie_writer.begin()
    zombie_writer.write([LogWrite(output, b"from the zombie", None, 0)])
    heir, heir_events = member(world, group, topic)
    assert values(world.collect(heir, 1)) == [b"0"]
    assert heir_events.owned == places(topic, 1)
    with pytest.raises(TransactionAborted):
        zombie_writer.send_offsets(zombie, {TopicPartition(topic, 0): offset_at(1)})
    zombie_writer.abort()
    writer = world.ready_writer()
    writer.begin()
    writer.write([LogWrite(output, b"from the heir", None, 0)])
    writer.send_offsets(heir, {TopicPartition(topic, 0): offset_at(1)})
    writer.commit()
    assert values(world.read_all(output, 1)) == [b"from the heir"]


def test_offsets_that_claim_no_membership_are_taken_even_then(world: World) -> None:
    """Kafka protects a group only from its own members' past: nobody else may write offsets under its name."""
    topic = world.topic()
    place = TopicPartition(topic, 0)
    group = world.name("group")
    reader, events = member(world, group, topic)
    poll_until_owned(world, [reader], [events], 1)
    outsider = world.reader(group)
    writer = world.ready_writer()
    writer.begin()
    writer.send_offsets(outsider, {place: offset_at(1)})
    writer.commit()
    assert outsider.committed([place]) == {place: offset_at(1)}


def test_a_static_member_comes_back_to_its_partitions_and_fences_its_past(world: World) -> None:
    topic = world.topic(2)
    group = world.name("group")
    old, old_events = member(world, group, topic, "ingress-0")
    other, other_events = member(world, group, topic, "ingress-1")
    poll_until_owned(world, [old, other], [old_events, other_events], 2)
    had = set(old_events.owned)
    revoked_before = len(other_events.revoked)
    new, new_events = member(world, group, topic, "ingress-0")
    poll_until_owned(world, [new, other], [new_events, other_events], 2)
    assert new_events.owned == had
    assert len(other_events.revoked) == revoked_before, "the others keep what they have"

    def fenced() -> bool:
        try:
            old.poll(10, 50)
        except Fenced:
            return True
        return False

    world.until(fenced, "the old member to learn of it")


def test_rewinding_reads_again_from_the_committed_offset(world: World) -> None:
    topic = world.topic(2)
    group = world.name("group")
    world.write(topic, [b"0", b"1", b"2"])
    world.write(topic, [b"other"], 1)
    reader, _ = member(world, group, topic)
    assert len(world.collect(reader, 4)) == 4
    writer = world.ready_writer()
    writer.begin()
    writer.send_offsets(reader, {TopicPartition(topic, 0): offset_at(1)})
    writer.commit()
    writer.begin()
    writer.send_offsets(reader, {TopicPartition(topic, 0): offset_at(3)})
    writer.abort()
    reader.rewind()
    again = world.collect(reader, 3)
    assert sorted(values(again), key=str) == [b"1", b"2", b"other"]
    assert world.nothing(reader) == []


def test_seeking_reads_one_partition_again_and_disturbs_no_other(world: World) -> None:
    topic = world.topic(2)
    for partition in range(2):
        world.write(topic, [b"%d%d" % (partition, number) for number in range(3)], partition)
    reader, _ = member(world, world.name("group"), topic)
    assert len(world.collect(reader, 6)) == 6
    for _ in range(2):  # also once more, and before anything was read in between
        reader.seek({TopicPartition(topic, 0): 1})
    world.write(topic, [b"13"], 1)
    found = world.collect(reader, 3)
    assert sorted(value or b"" for value in values(found)) == [b"01", b"02", b"13"]


def test_an_error_of_the_owner_comes_out_of_poll(world: World) -> None:
    class Refused(LogError):
        pass

    def refuse() -> None:
        raise Refused

    topic = world.topic(2)
    group = world.name("group")
    first, first_events = member(world, group, topic)
    poll_until_owned(world, [first], [first_events], 2)
    first_events.on_revoked = refuse
    second, _ = member(world, group, topic)

    def raised() -> bool:
        second.poll(1, 20)
        try:
            first.poll(1, 20)
        except Refused:
            return True
        return False

    world.until(raised, "the owner's error")
    first_events.on_revoked = lambda: None
