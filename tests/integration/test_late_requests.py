"""A Produce request that Kafka reads after its transaction has been given up must not become visible."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker
from sie_stream.edge.kafka_log import KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.tables import read_to_end
from sie_stream.errors import FatalLogError, TransactionAborted
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from tests.integration.holding_proxy import HOST, HoldingProxy
from tests.waiting import PATIENCE_S, wait_until, within
from topics.edge.admin import KafkaAdmin

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TOPIC = "late"
TIMEOUT_MS = 3_000
RECORD_TIMEOUT = {"message.timeout.ms": "2000"}
"""Would let the record fail, and the transaction be aborted, within its time: must not be followed."""


def put(writer: KafkaTransactionalWriter, value: bytes) -> None:
    """One transaction, as the processes run it."""
    writer.begin()
    try:
        writer.write([LogWrite(TOPIC, value, None, 0)])
        writer.commit()
    except TransactionAborted:
        writer.abort()


def abort_late(writer: KafkaTransactionalWriter, value: bytes) -> None:
    """As a process does that stood still itself before it looked at its transaction again."""
    until_s = time.monotonic() + TIMEOUT_MS / 1000
    writer.begin()
    writer.write([LogWrite(TOPIC, value, None, 0)])
    wait_until(lambda: time.monotonic() > until_s, "the transaction to last too long")
    writer.abort()


def abort_closed(writer: KafkaTransactionalWriter, value: bytes) -> None:
    """As a commit thread does that still waited when its worker had to stop."""
    writer.begin()
    writer.write([LogWrite(TOPIC, value, None, 0)])
    writer.close()
    writer.abort()


@pytest.mark.parametrize("give_up", [put, abort_late, abort_closed])
def test_a_request_of_a_transaction_that_was_given_up_is_kept_out(
    tmp_path: Path, give_up: Callable[[KafkaTransactionalWriter, bytes], None]
) -> None:
    """Seen with a broker that stood still for longer than the transaction timeout: results were there twice."""
    with HoldingProxy() as proxy:
        listeners = {
            "advertised.listeners": f"PLAINTEXT://{HOST}:{proxy.port}",
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": "600000",
        }
        config = BrokerConfig(data_dir=tmp_path, properties=listeners)
        with EmbeddedBroker.start(config, within(PATIENCE_S)) as broker:
            proxy.forward_to(int(broker.bootstrap_servers.rpartition(":")[2]))
            KafkaAdmin(broker.bootstrap_servers).ensure([TopicSpec(TOPIC, 1, {})])
            writer = KafkaTransactionalWriter(broker.bootstrap_servers, "id", TIMEOUT_MS, RECORD_TIMEOUT)
            writer.init()
            put(writer, b"before")
            proxy.hold()
            with pytest.raises(FatalLogError):
                give_up(writer, b"once")
            assert proxy.holds.wait(PATIENCE_S)
            writer.close()
            successor = KafkaTransactionalWriter(broker.bootstrap_servers, "id", TIMEOUT_MS)
            successor.init()
            proxy.release()
            put(successor, b"once")
            reader = KafkaReader(broker.bootstrap_servers, "witness")
            assert [record.value for record in read_to_end(reader, TOPIC)] == [b"before", b"once"]
            successor.close()
            reader.close()
