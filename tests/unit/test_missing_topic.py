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


@pytest.mark.parametrize(("budget_s", "waits"), [(0.0, False), (0.01, True)])
def test_a_loop_that_must_go_on_waits_for_no_topic(
    budget_s: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[WithoutTopic] = []
    monkeypatch.setattr(kafka_writer, "Producer", lambda *_a, **_o: made.append(WithoutTopic()) or made[-1])
    writer = KafkaPlainWriter("nowhere:1", unknown_budget_s=budget_s)
    with pytest.raises(Retriable):
        writer.write([LogWrite("sie.telemetry", b"x", b"k", partition=0)])
    assert (made[0].asked > 0, made[0].waited > 0) == (waits, waits)
