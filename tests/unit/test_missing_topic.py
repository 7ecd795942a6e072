"""A write to a topic that is not there: who may wait for it, and who must not."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from sie_stream.edge import kafka_writer
from sie_stream.edge.kafka_log import KafkaPlainWriter
from sie_stream.errors import Retriable
from sie_stream.records import LogWrite


class WithoutTopic:
    """A client that has learnt that the topic does not exist."""

    def __init__(self, *_config: object, **_options: object) -> None:
        self.asked = 0
        self.waited = 0

    def __len__(self) -> int:
        return 0

    def produce(self, *_record: object, **_options: object) -> None:
        raise KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))

    def list_topics(self, *_topic: object, **_options: object) -> None:
        self.asked += 1

    def poll(self, seconds: float) -> None:
        self.waited += seconds > 0


@pytest.mark.parametrize(("topic", "waits"), [("sie.telemetry", False), ("sie.cluster", True)])
def test_a_loop_that_must_go_on_waits_for_no_topic_but_the_one_whose_records_must_not_be_lost(
    topic: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[WithoutTopic] = []
    monkeypatch.setattr(kafka_writer, "Producer", lambda *_a, **_o: made.append(WithoutTopic()) or made[-1])
    monkeypatch.setattr(kafka_writer, "UNKNOWN_BUDGET_S", 0.01)
    writer = KafkaPlainWriter("nowhere:1", without_waiting=("sie.telemetry", "sie.tokens"))
    with pytest.raises(Retriable):
        writer.write([LogWrite(topic, b"x", b"k", partition=0)])
    assert (made[0].asked > 0, made[0].waited > 0) == (waits, waits)
