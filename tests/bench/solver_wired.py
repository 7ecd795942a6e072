"""The scheduler's decision as it is made: through `SchedulerMachine.step`, explanation and records included.

The fleet and the models of `tests.bench.solver`, folded from records: 117 models with 267 replicas on 32 servers of 8.
Each run starts from the same snapshot. What is timed is the slowest single step that follows the change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Raw, Struct

from scheduler.machine import SchedulerMachine
from scheduler.state import from_bytes, to_bytes
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    Device,
    DeviceLost,
    EnsureTopic,
    RecordDecision,
    ReplicaReady,
    SchedulerCommand,
    SchedulerElected,
    Tick,
    TopicEnsured,
    WorkerExited,
    WorkerHeartbeat,
    WorkerJoined,
)
from sie_stream.decisions import Decision
from sie_stream.settings import Settings

SERVERS = 32
DEVICES_EACH = 8
GIB = 1 << 30
START_MS = 1_700_000_000_000
REPLACE_MS = 10_500
"""After a lost worker: a serving model waits this long for it."""


class Wired(Struct, frozen=True):
    """One change. Seconds of each run, by the wall and by the processor: they differ on a machine with other work."""

    name: str
    times: list[float]
    cpu: list[float]
    sentences: int
    """Most of one decision."""
    moved: int
    """Replicas that were moved and not lost."""


class Fleet:
    """A machine in front of a log."""

    def __init__(self, snapshot: bytes | None = None) -> None:
        state = None if snapshot is None else from_bytes(snapshot)
        self.machine = SchedulerMachine(Settings(), state)
        self.now_ms = START_MS if state is None else state.now_ms
        self.decisions: list[Decision] = []
        self.worst_s = 0.0
        self.worst_cpu_s = 0.0

    def append(self, record: ClusterRecord) -> list[SchedulerCommand]:
        started, cpu = time.perf_counter(), time.process_time()
        commands = self.machine.step(self.machine.state.next_offset, self.now_ms, record)
        self.worst_s = max(self.worst_s, time.perf_counter() - started)
        self.worst_cpu_s = max(self.worst_cpu_s, time.process_time() - cpu)
        self.decisions += [command.decision for command in commands if isinstance(command, RecordDecision)]
        for command in commands:
            if isinstance(command, EnsureTopic):
                self.append(TopicEnsured(command.model, command.topic, command.partitions))
        return commands

    def make_ready(self) -> None:
        for model in self.machine.state.models.values():
            for one in list(model.replicas):
                who = (one.worker, one.incarnation, model.model, model.version, one.placement_epoch)
                self.append(ReplicaReady(*who, one.memory_bytes, load_ms=1, warmup_ms=1))


def spec_of(name: str, memory_bytes: int, replicas: int) -> Raw:
    return Raw(
        msgspec.json.encode(
            {
                "name": name,
                "version": "1.0.0",
                "source": {"uri": f"/models/{name}"},
                "min_gpu_memory_mb": memory_bytes >> 20,
                "backend": {"name": "torch"},
                "service_type": "scoring",
                "replicas": {"min": replicas, "max": replicas},
                "input_schema": {"type": "object"},
            }
        )
    )


def running_fleet(models: Sequence[tuple[str, int, int]]) -> bytes:
    """Snapshot of the fleet with (name, bytes, replicas) of each model ready."""
    fleet = Fleet()
    fleet.append(SchedulerElected("s0"))
    for number in range(SERVERS):
        devices = tuple(Device(f"cuda:{one}", "cuda", 79 * GIB) for one in range(DEVICES_EACH))
        fleet.append(WorkerJoined(f"w{number:03}", "a", f"s{number:03}", 1, devices, ("torch",), {"cuda": "12.4"}))
    for name, memory_bytes, replicas in models:
        fleet.append(ApplyModel(spec_of(name, memory_bytes, replicas)))
    fleet.make_ready()
    return to_bytes(fleet.machine.state)


def one_model_added(fleet: Fleet, run: int) -> None:
    fleet.append(ApplyModel(spec_of(f"new{run}", (1 + run * 7 % 40) * GIB, 1 + run % 4)))


def one_gpu_lost(fleet: Fleet, run: int) -> None:
    held = sorted({(r.worker, r.device) for m in fleet.machine.state.models.values() for r in m.replicas})
    worker, device = held[run * 7 % len(held)]
    fleet.append(DeviceLost(worker, "a", device, "XID 79"))


def one_server_lost(fleet: Fleet, run: int) -> None:
    lost = f"w{run % SERVERS:03}"
    fleet.append(WorkerExited(lost, "a", -9, "bench"))
    fleet.now_ms += REPLACE_MS
    for number in range(SERVERS):
        fleet.append(WorkerHeartbeat(f"w{number:03}", "a"))
    fleet.append(Tick("s0"))  # after a stall of the log nobody is lost
    fleet.append(Tick("s0"))


CHANGES: tuple[tuple[str, Callable[[Fleet, int], None]], ...] = (
    ("one model added", one_model_added),
    ("one GPU lost", one_gpu_lost),
    ("one server lost", one_server_lost),
)


def measure_wired(models: Sequence[tuple[str, int, int]], runs: int) -> list[Wired]:
    snapshot = running_fleet(models)
    found: list[Wired] = []
    for name, change in CHANGES:
        times, cpu, sentences, moved = list[float](), list[float](), 0, 0
        for run in range(runs + 1):
            fleet = Fleet(snapshot)
            change(fleet, run)
            assert any(decision.kind == "replica_placed" for decision in fleet.decisions), name
            sentences = max(sentences, *(len(decision.rejected) for decision in fleet.decisions))
            moved += sum(decision.kind == "replica_moving" for decision in fleet.decisions)
            if run:  # the first warms up
                times.append(fleet.worst_s)
                cpu.append(fleet.worst_cpu_s)
        found.append(Wired(name, times, cpu, sentences, moved))
    return found
