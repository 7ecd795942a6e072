"""The scheduler process on real Kafka: two workers that only talk, one of them dies, its partitions move."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from msgspec import Raw

from scheduler.machine import SchedulerMachine
from schemas.codec import decode_cluster, decode_decision, decode_row, encode_cluster
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    Decision,
    Device,
    InstanceRow,
    PartitionReleased,
    PlacementRow,
    RecordDecision,
    ReplicaReady,
    WorkerHeartbeat,
    WorkerJoined,
)
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.env_settings import settings_environment
from sie_stream.edge.kafka_log import KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.errors import Fenced
from sie_stream.ids import TopicPartition, instance_id
from sie_stream.records import LogRecord, LogWrite
from sie_stream.settings import Settings
from tests.unit.scheduler.kit import spec_json
from tests.waiting import PATIENCE_MS, PATIENCE_S, wait_until
from topics.catalog import system_topics
from topics.edge.admin import KafkaAdmin

pytestmark = pytest.mark.integration
MIB = 1024 * 1024


class TalkingWorker:
    """Joins, beats, reports its replicas ready, and releases what it is asked to. Serves nothing."""

    def __init__(self, settings: Settings, worker: str, incarnation: str) -> None:
        self.settings = settings
        self.names = settings.topics
        self.worker = worker
        self.incarnation = incarnation
        self.stop = threading.Event()
        self.writer = KafkaTransactionalWriter(settings.bootstrap_servers, self.names.worker_transactional_id(worker))
        self.writer.init()
        self._plain = KafkaPlainWriter(settings.bootstrap_servers)
        self._reader = KafkaReader(settings.bootstrap_servers, f"{self.names.prefix}test.{incarnation}")
        self._answered: set[tuple[str, int]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self.stop.set()
        self._thread.join(PATIENCE_S)

    def _say(self, record: ClusterRecord) -> None:
        self._plain.write([LogWrite(self.names.cluster, encode_cluster(record), partition=0)])

    def _run(self) -> None:
        count = self._reader.partitions_of(self.names.placements)
        self._reader.assign({TopicPartition(self.names.placements, number): 0 for number in range(count)})
        device = Device("cpu0", "cpu", 8_000 * MIB)
        self._say(WorkerJoined(self.worker, self.incarnation, "host", 1, (device,), ("sklearn",), {}))
        while not self.stop.is_set():
            self._say(WorkerHeartbeat(self.worker, self.incarnation))
            for record in self._reader.poll(500, self.settings.heartbeat_ms):
                if record.value is not None:
                    self._answer(decode_row(record.value, PlacementRow))
        self._reader.close()
        self._plain.close()

    def _answer(self, row: PlacementRow) -> None:
        for held in row.partitions:
            if (held.worker, held.incarnation, held.state) == (self.worker, self.incarnation, "releasing"):
                self._say(
                    PartitionReleased(
                        self.worker, self.incarnation, row.model, held.partition, held.placement_epoch, offset=0
                    )
                )
        for placed in row.replicas:
            key = (row.model, placed.placement_epoch)
            if (placed.worker, placed.incarnation) == (self.worker, self.incarnation) and key not in self._answered:
                self._answered.add(key)
                self._say(
                    ReplicaReady(
                        self.worker, self.incarnation, row.model, placed.launch.version, placed.placement_epoch, 1, 5, 1
                    )
                )


class Views:
    """Reads whole topics."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.names = settings.topics

    def records(self, topic: str) -> list[LogRecord]:
        reader = KafkaReader(self.settings.bootstrap_servers, f"{self.names.prefix}view")
        places = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
        ends = reader.end_offsets(places)
        reader.assign(reader.beginning_offsets(places))
        found: list[LogRecord] = []
        while any(reader.position(place) < ends[place] for place in places):
            found += reader.poll(1_000, 100)
        reader.close()
        return found

    def decisions(self) -> list[Decision]:
        return sorted(
            (decode_decision(record.value) for record in self.records(self.names.decisions)),
            key=lambda decision: (decision.cause_offset, int(decision.decision.rsplit("-", 1)[1])),
        )

    def placements(self) -> dict[str, PlacementRow]:
        rows: dict[str, PlacementRow] = {}
        for record in self.records(self.names.placements):
            assert record.key is not None
            rows.pop(record.key.decode(), None)
            if record.value is not None:
                rows[record.key.decode()] = decode_row(record.value, PlacementRow)
        return rows

    def instances(self) -> dict[str, InstanceRow]:
        return {
            record.key.decode(): decode_row(record.value, InstanceRow)
            for record in self.records(self.names.instances)
            if record.key is not None and record.value is not None
        }

    def refolded(self) -> list[Decision]:
        machine = SchedulerMachine(self.settings)
        return [
            command.decision
            for record in self.records(self.names.cluster)
            for command in machine.step(record.offset, record.timestamp_ms, decode_cluster(record.value))
            if isinstance(command, RecordDecision)
        ]


