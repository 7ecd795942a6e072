"""Ingress processes on real Kafka: everything routed once, whatever dies; the worst records end as they should."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer

from schemas import codec
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.env_settings import settings_environment
from sie_stream.edge.kafka_log import KafkaPlainWriter, KafkaReader
from sie_stream.edge.stop import EXIT_FENCED
from sie_stream.ids import TopicPartition
from sie_stream.records import REQUEST_ID_HEADER, LogRecord, LogWrite, Result, WorkItem
from sie_stream.settings import Settings
from tests.unit.processors.kit import route
from tests.waiting import PATIENCE_MS, PATIENCE_S, wait_until
from topics.catalog import system_topics, work_topic
from topics.edge.admin import KafkaAdmin

pytestmark = pytest.mark.integration


class Installation:
    """Topics of one test, and a route to the model `wine`."""

    def __init__(self, broker: EmbeddedBroker, prefix: str, **settings: Any) -> None:
        self.settings = Settings(bootstrap_servers=broker.bootstrap_servers, topic_prefix=prefix, **settings)
        self.names = self.settings.topics
        admin = KafkaAdmin(broker.bootstrap_servers)
        admin.ensure([*system_topics(self.settings), work_topic(self.settings, "wine", 1)])
        self.writer = KafkaPlainWriter(broker.bootstrap_servers)
        row = route(topic=self.names.work("wine"))
        self.writer.write([LogWrite(self.names.routes, codec.encode_row(row), b"wine")])
        self.writer.flush(PATIENCE_MS)

    def send(self, ids: list[str]) -> None:
        self.writer.write(
            [
                LogWrite(
                    self.names.requests,
                    json.dumps({"model": "wine", "inputs": {"x": 1}, "request_id": one}).encode(),
                    one.encode(),
                    headers=((REQUEST_ID_HEADER, one.encode()),),
                )
                for one in ids
            ]
        )
        self.writer.flush(PATIENCE_MS)

    @contextmanager
    def reader_of(self, topic: str) -> Iterator[Reading]:
        reader = KafkaReader(self.settings.bootstrap_servers, f"{self.names.prefix}test")
        reader.assign({TopicPartition(topic, number): 0 for number in range(reader.partitions_of(topic))})
        try:
            yield Reading(reader)
        finally:
            reader.close()

    @contextmanager
    def ingress(self, name: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "processors.ingress.main", "--id", name],
            env=settings_environment(self.settings) | {"PATH": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"ingress {name} ended with {process.wait()}"
            assert json.loads(line)["event"] == "ready"
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


class Reading:
    """Everything read so far."""

    def __init__(self, reader: KafkaReader) -> None:
        self._reader = reader
        self.records: list[LogRecord] = []

    def more(self) -> list[LogRecord]:
        self.records += self._reader.poll(10_000, 100)
        return self.records

    def work_ids(self) -> Counter[str]:
        """How often each request is there, of everything read so far and what is new."""
        return Counter(codec.decode_work(record.value).request_id for record in self.more())

    def work(self) -> list[WorkItem]:
        return [codec.decode_work(record.value) for record in self.more()]

    def results(self) -> list[Result]:
        return [codec.decode_result(record.value) for record in self.more()]


def test_every_request_is_routed_once_whatever_dies(kafka: EmbeddedBroker) -> None:
    here = Installation(kafka, "ingress1.")
    ids = [f"r{number}" for number in range(3_000)]
    with here.reader_of(here.names.work("wine")) as work, here.ingress("a"):
        with here.ingress("b") as dying:
            here.send(ids[:1_000])
            wait_until(lambda: len(work.work_ids()) >= 500, "half of the first requests")
            here.send(ids[500:2_000])  # repeats among them
            dying.kill()
            assert dying.wait() == -signal.SIGKILL
        here.send(ids[1_500:])
        with here.ingress("b"):  # the next incarnation takes its partitions over
            here.send(ids[::3])
            wait_until(lambda: len(work.work_ids()) >= len(ids), "all requests")
            here.send(["last-" + one for one in ids[:50]])
            wait_until(lambda: len(work.work_ids()) >= len(ids) + 50, "what came last")
        counts = work.work_ids()
    assert [one for one, count in counts.items() if count > 1] == []
    assert set(counts) == {*ids, *("last-" + one for one in ids[:50])}


def test_a_second_process_of_the_same_name_fences_the_first(kafka: EmbeddedBroker) -> None:
    here = Installation(kafka, "ingress2.")
    with here.reader_of(here.names.work("wine")) as work, here.ingress("a") as first:
        here.send(["one"])
        wait_until(lambda: work.work_ids()["one"], "the first request")
        with here.ingress("a"):
            here.send([f"r{number}" for number in range(20)])
            wait_until(lambda: len(work.work_ids()) == 21, "the others")
            assert wait_until(first.poll, "the first process to end") == EXIT_FENCED
        assert max(work.work_ids().values()) == 1


def test_it_stops_cleanly(kafka: EmbeddedBroker) -> None:
    here = Installation(kafka, "ingress3.")
    with here.ingress("a") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_the_worst_records_end_in_their_terminal_records(kafka: EmbeddedBroker) -> None:
    here = Installation(kafka, "ingress4.")
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "message.max.bytes": 12_000_000})
    big = b'{"model":"wine","request_id":"big","inputs":{"name":"' + b"a" * 10_000_000 + b'"}}'
    for value, key in ((None, b"k"), (b"", None), (big, b"k"), (b"\xff\xfe", b"k"), (b"\x00\x01", b"k")):
        producer.produce(here.names.requests, value, key)
    assert producer.flush(PATIENCE_S) == 0
    with here.reader_of(here.names.results) as results, here.ingress("a"):
        wait_until(lambda: len(results.results()) == 5, "five results")
        with here.reader_of(here.names.deadletter) as letters:
            wait_until(lambda: len(letters.more()) == 5, "five dead letters")
        endings = results.results()
    codes = {result.error.code if result.error else "" for result in endings}
    assert codes == {"tombstone", "empty_record", "payload_too_large", "bad_utf8", "bad_avro"}
    assert "big" in {result.request_id for result in endings}


def test_one_request_takes_one_short_transaction(kafka: EmbeddedBroker) -> None:
    """Not a benchmark: it only notices a wait of a poll interval or of a retry backoff that does not belong there."""
    here = Installation(kafka, "ingress5.")
    took_ms: list[float] = []
    with here.reader_of(here.names.work("wine")) as work, here.ingress("a"):
        here.send(["warm"])
        wait_until(lambda: work.work_ids()["warm"], "the first request")
        for number in range(20):
            started = time.perf_counter()
            here.send([f"r{number}"])
            wait_until(lambda number=number: work.work_ids()[f"r{number}"], "a request")
            took_ms.append((time.perf_counter() - started) * 1000)
    assert min(took_ms) < 500, "what does not belong there is in every one; a busy machine is not"
