"""Writers: sizes, deliveries, plain writing."""

from __future__ import annotations

import pytest

from sie_stream.errors import RecordTooLarge, Retriable
from sie_stream.records import LogWrite
from tests.contract.world import RECORD_BYTES_MAX, World, values
from tests.waiting import PATIENCE_MS


def test_an_oversize_record_is_refused_before_anything_is_written(world: World) -> None:
    topic = world.topic()
    writer = world.ready_writer()
    writer.begin()
    with pytest.raises(RecordTooLarge):
        writer.write([LogWrite(topic, b"small", None, 0), LogWrite(topic, bytes(RECORD_BYTES_MAX + 1), None, 0)])
    writer.write([LogWrite(topic, bytes(RECORD_BYTES_MAX), None, 0)])
    writer.commit()
    found = world.read_all(topic, 1)
    assert [len(record.value or b"") for record in found] == [RECORD_BYTES_MAX]


def test_key_and_headers_count(world: World) -> None:
    topic = world.topic()
    writer = world.ready_writer()
    writer.begin()
    with pytest.raises(RecordTooLarge):
        writer.write([LogWrite(topic, bytes(RECORD_BYTES_MAX - 5), b"123456", 0)])
    with pytest.raises(RecordTooLarge):
        writer.write([LogWrite(topic, bytes(RECORD_BYTES_MAX - 5), None, 0, (("name", b"value"),))])
    writer.abort()


def test_a_topic_with_a_lower_limit_fails_the_commit(world: World) -> None:
    narrow, wide = world.topic(1, {"max.message.bytes": "1000"}), world.topic()
    incompressible = bytes((number * number * 7919 >> 3) & 0xFF for number in range(50_000))
    writer = world.ready_writer()
    writer.begin()
    writer.write([LogWrite(wide, b"no", None, 0), LogWrite(narrow, incompressible, None, 0)])
    with pytest.raises(RecordTooLarge):
        writer.commit()
    writer.abort()
    writer.begin()
    writer.write([LogWrite(wide, b"yes", None, 0)])
    writer.commit()
    assert values(world.read_all(wide, 1)) == [b"yes"]


def test_plain_records_are_there_after_flush(world: World) -> None:
    topic = world.topic(3)
    plain = world.plain()
    plain.write([LogWrite(topic, str(number).encode(), None, number % 3) for number in range(9)])
    plain.flush(PATIENCE_MS)
    assert len(world.read_all(topic, 9, partitions=3)) == 9


def test_whoever_waits_for_plain_records_learns_their_offsets(world: World) -> None:
    topic, other = world.topic(), world.topic()
    plain = world.plain()
    plain.write([LogWrite(topic, b"before"), LogWrite(other, b"elsewhere")])
    assert plain.delivered([LogWrite(topic, b"a"), LogWrite(topic, b"b")], PATIENCE_MS) == [1, 2]
    assert plain.delivered([LogWrite(topic, b"c")], PATIENCE_MS) == [3]
    with pytest.raises(Retriable):
        plain.delivered([LogWrite(world.name("missing"), b"x")], 200)
    assert plain.delivered([LogWrite(topic, b"d")], PATIENCE_MS) == [4]


def test_plain_records_without_a_key_go_somewhere(world: World) -> None:
    topic = world.topic(3)
    plain = world.plain()
    plain.write([LogWrite(topic, b"x") for _ in range(5)])
    plain.flush(PATIENCE_MS)
    assert len(world.read_all(topic, 5, partitions=3)) == 5


def test_a_plain_record_that_cannot_be_delivered_is_reported_by_flush(world: World) -> None:
    plain = world.plain()
    plain.write([LogWrite(world.name("missing"), b"x")])
    with pytest.raises(Retriable):
        plain.flush(200)


def test_an_oversize_plain_record_is_refused(world: World) -> None:
    topic = world.topic()
    with pytest.raises(RecordTooLarge):
        world.plain().write([LogWrite(topic, bytes(RECORD_BYTES_MAX + 1))])
