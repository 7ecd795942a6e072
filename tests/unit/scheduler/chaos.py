"""Random but lawful histories of a cluster, for properties that must hold whatever happens.

`World` plays everybody but the scheduler: people, workers, supervisors, Kafka. It sends what they could send, late,
twice, or about the past, and checks after each record what must always be true.
"""

from __future__ import annotations

import random

from msgspec import Raw, structs

from scheduler.machine import fold_settings
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    CordonWorker,
    DeleteModel,
    DeviceBack,
    DeviceLost,
    DrainWorker,
    EngineLost,
    EnsureTopic,
    FenceWorker,
    PartitionReleased,
    PlacementRow,
    ReplicaFailed,
    ReplicaReady,
    SchedulerElected,
    Tick,
    TopicEnsured,
    TopicFailed,
    UncordonWorker,
    UndoDecision,
    WorkerExited,
    WorkerFenced,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from sie_stream.engine_facts import EngineModel
from sie_stream.settings import Settings
from tests.unit.scheduler.kit import MIB, Cluster, decisions, joined, spec_json

MODELS = ("churn", "risk", "fraud", "tariff", "upsell", "yield")
WORKERS = ("w0", "w1", "w2")

Assignment = tuple[str, str, int]
"""Worker, incarnation, epoch of a partition as it was last published."""


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster()
        self.joins = 0
        self.running: dict[str, str] = {}
        """{worker: incarnation} of processes that are up."""
        self.undone: list[FenceWorker | EnsureTopic] = []
        """Side effects whose outcome has not been written yet."""
        self.published: dict[tuple[str, int], Assignment] = {}
        self.ended: dict[Assignment, None] = {}
        """Assignments that can commit no more: released."""
        self.gone: dict[tuple[str, str], None] = {}
        """Incarnations that can commit no more: fenced, replaced, or left."""
        told = Settings(rebalance_policy="always" if seed % 2 else "never")
        self.send(SchedulerElected("s0", fold_settings(told)))
        for _ in WORKERS:
            self.join()

    # ------------------------------------------------------------ the log, and what must hold after each record

    def send(self, record: ClusterRecord) -> None:
        self._note_ends(record)
        commands = self.cluster.append(record)
        self.undone += [c for c in commands if isinstance(c, FenceWorker | EnsureTopic)]
        self._check_owners()
        self._check_memory()
        self._check_cordons()
        for decision in decisions(commands):
            assert decision.reason, decision
            assert decision.subject, decision
            assert decision.decision.startswith(f"d-{decision.cause_offset}-"), decision

    def _note_ends(self, record: ClusterRecord) -> None:
        match record:
            case WorkerFenced() | WorkerLeft():
                self.gone[record.worker, record.incarnation] = None
            case WorkerJoined():
                for other in [key for key in self.published.values() if key[0] == record.worker]:
                    if other[1] != record.incarnation:
                        self.gone[other[0], other[1]] = None
            case PartitionReleased():
                self.ended[record.worker, record.incarnation, record.placement_epoch] = None
            case _:
                pass

    def _check_owners(self) -> None:
        """A partition changes hands only after a release of that assignment or the end of that incarnation."""
        now: dict[tuple[str, int], Assignment] = {}
        for (table, name), row in self.cluster.tables.items():
            if table == "placements":
                assert isinstance(row, PlacementRow)
                for placed in row.partitions:
                    owner = (placed.worker, placed.incarnation, placed.placement_epoch)
                    assert (name, placed.partition) not in now, "two owners in one row"
                    now[name, placed.partition] = owner
        for place, before in self.published.items():
            after = now.get(place)
            if after == before:
                continue
            released = before in self.ended
            assert released or before[:2] in self.gone, f"{place} was taken from {before} and given to {after}"
            assert after is None or after[2] > before[2], f"epochs must grow: {before} {after}"
        for model in self.cluster.machine.state.models.values():
            assert model.working_off or not any(p.drained for p in model.partitions), f"{model.model} is wanted"
        self.published = now

    def _check_memory(self) -> None:
        used: dict[tuple[str, str], int] = {}
        for model in self.cluster.machine.state.models.values():
            for replica in model.replicas:
                key = (replica.worker, replica.device)
                used[key] = used.get(key, 0) + replica.memory_bytes
        for worker in self.cluster.machine.state.workers.values():
            for device in worker.devices:
                assert used.get((worker.worker, device.device), 0) <= device.memory_bytes

    def _check_cordons(self) -> None:
        """Nothing is placed on a worker that is out of service, and one that is drained holds nothing."""
        state = self.cluster.machine.state
        for model in state.models.values():
            for replica in model.replicas:
                cordon = state.cordons.get(replica.worker)
                fresh = replica.placement_epoch == state.next_offset - 1
                assert cordon is None or (not fresh and cordon.phase != "drained"), (replica, cordon)

    # ------------------------------------------------------------ what can happen

    def turn(self) -> None:
        act = self.random.choices(
            (self.time, self.apply, self.delete, self.join, self.die, self.leave, self.outcome, self.load, self.release,
             self.stray, self.change_leader, self.maintain, self.undo, self.device,
             self.engine),
            (20, 10, 1, 2, 2, 1, 25, 40, 40, 5, 1, 4, 8, 2, 4),
        )[0]  # fmt: skip
        act()

    def time(self) -> None:
        for _ in range(self.random.choice((1, 1, 1, 4, 12))):
            self.cluster.now_ms += self.random.choice((250, 250, 260, 900))
            for worker, incarnation in self.running.items():
                if self.random.random() < 0.9:
                    self.send(WorkerHeartbeat(worker, incarnation))
            self.send(Tick(self.cluster.machine.state.leader))

    def apply(self) -> None:
        most = self.random.randint(1, 3)
        spec = spec_json(
            self.random.choice(MODELS),
            version=f"{self.random.randint(1, 3)}.0.0",
            memory_mb=self.random.choice((100, 100, 200, 300, 600, 5_000)),
            replicas={"min": self.random.randint(1, most), "max": most},
        )
        self.send(ApplyModel(Raw(spec if self.random.random() < 0.95 else b'{"name": "churn"}')))

    def delete(self) -> None:
        self.send(DeleteModel(self.random.choice(MODELS)))

    def join(self) -> None:
        self.joins += 1
        down = [worker for worker in WORKERS if worker not in self.running]
        worker = self.random.choice(down if down and self.random.random() < 0.8 else WORKERS)
        self.running[worker] = f"i{self.joins}"
        self.send(joined(worker, f"i{self.joins}", memory_mb=1_000, devices=self.random.randint(1, 2)))

    def die(self) -> None:
        if self.running:
            worker = self.random.choice(sorted(self.running))
            incarnation = self.running.pop(worker)
            if self.random.random() < 0.5:
                self.send(WorkerExited(worker, incarnation, -9, "up"))

    def leave(self) -> None:
        if self.running:
            worker = self.random.choice(sorted(self.running))
            incarnation = self.running.pop(worker)
            if self.random.random() < 0.5:
                self.release_of(worker)
            self.send(WorkerLeft(worker, incarnation))

    def outcome(self) -> None:
        """The edge carries out a side effect; sometimes its outcome is lost."""
        if not self.undone:
            return
        command = self.undone.pop(self.random.randrange(len(self.undone)))
        luck = self.random.random()
        if luck < 0.1:
            return
        if isinstance(command, FenceWorker):
            if self.running.get(command.worker) == command.incarnation:
                del self.running[command.worker]  # it finds out and exits
            self.send(WorkerFenced(command.worker, command.incarnation, 50))
        elif luck < 0.25:
            self.send(TopicFailed(command.model, command.topic, "no."))
        else:
            self.send(TopicEnsured(command.model, command.topic, command.partitions))

    def load(self) -> None:
        """A worker answers one placement."""
        loading = [
            (model, replica)
            for model in self.cluster.machine.state.models.values()
            for replica in model.replicas
            if replica.awaited and self.running.get(replica.worker) == replica.incarnation
        ]
        if not loading:
            return
        model, replica = self.random.choice(loading)
        who = (replica.worker, replica.incarnation, model.model, model.launches[replica.generation].version)
        if self.random.random() < 0.2:
            self.send(ReplicaFailed(*who, replica.placement_epoch, "boom", "it broke."))
        else:
            self.send(ReplicaReady(*who, replica.placement_epoch, 100 * MIB, 10, 1))

    def release(self) -> None:
        """A worker answers one request to release."""
        asked = [
            (model.model, partition)
            for model in self.cluster.machine.state.models.values()
            for partition in model.partitions
            if partition.state == "releasing" or (partition.state == "assigned" and model.working_off)
        ]
        if asked:
            name, partition = self.random.choice(asked)
            owner = partition.owner
            assert owner is not None
            drained = partition.state == "assigned"
            if self.running.get(owner.worker) == owner.incarnation:
                self.send(
                    PartitionReleased(
                        owner.worker, owner.incarnation, name, partition.partition, partition.epoch, 1, drained
                    )
                )

    def release_of(self, worker: str) -> None:
        for model in list(self.cluster.machine.state.models.values()):
            for partition in model.partitions:
                owner = partition.owner
                if owner is not None and owner.worker == worker:
                    self.send(
                        PartitionReleased(
                            owner.worker, owner.incarnation, model.model, partition.partition, partition.epoch, offset=1
                        )
                    )
                    break

    def stray(self) -> None:
        """Something said before arrives again."""
        kinds = (ReplicaReady, ReplicaFailed, WorkerFenced, WorkerExited, TopicEnsured, WorkerLeft, WorkerHeartbeat)
        past = [record for _, _, record in self.cluster.log if isinstance(record, kinds)]
        if past:
            self.send(self.random.choice(past))

    def undo(self) -> None:
        """Somebody takes back one of the last changes of a model's placement."""
        changes = [change for model in self.cluster.machine.state.models.values() for change in model.journal]
        if changes:
            self.send(UndoDecision(self.random.choice(changes).decision, actor="ann"))

    def change_leader(self) -> None:
        self.send(SchedulerElected(f"s{self.random.randint(1, 3)}"))

    def maintain(self) -> None:
        """Somebody takes a worker out of service, or back."""
        command = self.random.choice((CordonWorker, DrainWorker, UncordonWorker, UncordonWorker))
        self.send(command(self.random.choice(WORKERS), "test"))

    def device(self) -> None:
        """A device of a running worker fails, or is in order again."""
        if self.running:
            worker = self.random.choice(sorted(self.running))
            kind = self.random.choice((DeviceLost("", "", "", "XID 79"), DeviceBack("", "", "")))
            name = self.random.choice(("cpu0", "cpu1"))
            self.send(structs.replace(kind, worker=worker, incarnation=self.running[worker], device=name))

    def engine(self) -> None:
        """An engine of a running worker ends, with what it had loaded."""
        if not self.running:
            return
        worker = self.random.choice(sorted(self.running))
        device, incarnation = self.random.choice(("cpu0", "cpu1")), self.running[worker]
        loaded = tuple(
            EngineModel(model.model, "", replica.placement_epoch)
            for model in self.cluster.machine.state.models.values()
            for replica in model.replicas
            if (replica.worker, replica.device) == (worker, device)
        )
        suspects = tuple(self.random.sample(("r1", "r2", "r3", "load:churn"), self.random.randint(0, 2)))
        given_up = suspects[: self.random.randint(0, 1)]
        self.send(EngineLost(worker, incarnation, device, "sklearn", "SIGKILL", loaded, 2, suspects, given_up))

    # ------------------------------------------------------------ when the faults stop

    def heal(self) -> None:
        """Everybody is up, in service, and answers. After this everything that can be placed must serve."""
        for worker in list(self.cluster.machine.state.cordons):
            self.send(UncordonWorker(worker, "test"))
        for worker in WORKERS:
            self.joins += 1
            self.running[worker] = f"i{self.joins}"
            self.send(joined(worker, f"i{self.joins}", memory_mb=40_000))
        for name in MODELS:
            if name in self.cluster.machine.state.models:
                self.send(ApplyModel(self.cluster.machine.state.models[name].spec))
        for _ in range(120):
            for command in self.undone:
                if isinstance(command, FenceWorker):
                    self.send(WorkerFenced(command.worker, command.incarnation, 50))
                else:
                    self.send(TopicEnsured(command.model, command.topic, command.partitions))
            self.undone.clear()
            for name in list(self.cluster.machine.state.models):
                self.cluster.make_ready(name)
                asked = [p for p in self.cluster.model(name).partitions if p.state == "releasing" and p.owner]
                self.ended.update({(p.owner.worker, p.owner.incarnation, p.epoch): None for p in asked if p.owner})
                self.cluster.release(name)
            self.cluster.now_ms += 250
            for worker, incarnation in self.running.items():
                self.send(WorkerHeartbeat(worker, incarnation))
            self.send(Tick(self.cluster.machine.state.leader))
