"""A broker that dies and comes back: clients go on by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker
from sie_stream.edge.kafka_log import KafkaReader, KafkaTransactionalWriter
from sie_stream.ids import TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import CommittedOffset, LogWrite
from tests.waiting import wait_until, within
from topics.edge.admin import KafkaAdmin

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_transactions_and_reading_go_on_after_a_broker_restart(tmp_path: Path) -> None:
    """Guards metadata.recovery.strategy=none: without it, sending offsets after the restart hangs for good."""
    place = TopicPartition("restart", 0)
    with EmbeddedBroker.start(BrokerConfig(data_dir=tmp_path), within(120)) as broker:
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
        broker.restart(within(120))
        promise(2)
        promise(3)
        wait_until(lambda: has_read(3), "the records after the restart")
        assert reader.committed([place]) == {place: CommittedOffset(3)}
        writer.close()
        reader.close()
