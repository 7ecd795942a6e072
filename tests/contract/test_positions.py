"""Reading: positions, pausing, offsets by place and by time, what retention takes away."""

from __future__ import annotations

import pytest

from sie_stream.errors import FatalLogError
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import LogRecord, LogWrite
from tests.contract.world import World, values
from tests.waiting import PATIENCE_MS


def numbered(count: int, prefix: str = "v") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def test_records_come_back_as_they_were_written(world: World) -> None:
    topic = world.topic()
    plain = world.plain()
    before_ms = world.now_ms()
    headers = (("sie-request-id", b"r-1"), ("traceparent", b""))
    plain.write(
        [
            LogWrite(topic, b"value", b"key", 0, headers),
            LogWrite(topic, None, b"tombstone", 0),
            LogWrite(topic, b"", None, 0),
            LogWrite(topic, b"\x00\xff", b"", 0),
        ]
    )
    plain.flush(PATIENCE_MS)
    found = world.read_all(topic, 4)
    assert [(record.offset, record.key, record.value, record.headers) for record in found] == [
        (0, b"key", b"value", headers),
        (1, b"tombstone", None, ()),
        (2, None, b"", ()),
        (3, b"", b"\x00\xff", ()),
    ]
    assert all(record.topic == topic and record.partition == 0 for record in found)
    assert all(before_ms - 1_000 <= record.timestamp_ms <= world.now_ms() + 1_000 for record in found)


def test_poll_never_gives_more_than_asked_and_keeps_order(world: World) -> None:
    topic = world.topic()
    world.write(topic, numbered(25))
    reader = world.reader()
    reader.assign({TopicPartition(topic, 0): 0})
    batches: list[list[LogRecord]] = []

    def all_read() -> bool:
        batches.append(reader.poll(10, 50))
        return sum(map(len, batches)) >= 25

    world.until(all_read, "all records")
    assert all(len(batch) <= 10 for batch in batches)
    assert values([record for batch in batches for record in batch]) == numbered(25)


def test_assigning_starts_where_told_and_leaves_others_alone(world: World) -> None:
    topic = world.topic(3)
    for partition in range(3):
        world.write(topic, numbered(5, f"p{partition}-"), partition)
    reader = world.reader()
    reader.assign({TopicPartition(topic, 0): 3})
    assert values(world.collect(reader, 2)) == [b"p0-3", b"p0-4"]
    reader.assign({TopicPartition(topic, 1): 4, TopicPartition(topic, 2): 5})
    assert values(world.collect(reader, 1)) == [b"p1-4"]
    world.write(topic, [b"p2-new"], 2)
    assert values(world.collect(reader, 1)) == [b"p2-new"]


def test_unassigned_partitions_are_not_read_and_can_come_back_elsewhere(world: World) -> None:
    topic = world.topic(2)
    place = TopicPartition(topic, 0)
    world.write(topic, numbered(100))
    reader = world.reader()
    reader.assign({place: 0, TopicPartition(topic, 1): 0})
    assert len(world.collect(reader, 10, records_max=10)) == 10
    reader.unassign([place])
    assert world.nothing(reader) == []
    reader.assign({place: 50})
    assert values(world.collect(reader, 50)) == numbered(100)[50:]


def test_assigning_twice_is_an_error(world: World) -> None:
    place = TopicPartition(world.topic(), 0)
    reader = world.reader()
    reader.assign({place: 0})
    with pytest.raises(FatalLogError):
        reader.assign({place: 0})


def test_paused_partitions_hold_their_position(world: World) -> None:
    topic = world.topic(2)
    places = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    world.write(topic, numbered(50))
    reader = world.reader()
    reader.assign(dict.fromkeys(places, 0))
    assert values(world.collect(reader, 10, records_max=10)) == numbered(10)
    reader.pause([places[0]])
    world.write(topic, [b"other"], 1)
    assert values(world.collect(reader, 1)) == [b"other"]
    assert world.nothing(reader) == []
    reader.resume([places[0]])
    assert values(world.collect(reader, 40)) == numbered(50)[10:]


