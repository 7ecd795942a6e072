"""A reader whose client hears nothing more goes on with a new one, where it stood."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientPartition

from sie_stream.edge import kafka_hearing, kafka_reader
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.kafka_log import KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import CommittedOffset, LogWrite
from tests.waiting import wait_until
from topics.edge.admin import KafkaAdmin

TOPIC = "deaf"
PLACES = [TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)]

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_hearing, "ASK_AFTER_S", 0.5)
    monkeypatch.setattr(kafka_hearing, "ASK_AGAIN_S", 0.5)


def test_it_goes_on_where_it_stood_and_can_still_commit(kafka: EmbeddedBroker) -> None:
    KafkaAdmin(kafka.bootstrap_servers).ensure([TopicSpec(TOPIC, 2, {})])
    plain = KafkaPlainWriter(kafka.bootstrap_servers)
    reader = KafkaReader(kafka.bootstrap_servers, "deaf-group")
    reader.assign(dict.fromkeys(PLACES, 0))
    heard: list[tuple[int, bytes | None]] = []

    def hears(count: int) -> bool:
        heard.extend((record.partition, record.value) for record in reader.poll(100, 50))
        return len(heard) >= count

    plain.write([LogWrite(TOPIC, b"first", None, number) for number in (0, 1)])
    wait_until(lambda: hears(2), "the first records")
    reader.pause([PLACES[1]])
    # What librdkafka does to a client that lost its broker: nothing comes, and nothing is told.
    client = reader._consumer
    client.pause([ClientPartition(*place) for place in PLACES])
    plain.write([LogWrite(TOPIC, b"second", None, number) for number in (0, 1)])
    wait_until(lambda: hears(3), "the record that the deaf client did not get")
    assert heard[2:] == [(0, b"second")], "from where it stood, and what is paused stays so"
    assert reader._consumer is not client
    reader.resume([PLACES[1]])
    wait_until(lambda: hears(4), "what was paused")
    writer = KafkaTransactionalWriter(kafka.bootstrap_servers, "deaf-id")
    writer.init()
    writer.begin()
    writer.send_offsets(reader, {PLACES[0]: CommittedOffset(2)})
    writer.commit()
    assert reader.committed(PLACES[:1]) == {PLACES[0]: CommittedOffset(2)}
    for one in (writer, reader, plain):
        one.close()


def test_a_reader_with_nothing_to_read_keeps_its_client(kafka: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it asks about its silence never makes its owner's poll wait."""
    asked: list[object] = []
    look_up = kafka_reader.list_offsets

    def noted(client: Consumer, *more: Any) -> dict[TopicPartition, int]:
        asked.append(client)
        return look_up(client, *more)

    monkeypatch.setattr(kafka_reader, "list_offsets", noted)
    KafkaAdmin(kafka.bootstrap_servers).ensure([TopicSpec("quiet", 1, {})])
    place = TopicPartition("quiet", 0)
    aborted = KafkaTransactionalWriter(kafka.bootstrap_servers, "quiet-id")
    aborted.init()
    aborted.begin()
    aborted.write([LogWrite("quiet", b"never", None, 0)])
    reader = KafkaReader(kafka.bootstrap_servers, "quiet-group")
    reader.assign({place: 0})
    client = reader._consumer
    for _ in range(40):
        assert reader.poll(100, 50) == []
    aborted.abort()  # the end moves behind a marker, which is never returned
    for _ in range(60):
        assert reader.poll(100, 50) == []
    assert reader._consumer is client
    assert asked
    assert client not in asked
    for one in (aborted, reader):
        one.close()
