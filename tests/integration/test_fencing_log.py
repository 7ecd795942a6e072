"""What librdkafka says of a producer that lost its transactional id to another one."""

from __future__ import annotations

import logging

import pytest

from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.kafka_log import KafkaTransactionalWriter
from sie_stream.errors import Fenced
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from topics.edge.admin import KafkaAdmin

pytestmark = pytest.mark.integration


def test_who_loses_its_id_is_told_of_it_without_an_alarm(
    kafka: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    KafkaAdmin(kafka.bootstrap_servers).ensure([TopicSpec("fencing-log", 1, {})])
    first, second = (KafkaTransactionalWriter(kafka.bootstrap_servers, "fencing-log", 60_000) for _ in range(2))
    caplog.set_level(logging.DEBUG, "sie_stream.kafka")
    try:
        first.init()
        second.init()
        with pytest.raises(Fenced):  # noqa: PT012 - whichever of the calls hears of it first
            first.begin()
            first.write([LogWrite("fencing-log", b"x")])
            first.commit()
    finally:
        first.close()
        second.close()
    told = [record.getMessage() for record in caplog.records]
    assert any("fenced" in message for message in told), told
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
