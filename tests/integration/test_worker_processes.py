"""Real worker processes on real Kafka: served, killed, paused and fenced, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from schemas.codec import decode_cluster, decode_result, encode_row, encode_work
from sie_stream.control import (
    ClusterRecord,
    PartitionPlacement,
    PartitionReleased,
    PlacementRow,
    ReplicaPlacement,
    ReplicaReady,
    WorkerJoined,
    WorkerLeft,
)
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.env_settings import settings_environment
from sie_stream.edge.kafka_log import KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.stop import EXIT_FENCED
from sie_stream.edge.tables import read_to_end
from sie_stream.ids import TopicPartition
from sie_stream.records import LogWrite, Result
from sie_stream.settings import Settings
from tests.unit.worker.rig import launch_of, work_item
from tests.waiting import PATIENCE_MS, PATIENCE_S, wait_until
from topics.catalog import system_topics, work_topic
from topics.edge.admin import KafkaAdmin

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "unit" / "worker" / "backend_package"
PARTITION = 1
"""P1 of a topic of width 1."""


class Hand:
    """Plays the scheduler, ingress and the users for one installation on the shared broker."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self.settings = Settings(bootstrap_servers=bootstrap, topic_prefix=prefix)
        self.names = self.settings.topics
        admin = KafkaAdmin(bootstrap)
        admin.ensure([*system_topics(self.settings), work_topic(self.settings, "m", 1)])
        self.writer = KafkaPlainWriter(bootstrap)
        self.reader = KafkaReader(bootstrap, f"{prefix}test")
        self.offsets = KafkaReader(bootstrap, self.names.worker_group)
        self.processes: list[subprocess.Popen[str]] = []
        self.epoch = 100
        self.launch = launch_of("m", backend="trouble", batch_max=16)

    def start(self, worker: str, incarnation: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **settings_environment(self.settings),
            "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(ROOT)]),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_worker.main", "--id", worker, "--incarnation", incarnation],
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
        )
        self.processes.append(process)
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert ready["incarnation"] == incarnation
        return process

    def serve(self, worker: str, incarnation: str) -> None:
        """Place the model there, wait until it is ready, assign the partition."""
        self.epoch += 1
        replica = ReplicaPlacement(worker, incarnation, "cpu:0", self.epoch, self.launch)
        self.publish(PlacementRow("m", self.names.work("m"), (replica,), ()))
        wait_until(
            lambda: [r for r in self.reports(ReplicaReady) if r.incarnation == incarnation],  # type: ignore[attr-defined]
            f"{incarnation} to be ready",
        )
        self.epoch += 1
        given = PartitionPlacement(PARTITION, worker, incarnation, self.epoch, "assigned")
        self.publish(PlacementRow("m", self.names.work("m"), (replica,), (given,)))

    def publish(self, row: PlacementRow) -> None:
        self.row = row
        self.writer.write([LogWrite(self.names.placements, encode_row(row), b"m", 0)])
        self.writer.flush(PATIENCE_MS)

    def send(self, first: int, count: int, inputs: bytes = b'{"x":1}') -> None:
        topic = self.names.work("m")
        items = [work_item(f"r{number}", inputs=inputs) for number in range(first, first + count)]
        self.writer.write([LogWrite(topic, encode_work(item), None, PARTITION) for item in items])
        self.writer.flush(PATIENCE_MS)

    def send_quick_and_held(self, quick: int, held: int, gate: Path) -> None:
        """Some are answered at once, the others when `gate` is there: until then the worker has begun and not ended."""
        self.send(0, quick)
        self.send(quick, held, json.dumps({"do": "await", "file": str(gate)}).encode())
        wait_until(lambda: len(self.results()) >= quick - self.launch.batch_max, "the first results")

    def results(self) -> list[Result]:
        return [decode_result(record.value) for record in read_to_end(self.reader, self.names.results)]

    def reports(self, kind: type[ClusterRecord]) -> list[ClusterRecord]:
        decoded = [decode_cluster(record.value) for record in read_to_end(self.reader, self.names.cluster)]
        return [record for record in decoded if isinstance(record, kind)]

    def wait_for_results(self, count: int) -> list[Result]:
        def enough() -> list[Result]:
            found = self.results()
            return found if len(found) >= count else []

        found = wait_until(enough, f"{count} results")
        counts = Counter(result.request_id for result in found)
        assert max(counts.values()) == 1, counts.most_common(3)
        return found

    def fence(self, worker: str) -> None:
        """What the scheduler does before it reassigns."""
        fencer = KafkaTransactionalWriter(self.settings.bootstrap_servers, self.names.worker_transactional_id(worker))
        fencer.init()
        fencer.close()

    def committed(self) -> int:
        place = TopicPartition(self.names.work("m"), PARTITION)
        found = self.offsets.committed([place])[place]
        return -1 if found is None else found.offset

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for client in (self.writer, self.reader, self.offsets):
            client.close()


