"""A worker's reader on real Kafka: fetches that wait for half a minute, and what ends them at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpu_worker.edge.work_reader import AGAIN_MS, WorkReader
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.kafka_log import KafkaPlainWriter
from sie_stream.errors import Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import TopicSpec
from sie_stream.records import LogRecord, LogWrite
from tests.waiting import wait_until
from topics.edge.admin import KafkaAdmin

pytestmark = [pytest.mark.integration]

FETCH_WAIT_MS = 40_000
SOON_S = 20.0
"""Half of what a fetch waits: a loaded machine is far from it, and a fetch that nobody ends is far behind it."""
QUIET, OTHER = TopicPartition("wakes.work.quiet", 0), TopicPartition("wakes.work.other", 0)


class Bench:
    def __init__(self, bootstrap: str, names: TopicNames) -> None:
        self.names = names
        self.writer = KafkaPlainWriter(bootstrap, without_waiting=(names.wakeups,))
        self.reader = WorkReader(bootstrap, names, {}, self.writer, SystemClock(), FETCH_WAIT_MS)
        wait_until(self._listens, "the topics of the signs")  # as a worker does: before anything is assigned
        self.write(OTHER)
        self.reader.assign({QUIET: 0})
        wait_until(lambda: self.reader.poll(10, 100) == [] and self.reader.position(QUIET) == 0, "the first fetch")

    def _listens(self) -> bool:
        try:
            assert self.reader.poll(10, 0) == []
        except Retriable:  # topics that were made a moment ago have no leader yet; a worker's loop polls again, too
            return False
        return bool(self.reader._signs)

    def write(self, place: TopicPartition) -> None:
        self.writer.write([LogWrite(place.topic, b"x", None, place.partition)])
        self.writer.flush(30_000)

    def settle(self) -> None:
        """Until every wake-up of an assignment was rung and the next fetch waits."""
        until = time.monotonic() + AGAIN_MS[-1] / 1000 + 0.5
        while time.monotonic() < until:
            assert self.reader.poll(10, 50) == []

    def soon(self) -> list[LogRecord]:
        until = time.monotonic() + SOON_S
        while time.monotonic() < until:
            if records := self.reader.poll(10, 1_000):
                return records
        raise AssertionError(f"nothing within {SOON_S:g} s")

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@pytest.fixture
def bench(kafka: EmbeddedBroker) -> Iterator[Bench]:
    names = TopicNames("wakes.")
    specs = [TopicSpec(names.wakeups, 2, {}), TopicSpec(names.placements, 1, {})]
    KafkaAdmin(kafka.bootstrap_servers).ensure([*specs, TopicSpec(QUIET.topic, 1, {}), TopicSpec(OTHER.topic, 1, {})])
    made = Bench(kafka.bootstrap_servers, names)
    yield made
    made.close()


def test_a_partition_that_is_resumed_is_read_at_once(bench: Bench) -> None:
    bench.reader.assign({OTHER: 0})
    bench.soon()
    bench.reader.pause([OTHER])
    bench.settle()
    bench.write(OTHER)
    bench.settle()
    bench.reader.resume([OTHER])
    assert bench.soon()[0].topic == OTHER.topic


def test_look_ups_do_not_wait_for_a_fetch(bench: Bench) -> None:
    """They would give up: their budget is shorter than the fetch waits."""
    bench.settle()
    assert bench.reader.end_offsets([QUIET]) == {QUIET: 0}
    bench.settle()
    assert bench.reader.beginning_offsets([QUIET]) == {QUIET: 0}


def test_a_topic_that_it_has_not_met_is_read_at_once(bench: Bench) -> None:
    bench.settle()
    bench.reader.assign({OTHER: 0})
    assert bench.soon()[0].topic == OTHER.topic


def test_a_writer_tells_which_topics_exist(bench: Bench) -> None:
    """The worker asks it, because a reader's question waits behind its fetch."""
    assert bench.writer.partitions_of(bench.names.wakeups) == 2
    assert bench.writer.partitions_of("wakes.missing") == 0


def test_a_placement_ends_the_waiting_and_is_not_work(bench: Bench) -> None:
    bench.settle()
    bench.write(TopicPartition(bench.names.placements, 0))
    started_s = time.monotonic()
    assert bench.reader.poll(10, FETCH_WAIT_MS) == []
    assert time.monotonic() - started_s < SOON_S


def test_without_its_topics_it_reads_all_the_same(kafka: EmbeddedBroker) -> None:
    names, place = TopicNames("wakeless."), TopicPartition("wakeless.work", 0)
    KafkaAdmin(kafka.bootstrap_servers).ensure([TopicSpec(place.topic, 1, {})])
    writer = KafkaPlainWriter(kafka.bootstrap_servers, without_waiting=(names.wakeups,))
    reader = WorkReader(kafka.bootstrap_servers, names, {}, writer, SystemClock(), 100)
    writer.write([LogWrite(place.topic, b"x", None, 0)])
    reader.assign({place: 0})
    wait_until(lambda: bool(reader.poll(10, 100)), "the record")
    reader.close()
    writer.close()