def test_beginning_and_end(world: World) -> None:
    topic = world.topic(2)
    places = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    world.write(topic, numbered(5))
    reader = world.reader()
    assert reader.beginning_offsets(places) == dict.fromkeys(places, 0)
    assert reader.end_offsets(places) == {places[0]: 5, places[1]: 0}
    world.delete_before(places[0], 2)
    assert reader.beginning_offsets(places) == {places[0]: 2, places[1]: 0}
    assert reader.end_offsets([]) == {}


def test_offsets_at_a_time(world: World) -> None:
    topic = world.topic(2)
    place, empty = TopicPartition(topic, 0), TopicPartition(topic, 1)
    world.write(topic, [b"old"])
    between_ms = world.now_ms() + 1
    world.until(lambda: world.now_ms() > between_ms + 5, "the clock to move")
    world.write(topic, [b"new"])
    reader = world.reader()
    assert reader.offsets_at([place, empty], 0) == {place: 0, empty: 0}
    assert reader.offsets_at([place], between_ms) == {place: 1}
    assert reader.offsets_at([place], world.now_ms() + 60_000) == {place: 2}


def test_partitions_of_a_topic(world: World) -> None:
    topic = world.topic(2)
    reader = world.reader()
    assert reader.partitions_of(topic) == 2
    assert reader.partitions_of(world.name("missing")) == 0
    world.admin().ensure([TopicSpec(topic, 5, {})])
    assert reader.partitions_of(topic) == 5
    world.admin().ensure([TopicSpec(topic, 1, {})])
    assert reader.partitions_of(topic) == 5, "never fewer"


@pytest.mark.parametrize("paused", [False, True])
def test_a_position_that_retention_took_is_reported_once(world: World, paused: bool) -> None:
    topic = world.topic()
    place = TopicPartition(topic, 0)
    world.write(topic, numbered(10))
    world.delete_before(place, 6)
    reader = world.reader()
    reader.assign({place: 2})
    if paused:
        reader.pause([place])
        assert world.nothing(reader) == []
        reader.resume([place])
    assert values(world.collect(reader, 4)) == numbered(10)[6:]
    assert reader.lost_positions() == {place: (2, 6)}
    assert reader.lost_positions() == {}


def test_a_position_beyond_the_end_continues_at_the_earliest(world: World) -> None:
    topic = world.topic()
    place = TopicPartition(topic, 0)
    world.write(topic, numbered(3))
    reader = world.reader()
    reader.assign({place: 100})
    assert values(world.collect(reader, 3)) == numbered(3)
    assert reader.lost_positions() == {place: (100, 0)}


def test_keys_land_on_the_same_partitions_as_everywhere(world: World) -> None:
    """Numbers from Kafka's own tests of its murmur2 (UtilsTest), and a record per key on the real thing."""
    topic = world.topic(7)
    keys = [
        b"",
        b"a",
        b"ab",
        b"abc",
        b"21",
        b"foobar",
        b"a-little-bit-long-string",
        b"\xff\xfe\xfd",
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
    ]
    plain = world.plain()
    plain.write([LogWrite(topic, key, key) for key in keys])
    plain.flush(PATIENCE_MS)
    found = {record.key: record.partition for record in world.read_all(topic, len(keys), partitions=7)}
    murmur = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    for key, signed in murmur.items():
        assert found[key] == (signed & 0x7FFFFFFF) % 7
    assert found == dict(zip(keys, (found[key] for key in keys), strict=True))
    world_partitions[type(world).__name__] = [found[key] for key in keys]
    assert len({tuple(partitions) for partitions in world_partitions.values()}) == 1


world_partitions: dict[str, list[int]] = {}
"""Where each implementation put the keys."""


def test_position_reaches_the_end_behind_markers(world: World) -> None:
    topic = world.topic()
    place = TopicPartition(topic, 0)
    writer = world.ready_writer()
    writer.begin()
    writer.write([LogWrite(topic, b"seen", None, 0)])
    writer.commit()
    writer.begin()
    writer.write([LogWrite(topic, b"aborted", None, 0)])
    writer.abort()
    reader = world.reader()
    reader.assign({place: 0})
    assert reader.position(place) == 0
    assert values(world.collect(reader, 1)) == [b"seen"]

    def at_the_end() -> bool:
        assert reader.poll(10, 50) == []
        return reader.position(place) == reader.end_offsets([place])[place]

    world.until(at_the_end, "the end")
    reader.unassign([place])
    reader.assign({place: 0})
    assert reader.position(place) == 0
