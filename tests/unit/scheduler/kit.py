"""A scheduler machine with a log in front of it, for tests: append facts, read commands, look at rows."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Raw

from scheduler.machine import SchedulerMachine
from scheduler.rows import ROW_TYPES
from scheduler.state import ModelState
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    Decision,
    Device,
    EnsureTopic,
    FenceWorker,
    PartitionReleased,
    PlacementRow,
    PublishState,
    RecordDecision,
    ReplicaFailed,
    ReplicaReady,
    SchedulerCommand,
    SchedulerElected,
    Tick,
    TopicEnsured,
    WorkerFenced,
    WorkerHeartbeat,
    WorkerJoined,
)
from sie_stream.ids import instance_id
from sie_stream.settings import Settings

RowT = TypeVar("RowT", bound=msgspec.Struct)
MIB = 1024 * 1024
START_MS = 1_700_000_000_000


def spec_json(name: str = "churn", version: str = "1.0.0", memory_mb: int = 100, **fields: object) -> bytes:
    body: dict[str, object] = {
        "name": name,
        "version": version,
        "source": {"uri": f"/models/{name}"},
        "min_gpu_memory_mb": memory_mb,
        "backend": {"name": "sklearn"},
        "service_type": "scoring",
        "input_schema": {"type": "object", "properties": {"age": {"type": "integer"}}},
        **fields,
    }
    return msgspec.json.encode(body)


def joined(worker: str, incarnation: str, memory_mb: int = 1_000, devices: int = 1) -> WorkerJoined:
    return WorkerJoined(
        worker=worker,
        incarnation=incarnation,
        host="host",
        pid=1,
        devices=tuple(Device(f"cpu{number}", "cpu", memory_mb * MIB) for number in range(devices)),
        backends=("sklearn", "torch"),
        versions={},
    )


class Cluster:
    """The log and the scheduler's fold of it. Time only moves by `wait`."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.machine = SchedulerMachine(self.settings)
        self.log: list[tuple[int, int, ClusterRecord]] = []
        self.commands: list[SchedulerCommand] = []
        self.tables: dict[tuple[str, str], msgspec.Struct] = {}
        self.now_ms = START_MS

    def append(self, record: ClusterRecord) -> list[SchedulerCommand]:
        """Write one record and fold it."""
        offset = len(self.log)
        self.log.append((offset, self.now_ms, record))
        commands = self.machine.step(offset, self.now_ms, record)
        self.commands += commands
        for command in commands:
            if isinstance(command, PublishState):
                if command.body is None:
                    self.tables.pop((command.table, command.name), None)
                else:
                    row = msgspec.json.decode(command.body, type=ROW_TYPES[command.table])
                    self.tables[command.table, command.name] = row
        return commands

    def lead(self, scheduler: str = "s0") -> None:
        self.append(SchedulerElected(scheduler))
        self.append(Tick(scheduler))

    def wait(self, ms: int, alive: tuple[tuple[str, str], ...] = ()) -> list[SchedulerCommand]:
        """Ticks for `ms`, with a heartbeat of the `alive` workers before each. Returns what they led to."""
        commands: list[SchedulerCommand] = []
        until = self.now_ms + ms
        while self.now_ms < until:
            self.now_ms = min(until, self.now_ms + self.settings.tick_ms)
            for worker, incarnation in alive:
                commands += self.append(WorkerHeartbeat(worker, incarnation))
            commands += self.append(Tick(self.machine.state.leader))
        return commands

    def apply(self, spec: bytes) -> list[SchedulerCommand]:
        """ApplyModel, and the outcome of the EnsureTopic that follows."""
        commands = self.append(ApplyModel(Raw(spec), actor="test"))
        for command in list(commands):
            if isinstance(command, EnsureTopic):
                commands += self.append(TopicEnsured(command.model, command.topic, command.partitions))
        return commands

    def model(self, name: str = "churn") -> ModelState:
        return self.machine.state.models[name]

    def row(self, table: str, name: str, kind: type[RowT]) -> RowT:
        row = self.tables[table, name]
        assert isinstance(row, kind)
        return row

    def placement(self, name: str = "churn") -> PlacementRow:
        return self.row("placements", name, PlacementRow)

    def make_ready(self, name: str = "churn", only: str = "") -> None:
        """Every awaited replica of the model (on worker `only`) reports that it is ready."""
        for replica in list(self.model(name).replicas):
            if replica.awaited and replica.worker.startswith(only):
                version = self.model(name).launches[replica.generation].version
                self.append(
                    ReplicaReady(
                        replica.worker,
                        replica.incarnation,
                        name,
                        version,
                        replica.placement_epoch,
                        memory_bytes=replica.memory_bytes,
                        load_ms=40,
                        warmup_ms=5,
                    )
                )

    def release(self, name: str = "churn", most: int = 1_000) -> int:
        """Workers report the partitions they were asked to release. Returns how many."""
        releasing = [p for p in self.model(name).partitions if p.state == "releasing"][:most]
        for partition in releasing:
            assert partition.owner is not None
            self.append(
                PartitionReleased(
                    partition.owner.worker,
                    partition.owner.incarnation,
                    name,
                    partition.partition,
                    partition.epoch,
                    offset=10,
                )
            )
        return len(releasing)

    def drain(self, name: str = "churn", most: int = 1_000) -> int:
        """Workers report partitions of a deleted model as worked off. Returns how many."""
        assert self.model(name).working_off
        held = [(p, p.owner) for p in self.model(name).partitions if p.owner is not None][:most]
        for partition, (worker, incarnation, _) in held:
            number, epoch = partition.partition, partition.epoch
            self.append(PartitionReleased(worker, incarnation, name, number, epoch, offset=10, drained=True))
        return len(held)

    def fence(self, commands: list[SchedulerCommand]) -> None:
        """Carry out the fences among the commands."""
        for command in commands:
            if isinstance(command, FenceWorker):
                self.append(WorkerFenced(command.worker, command.incarnation, took_ms=80))

    def owners(self, name: str = "churn") -> dict[int, str]:
        return {p.partition: p.owner.worker for p in self.model(name).partitions if p.owner is not None}


def decisions(commands: list[SchedulerCommand], kind: str = "") -> list[Decision]:
    found = [command.decision for command in commands if isinstance(command, RecordDecision)]
    return [decision for decision in found if not kind or decision.kind == kind]


def kinds(commands: list[SchedulerCommand]) -> list[str]:
    return [decision.kind for decision in decisions(commands)]


TWO = {"min": 1, "max": 2}
INSTANCE = instance_id("churn")


def running() -> Cluster:
    """Two workers and a ready model on w0."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.append(joined("w1", "b"))
    cluster.apply(spec_json(replicas=TWO))
    cluster.make_ready()
    return cluster


def fail(cluster: Cluster, name: str = "churn") -> None:
    replica = next(replica for replica in cluster.model(name).replicas if replica.state == "loading")
    version = cluster.model(name).launches[replica.generation].version
    cluster.append(
        ReplicaFailed(
            replica.worker, replica.incarnation, name, version, replica.placement_epoch, "weights_missing", "no file."
        )
    )
