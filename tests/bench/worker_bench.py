"""Cost of the worker host in Python per record: decode, admit, batch, build and encode the result, ledger, commit.

`python -m tests.bench.worker_bench [--models N ...] [--records N] [--profile]`, CPU time. The machine runs with engines
that answer at once and a log that keeps nothing, so this is the host's own work and nothing else.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time

from gpu_worker.backends.base import EngineOutput
from gpu_worker.engine_port import BatchCompleted, EngineKey, EngineStarted, ModelLoaded
from gpu_worker.facts import (
    Commit,
    CommitSucceeded,
    Identity,
    LoadModel,
    PartitionPositioned,
    PlacementChanged,
    PositionPartitions,
    RecordsPolled,
    SubmitBatch,
    TimePassed,
    WorkerCommand,
    WorkerEvent,
)
from gpu_worker.machine import WorkerMachine
from gpu_worker.outcomes import Outcomes
from schemas.codec import encode_work
from sie_stream.control import Device, ModelLaunch, PartitionPlacement, PlacementRow, ReplicaPlacement
from sie_stream.ids import instance_id
from sie_stream.postprocess import stage2_of
from sie_stream.records import CommittedOffset, LogRecord, WorkItem
from sie_stream.settings import Settings

DEVICE = Device("cpu:0", "cpu", 1 << 33)
INPUTS = json.dumps({f"feature_{number}": number * 1.25 for number in range(8)}).encode()
OUTPUTS = b'{"label":"benign","score":0.9731,"probabilities":{"benign":0.9731,"malignant":0.0269}}'
NOW_MS = 1_700_000_000_000


class Bench:
    """Feeds a machine, and answers its commands at once."""

    def __init__(self, models: int, batch_max: int) -> None:
        settings = Settings()
        identity = Identity("w0", "w0-1", "here", 1, (DEVICE,), ("sklearn",), {})
        outcomes = Outcomes(
            settings.topics,
            identity,
            settings.record_bytes_max,
            settings.deadletter_bytes_max,
            lambda launch: stage2_of(settings.record_bytes_max),
        )
        self.machine = WorkerMachine(identity, settings, outcomes)
        self.at_ms = 0.0
        self.events: list[WorkerEvent] = []
        self.committed = 0
        self.commits = 0
        for number in range(models):
            self.events.append(self._placed(f"model-{number}", number, batch_max))
        while (
            any(one.state != "ready" for one in self.machine.state.replicas.values()) or not self.committed_all_open()
        ):
            self.turn([])

    def committed_all_open(self) -> bool:
        held = self.machine.state.partitions
        return bool(held) and all(one.state == "open" for one in held.values())

    def _placed(self, model: str, number: int, batch_max: int) -> PlacementChanged:
        launch = ModelLaunch(
            model, "1", instance_id(model), "sklearn", "/x", "sha256:" + "a" * 64, {}, "scoring", 1, 1, batch_max
        )
        replica = ReplicaPlacement("w0", "w0-1", DEVICE.device, 2 * number, launch)
        given = tuple(PartitionPlacement(lane, "w0", "w0-1", 2 * number + 1, "assigned") for lane in range(3))
        return PlacementChanged(model, PlacementRow(model, f"sie.work.{model}", (replica,), given))

    def turn(self, records: list[LogRecord]) -> None:
        self.at_ms += 1.0
        events: list[WorkerEvent] = [TimePassed(NOW_MS + int(self.at_ms), self.at_ms), *self.events]
        if records:
            events.append(RecordsPolled(records))
        self.events = []
        for command in self.machine.decide(events):
            self._answer(command)

    def _answer(self, command: WorkerCommand) -> None:
        match command:
            case SubmitBatch():
                outputs = [EngineOutput(item.request_id, OUTPUTS) for item in command.items]
                self.events.append(BatchCompleted(command.engine, command.batch_id, outputs, 1.5))
            case Commit():
                self.committed += len(command.writes)
                self.commits += 1
                self.events.append(CommitSucceeded(command.commit_id, 5.0))
            case LoadModel():
                key = EngineKey(command.engine.device, command.engine.backend)
                self.events.append(EngineStarted(key, 1, {"scikit-learn": "1.9.1"}))
                self.events.append(ModelLoaded(key, command.slot, 1, "sha256:" + "a" * 64, 1, 1))
            case PositionPartitions():
                for place, epoch in command.partitions:
                    self.events.append(PartitionPositioned(place, epoch, CommittedOffset(0)))
            case _:
                pass


def make_records(models: int, count: int, polled: int) -> list[list[LogRecord]]:
    """Polls as librdkafka gives them: runs of one partition, offsets rising."""
    polls: list[list[LogRecord]] = []
    offsets = [0] * models
    run = max(1, polled // min(models, 8))
    poll: list[LogRecord] = []
    number = 0
    while sum(map(len, polls)) + len(poll) < count:
        model = number % models
        number += 1
        for _ in range(run):
            poll.append(_record(model, offsets[model]))
            offsets[model] += 1
        if len(poll) >= polled:
            polls.append(poll)
            poll = []
    return polls


def _record(model: int, offset: int) -> LogRecord:
    name = f"model-{model}"
    work = WorkItem(
        request_id=f"0198f7e2-{model:04x}-7000-8000-{offset:012x}",
        instance=instance_id(name),
        model=name,
        version="1",
        variant="stable",
        route_epoch=3,
        priority=1,
        inputs=INPUTS,
        key=f"user-{offset % 997}".encode(),
        source_topic="sie.requests",
        source_partition=offset % 4,
        source_offset=offset,
        requested_at_ms=NOW_MS - 20,
        received_at_ms=NOW_MS - 12,
        routed_at_ms=NOW_MS - 10,
    )
    return LogRecord(f"sie.work.{name}", 1, offset, NOW_MS - 8, work.key, encode_work(work))


def measure(models: int, count: int, batch_max: int, polled: int) -> dict[str, float]:
    bench = Bench(models, batch_max)
    polls = make_records(models, count, polled)
    total = sum(map(len, polls))
    started = time.process_time()
    for poll in polls:
        bench.turn(poll)
        while bench.machine.state.open_total > polled:
            bench.turn([])
    while bench.committed < total:
        bench.turn([])
    took = time.process_time() - started
    return {
        "models": models,
        "records": total,
        "us_per_record": round(took / total * 1e6, 2),
        "records_per_s": round(total / took),
        "commits": bench.commits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, nargs="*", default=[1, 117])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--batch-max", type=int, default=64)
    parser.add_argument("--polled", type=int, default=500)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for models in options.models:
        profile = cProfile.Profile()
        if options.profile:
            profile.enable()
        print(json.dumps(measure(models, options.records, options.batch_max, options.polled)))
        if options.profile:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main()
