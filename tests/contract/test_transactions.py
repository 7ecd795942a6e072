"""Transactions: all or nothing, seen only when decided, and only by whoever still owns the id."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sie_stream.errors import FatalLogError, Fenced, Retriable, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.offset_metadata import METADATA_CHARS_MAX
from sie_stream.ports import TopicSpec, TransactionalWriter
from sie_stream.records import LogWrite
from tests.contract.world import World, offset_at, values


def put(writer: TransactionalWriter, topic: str, *payloads: bytes, partition: int = 0) -> None:
    writer.write([LogWrite(topic, payload, b"k", partition) for payload in payloads])


def test_records_of_several_partitions_become_visible_together(world: World) -> None:
    topic = world.topic(2)
    reader = world.reader()
    places = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    reader.assign(dict.fromkeys(places, 0))
    writer = world.ready_writer()
    writer.begin()
    put(writer, topic, b"a")
    put(writer, topic, b"b", partition=1)
    assert world.nothing(reader) == []
    writer.commit()
    assert sorted(values(world.collect(reader, 2)), key=str) == [b"a", b"b"]
    assert reader.end_offsets(places) == dict.fromkeys(places, 2), "a record and a marker each"


def test_aborted_records_are_never_seen_and_keep_their_offsets(world: World) -> None:
    topic = world.topic()
    writer = world.ready_writer()
    writer.begin()
    put(writer, topic, b"never", b"never")
    writer.send_offsets(world.reader("unused-group"), {TopicPartition(topic, 0): offset_at(0)})
    writer.abort()
    writer.begin()
    put(writer, topic, b"yes")
    writer.commit()
    found = world.read_all(topic, 1)
    assert values(found) == [b"yes"]
    assert found[0].offset >= 1, "the abort marker took an offset"


def test_aborting_when_nothing_is_open_does_nothing(world: World) -> None:
    topic = world.topic()
    writer = world.ready_writer()
    writer.abort()
    writer.begin()
    put(writer, topic, b"x")
    writer.commit()
    writer.abort()
    assert values(world.read_all(topic, 1)) == [b"x"]


def test_an_empty_transaction_commits(world: World) -> None:
    writer = world.ready_writer()
    writer.begin()
    writer.commit()
    writer.begin()
    writer.abort()


def test_begin_twice_is_an_error(world: World) -> None:
    writer = world.ready_writer()
    writer.begin()
    with pytest.raises(FatalLogError):
        writer.begin()


def test_an_open_transaction_holds_back_what_was_written_after_it(world: World) -> None:
    topic = world.topic()
    place = TopicPartition(topic, 0)
    writer = world.ready_writer()
    reader = world.reader(world.name("group"))
    reader.assign({place: 0})
    writer.begin()
    put(writer, topic, b"first")
    # The client sends it on its own: once other records stay invisible, it has arrived.
    others = 0

    def held_back() -> bool:
        nonlocal others
        world.write(topic, [b"other"])
        others += 1
        return reader.end_offsets([place])[place] < others

    world.until(held_back, "the open transaction to reach the log")
    seen = len(world.nothing(reader))
    assert seen < others
    writer.commit()
    rest = world.collect(reader, others + 1 - seen)
    assert values(rest) == [b"first"] + [b"other"] * (others - seen)


def test_a_new_owner_fences_the_old_one(world: World) -> None:
    topic = world.topic()
    name = world.name("id")
    old = world.ready_writer(name)
    new = world.ready_writer(name)
    with pytest.raises(Fenced):
        _whole_transaction(old, topic)
    for call in _every_call(world, old, topic):
        with pytest.raises(Fenced):
            call()
    new.begin()
    put(new, topic, b"new")
    new.commit()
    assert values(world.read_all(topic, 1)) == [b"new"]


def test_a_new_owner_aborts_the_open_transaction_of_the_old_one(world: World) -> None:
    topic = world.topic()
    name = world.name("id")
    group = world.name("group")
    place = TopicPartition(topic, 0)
    old = world.ready_writer(name)
    old.begin()
    put(old, topic, b"old")
    old.send_offsets(world.reader(group), {place: offset_at(7)})
    new = world.ready_writer(name)
    assert world.reader(group).committed([place]) == {place: None}
    with pytest.raises(Fenced):
        _write_and_commit(old, topic)
    for call in _every_call(world, old, topic):
        with pytest.raises(Fenced):
            call()
    new.begin()
    put(new, topic, b"new")
    new.commit()
    assert values(world.read_all(topic, 1)) == [b"new"]


def test_fencing_from_outside_ends_the_open_transaction_and_lets_the_next_owner_in(world: World) -> None:
    topic = world.topic()
    name = world.name("id")
    lost = world.ready_writer(name)
    lost.begin()
    put(lost, topic, b"lost")
    world.fence(name)
    world.fence(name)
    world.write(topic, [b"behind"])
    assert values(world.read_all(topic, 1)) == [b"behind"], "nothing holds the topic back"
    with pytest.raises(Fenced):
        _write_and_commit(lost, topic)
    heir = world.ready_writer(name)
    heir.begin()
    put(heir, topic, b"heir")
    heir.commit()
    assert values(world.read_all(topic, 2)) == [b"behind", b"heir"]


def _whole_transaction(writer: TransactionalWriter, topic: str) -> None:
    writer.begin()
    _write_and_commit(writer, topic)


def _write_and_commit(writer: TransactionalWriter, topic: str) -> None:
    put(writer, topic, b"late")
    writer.commit()


def _every_call(world: World, writer: TransactionalWriter, topic: str) -> list[Callable[[], None]]:
    reader = world.reader()
    return [
        lambda: put(writer, topic, b"late"),
        lambda: writer.send_offsets(reader, {TopicPartition(topic, 0): offset_at(9)}),
        writer.commit,
        writer.begin,
        writer.abort,
        writer.init,
    ]


def test_a_transaction_that_takes_too_long_is_aborted_and_its_owner_fenced(world: World) -> None:
    topic = world.topic()
    place = TopicPartition(topic, 0)
    reader = world.reader(world.name("group"))
    writer = world.ready_writer(timeout_ms=4_000)
    writer.begin()
    put(writer, topic, b"slow")
    writer.send_offsets(reader, {place: offset_at(1)})
    world.write(topic, [b"behind"])
    assert values(world.read_all(topic, 1)) == [b"behind"]
    assert reader.committed([place]) == {place: None}
    with pytest.raises(Fenced):
        _write_and_commit(writer, topic)


def test_committed_offsets_bring_their_metadata_back(world: World) -> None:
    topic = world.topic(2)
    group = world.name("group")
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    reader = world.reader(group)
    assert reader.committed([first, second]) == {first: None, second: None}
    writer = world.ready_writer()
    writer.begin()
    put(writer, topic, b"x")
    writer.send_offsets(reader, {first: offset_at(5, "m" * METADATA_CHARS_MAX), second: offset_at(0)})
    writer.commit()
    assert world.reader(group).committed([first, second]) == {
        first: offset_at(5, "m" * METADATA_CHARS_MAX),
        second: offset_at(0),
    }


def test_too_much_metadata_aborts_the_transaction_and_the_writer_goes_on(world: World) -> None:
    topic = world.topic()
    place = TopicPartition(topic, 0)
    reader = world.reader(world.name("group"))
    writer = world.ready_writer()
    writer.begin()
    put(writer, topic, b"no")
    with pytest.raises(TransactionAborted):
        writer.send_offsets(reader, {place: offset_at(1, "m" * (METADATA_CHARS_MAX + 1))})
    with pytest.raises(TransactionAborted):
        writer.commit()
    writer.abort()
    writer.begin()
    put(writer, topic, b"yes")
    writer.send_offsets(reader, {place: offset_at(2)})
    writer.commit()
    assert values(world.read_all(topic, 1)) == [b"yes"]
    assert reader.committed([place]) == {place: offset_at(2)}


def test_offsets_of_an_open_transaction_are_not_stable(world: World) -> None:
    """committed() waits for the outcome; when it takes too long, the call may be repeated."""
    topic = world.topic()
    place = TopicPartition(topic, 0)
    group = world.name("group")
    writer = world.ready_writer(timeout_ms=30_000)
    writer.begin()
    put(writer, topic, b"x")
    writer.send_offsets(world.reader(group), {place: offset_at(3)})
    late = world.reader(group)
    with pytest.raises(Retriable):
        late.committed([place])
    writer.commit()
    assert late.committed([place]) == {place: offset_at(3)}


def test_a_topic_that_does_not_exist_aborts(world: World) -> None:
    writer = world.ready_writer()
    writer.begin()
    with pytest.raises(TransactionAborted):
        _write_and_commit(writer, world.name("missing"))
    writer.abort()
    topic = world.topic()
    writer.begin()
    put(writer, topic, b"x")
    writer.commit()
    assert values(world.read_all(topic, 1)) == [b"x"]


def test_a_partition_added_later_is_found(world: World) -> None:
    topic = world.topic(1)
    writer = world.ready_writer()
    writer.begin()
    put(writer, topic, b"0")
    writer.commit()
    world.admin().ensure([TopicSpec(topic, 3, {})])
    writer.begin()
    put(writer, topic, b"2", partition=2)
    writer.commit()
    assert sorted(values(world.read_all(topic, 2, partitions=3)), key=str) == [b"0", b"2"]