@pytest.fixture
def hand(kafka: EmbeddedBroker, request: pytest.FixtureRequest) -> Iterator[Hand]:
    made = Hand(kafka.bootstrap_servers, f"{request.node.name.removeprefix('test_')}.")
    yield made
    made.close()


def test_serves_and_stops_cleanly(hand: Hand) -> None:
    process = hand.start("w0", "w0-a")
    wait_until(lambda: hand.reports(WorkerJoined), "the worker to join")
    hand.serve("w0", "w0-a")
    hand.send(0, 500)
    results = hand.wait_for_results(500)
    assert {result.status for result in results} == {"ok"}
    assert hand.committed() == 500
    assert psutil.Process(process.pid).memory_info().rss < 250e6
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert len(hand.reports(WorkerLeft)) == 1
    assert len(hand.reports(PartitionReleased)) == 1


def test_killed_worker_loses_and_repeats_nothing(hand: Hand, tmp_path: Path) -> None:
    process = hand.start("w0", "w0-a")
    hand.serve("w0", "w0-a")
    gate = tmp_path / "gate"
    hand.send_quick_and_held(100, 500, gate)
    process.kill()
    process.wait()
    assert len(hand.results()) < 600
    gate.touch()
    hand.start("w0", "w0-b")
    hand.serve("w0", "w0-b")
    hand.send(600, 100)
    hand.wait_for_results(700)
    wait_until(lambda: hand.committed() == 700, "the offsets")


def test_paused_worker_that_was_fenced_commits_nothing(hand: Hand, tmp_path: Path) -> None:
    process = hand.start("w0", "w0-a")
    hand.serve("w0", "w0-a")
    gate = tmp_path / "gate"
    hand.send_quick_and_held(50, 250, gate)
    process.send_signal(signal.SIGSTOP)
    hand.fence("w0")
    done, committed = len(hand.results()), hand.committed()
    assert done < 300
    gate.touch()  # its engine answers, and it hears of it when it wakes
    process.send_signal(signal.SIGCONT)
    assert process.wait(PATIENCE_S) == EXIT_FENCED
    assert (len(hand.results()), hand.committed()) == (done, committed)
    hand.start("w1", "w1-a")
    hand.serve("w1", "w1-a")
    hand.wait_for_results(300)


def test_segfault_of_the_engine_costs_only_the_poison(hand: Hand) -> None:
    hand.start("w0", "w0-a")
    hand.serve("w0", "w0-a")
    hand.send(0, 20)
    hand.send(20, 1, b'{"do":"segfault"}')
    hand.send(21, 20)
    results = {result.request_id: result for result in hand.wait_for_results(41)}
    poison = results.pop("r20")
    assert poison.error is not None
    assert (poison.status, poison.error.code) == ("failed", "poison")
    assert "SIGSEGV" in poison.error.message
    assert {result.status for result in results.values()} == {"ok"}
    assert sum(1 for _ in read_to_end(hand.reader, hand.names.deadletter)) == 1


def test_release_hands_the_partition_over(hand: Hand) -> None:
    hand.start("w0", "w0-a")
    hand.serve("w0", "w0-a")
    hand.send(0, 400, b'{"do":"sleep","seconds":0.003}')
    wait_until(lambda: len(hand.results()) >= 20, "some results")
    asked = PartitionPlacement(PARTITION, "w0", "w0-a", hand.epoch, "releasing")
    hand.publish(PlacementRow("m", hand.row.topic, hand.row.replicas, (asked,)))
    released = wait_until(lambda: hand.reports(PartitionReleased), "the release")[0]
    assert isinstance(released, PartitionReleased)
    assert released.offset == hand.committed()
    hand.start("w1", "w1-a")
    hand.serve("w1", "w1-a")
    hand.wait_for_results(400)


def test_a_draining_partition_is_read_to_its_end_also_past_markers(hand: Hand) -> None:
    """What ingress wrote last in a partition is the marker of its transaction, which no reader is given."""
    hand.start("w0", "w0-a")
    hand.serve("w0", "w0-a")
    ingress = KafkaTransactionalWriter(hand.settings.bootstrap_servers, "an-ingress")
    ingress.init()
    ingress.begin()
    items = [work_item(f"r{number}", inputs=b'{"do":"sleep","seconds":0.003}') for number in range(200)]
    ingress.write([LogWrite(hand.names.work("m"), encode_work(item), None, PARTITION) for item in items])
    ingress.commit()
    ingress.close()
    # The broker writes the marker after it has answered the commit; 201 is one past it.
    place = TopicPartition(hand.names.work("m"), PARTITION)
    wait_until(lambda: hand.reader.end_offsets([place])[place] == 201, "the marker")
    asked = PartitionPlacement(PARTITION, "w0", "w0-a", hand.epoch, "draining")
    hand.publish(PlacementRow("m", hand.row.topic, hand.row.replicas, (asked,)))
    released = wait_until(lambda: hand.reports(PartitionReleased), "the report that all is worked off")[0]
    assert isinstance(released, PartitionReleased)
    assert released.drained
    assert released.offset == hand.committed()
    hand.wait_for_results(200)
