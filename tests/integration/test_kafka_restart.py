"""A broker that dies and comes back: clients go on by themselves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker
from sie_stream.edge.kafka_log import KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.kafka_stuck import CLOSE_S
from sie_stream.errors import LogError
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import CommittedOffset, LogWrite
from tests.waiting import PATIENCE_S, wait_until, within
from topics.edge.admin import KafkaAdmin

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_transactions_and_reading_go_on_after_a_broker_restart(tmp_path: Path) -> None:
    """Guards metadata.recovery.strategy=none: without it, sending offsets after the restart hangs for good."""
    place = TopicPartition("restart", 0)
    with EmbeddedBroker.start(BrokerConfig(data_dir=tmp_path), within(PATIENCE_S)) as broker:
        KafkaAdmin(broker.bootstrap_servers).ensure([TopicSpec("restart", 1, {})])
        reader = KafkaReader(broker.bootstrap_servers, "restart-group")
        reader.assign({place: 0})
        writer = KafkaTransactionalWriter(broker.bootstrap_servers, "restart-id", transaction_timeout_ms=60_000)
        writer.init()
        read = 0

        def promise(offset: int) -> None:
            writer.begin()
            writer.write([LogWrite("restart", b"x", None, 0)])
            writer.send_offsets(reader, {place: CommittedOffset(offset)})
            writer.commit()

        def has_read(count: int) -> bool:
            nonlocal read
            read += len(reader.poll(100, 50))
            return read >= count

        promise(1)
        wait_until(lambda: has_read(1), "the first record")
        broker.kill()
        assert reader.poll(100, 1_000) == []
        broker.restart(within(PATIENCE_S))
        promise(2)
        promise(3)
        wait_until(lambda: has_read(3), "the records after the restart")
        assert reader.committed([place]) == {place: CommittedOffset(3)}
        writer.close()
        reader.close()


def test_a_client_whose_broker_went_for_good_closes_within_its_time(tmp_path: Path) -> None:
    """librdkafka's own close() of a producer with an open transaction would wait for ever."""
    place = TopicPartition("gone", 0)
    with EmbeddedBroker.start(BrokerConfig(data_dir=tmp_path), within(PATIENCE_S)) as broker:
        KafkaAdmin(broker.bootstrap_servers).ensure([TopicSpec("gone", 1, {})])
        reader = KafkaReader(broker.bootstrap_servers, "gone-group")
        reader.assign({place: 0})
        writer = KafkaTransactionalWriter(broker.bootstrap_servers, "gone-id", transaction_timeout_ms=2_000)
        writer.init()
        writer.begin()
        writer.write([LogWrite("gone", b"1", None, 0)])
        writer.send_offsets(reader, {place: CommittedOffset(1)})
        writer.commit()
        writer.begin()
        writer.write([LogWrite("gone", b"2", None, 0)])
        broker.kill()
        with pytest.raises(LogError):
            writer.send_offsets(reader, {place: CommittedOffset(2)})
        started_s = time.monotonic()
        writer.close()
        reader.close()
        assert time.monotonic() - started_s < 10 * CLOSE_S, "it did not wait for ever"