@contextmanager
def scheduler_process(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler.main"],
        env=settings_environment(settings),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()


def wait_for_line(process: subprocess.Popen[str], event: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if msgspec.json.decode(line)["event"] == event:
            return
    raise AssertionError(f"the scheduler ended with {process.wait(PATIENCE_S)} before it said {event!r}")


@pytest.fixture
def settings(kafka: EmbeddedBroker, request: pytest.FixtureRequest) -> Settings:
    made = Settings(
        bootstrap_servers=kafka.bootstrap_servers,
        topic_prefix=f"sched.{request.node.name[-12:]}.",
        worker_lost_after_ms=8_000,  # workers are threads here, beside the test's own reading
    )
    KafkaAdmin(made.bootstrap_servers).ensure(system_topics(made))
    return made


def tell(settings: Settings, *records: ClusterRecord) -> None:
    writer = KafkaPlainWriter(settings.bootstrap_servers)
    writer.write([LogWrite(settings.topics.cluster, encode_cluster(record), partition=0) for record in records])
    writer.flush(PATIENCE_MS)
    writer.close()


def holders(views: Views) -> set[str]:
    return {placed.worker for row in views.placements().values() for placed in row.partitions}


def test_partitions_of_a_dead_worker_move_after_its_fence(settings: Settings) -> None:
    views = Views(settings)
    models = [f"m{number}" for number in range(6)]
    with scheduler_process(settings) as process:
        wait_for_line(process, "ready")
        workers = [TalkingWorker(settings, "w0", "w0-1"), TalkingWorker(settings, "w1", "w1-1")]
        tell(settings, *(ApplyModel(Raw(spec_json(name, replicas={"min": 2, "max": 2}))) for name in models))
        wait_until(
            lambda: (
                len(views.placements()) == 6
                and all(len(row.partitions) == 6 and len(row.replicas) == 2 for row in views.placements().values())
                and {len({p.worker for p in row.partitions}) for row in views.placements().values()} == {2}
                and all(views.instances()[instance_id(name)].status == "ready" for name in models)
            ),
            "all models served",
        )
        victim = workers[0]
        victim.writer.begin()
        victim.writer.write([LogWrite(settings.topics.results, b"late")])
        victim.kill()
        wait_until(lambda: holders(views) == {"w1"}, "the survivor to hold everything")
        with pytest.raises(Fenced):
            victim.writer.commit()
        workers[1].kill()
    decisions = views.decisions()
    kinds = [decision.kind for decision in decisions]
    assert kinds.index("worker_lost") < kinds.index("worker_fenced")
    assert decisions == views.refolded()[: len(decisions)]


def test_a_killed_scheduler_is_followed_by_the_standby_without_a_gap(settings: Settings) -> None:
    views = Views(settings)
    with scheduler_process(settings) as first:
        wait_for_line(first, "ready")
        with scheduler_process(settings) as second:
            wait_for_line(second, "standby")
            worker = TalkingWorker(settings, "w0", "w0-1")
            tell(settings, ApplyModel(Raw(spec_json("before"))))
            wait_until(lambda: "before" in views.placements(), "the first leader to place")
            first.kill()
            tell(settings, ApplyModel(Raw(spec_json("after"))))
            wait_for_line(second, "ready")
            wait_until(
                lambda: (
                    {"before", "after"} == set(views.placements()) and len(views.placements()["after"].partitions) == 3
                ),
                "the second leader to place",
            )
            worker.kill()
    decisions = views.decisions()
    assert [decision.kind for decision in decisions].count("scheduler_elected") == 2
    assert decisions == views.refolded()[: len(decisions)]
    assert len({decision.decision for decision in decisions}) == len(decisions)
