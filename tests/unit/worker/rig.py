"""A worker in a world of its own: the log in memory, virtual time, scripted engines, and a hand that places models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from gpu_worker.committer import InlineCommitter, TransactionRunner
from gpu_worker.facts import Identity, WorkerCommand, WorkerEvent
from gpu_worker.host import WorkerHost
from gpu_worker.machine import WorkerMachine
from gpu_worker.outcomes import Outcomes
from gpu_worker.sim.engine import EngineScript, SimEngines
from gpu_worker.sim.images import SimImages
from schemas.codec import decode_cluster, decode_result, encode_row, encode_work
from sie_stream.control import (
    ClusterRecord,
    Device,
    ModelLaunch,
    PartitionPlacement,
    PlacementRow,
    ReplicaPlacement,
)
from sie_stream.ids import LANES, TopicPartition, instance_id
from sie_stream.loop import Observer
from sie_stream.ports import TopicSpec
from sie_stream.postprocess import stage2_of
from sie_stream.privacy.vault import Cipher, Vault
from sie_stream.records import Headers, LogWrite, Result, WorkItem
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from topics.catalog import system_topics, work_topic

DEVICE = "cpu:0"
INCARNATION = "w0-1"


def launch_of(model: str, **changes: object) -> ModelLaunch:
    fields: dict[str, object] = {
        "model": model,
        "version": "1",
        "instance": instance_id(model),
        "backend": "sim",
        "source": f"/models/{model}",
        "weights_digest": "sha256:aa",
        "config": {},
        "service_type": "scoring",
        "priority": 1,
        "memory_bytes": 1000,
        "batch_max": 8,
    }
    return ModelLaunch(**{**fields, **changes})  # type: ignore[arg-type]


def work_item(request_id: str, model: str = "m", **changes: object) -> WorkItem:
    fields: dict[str, object] = {
        "request_id": request_id,
        "instance": instance_id(model),
        "model": model,
        "version": "1",
        "variant": "stable",
        "route_epoch": 3,
        "priority": 1,
        "inputs": b'{"x":1}',
        "key": b"",
        "source_topic": "sie.requests",
        "source_partition": 0,
        "source_offset": 7,
        "requested_at_ms": 1_700_000_000_000,
        "received_at_ms": 1_700_000_000_000,
        "routed_at_ms": 1_700_000_000_000,
    }
    return WorkItem(**{**fields, **changes})  # type: ignore[arg-type]


class World:
    """The log, the scheduler's hand, and the users."""

    def __init__(self, settings: Settings | None = None, cipher: Cipher | None = None) -> None:
        self.settings = settings or Settings()
        self.cipher = cipher
        """Of the key ring that every worker has; None: there is none."""
        self.names = self.settings.topics
        self.log = SimLog()
        self.clock = self.log.clock
        self.log.admin().ensure(system_topics(self.settings))
        self.writer = self.log.plain_writer()
        self.rows: dict[str, PlacementRow] = {}
        self.epoch = 10
        self.images: dict[str, SimImages] = {}
        """Of the workers that move running requests, by their incarnation."""

    def add_model(self, model: str, width: int = 1, **changes: object) -> ModelLaunch:
        self.log.admin().ensure([work_topic(self.settings, model, width)])
        self.rows[model] = PlacementRow(model, self.names.work(model), (), ())
        return launch_of(model, **changes)

    def add_topic(self, topic: str) -> None:
        self.log.admin().ensure([TopicSpec(topic, 1, {})])

    def place(self, launch: ModelLaunch, incarnation: str = INCARNATION) -> int:
        """One replica of the model on that worker; its placement epoch."""
        row = self.rows[launch.model]
        epoch = self.next_epoch()
        replica = ReplicaPlacement(incarnation.split("-")[0], incarnation, DEVICE, epoch, launch)
        self.publish(PlacementRow(row.model, row.topic, (*row.replicas, replica), row.partitions))
        return epoch

    def give(self, model: str, numbers: list[int], incarnation: str = INCARNATION) -> int:
        """Assign partitions; the epoch of the assignment."""
        epoch = self.next_epoch()
        self._partitions(model, numbers, incarnation, epoch, "assigned")
        return epoch

    def ask_back(self, model: str, numbers: list[int]) -> None:
        for number in numbers:
            held = next(one for one in self.rows[model].partitions if one.partition == number)
            self._partitions(model, [number], held.incarnation, held.placement_epoch, "releasing")

    def drain(self, model: str, numbers: list[int]) -> None:
        for number in numbers:
            held = next(one for one in self.rows[model].partitions if one.partition == number)
            self._partitions(model, [number], held.incarnation, held.placement_epoch, "draining")

    def take_away(self, model: str) -> None:
        row = self.rows[model]
        self.publish(PlacementRow(row.model, row.topic, row.replicas, ()))

    def _partitions(self, model: str, numbers: list[int], incarnation: str, epoch: int, state: str) -> None:
        row = self.rows[model]
        kept = {one.partition: one for one in row.partitions}
        for number in numbers:
            kept[number] = PartitionPlacement(number, incarnation.split("-")[0], incarnation, epoch, state)  # type: ignore[arg-type]
        self.publish(PlacementRow(row.model, row.topic, row.replicas, tuple(kept[n] for n in sorted(kept))))

    def publish(self, row: PlacementRow) -> None:
        self.rows[row.model] = row
        self.writer.write([LogWrite(self.names.placements, encode_row(row), row.model.encode(), 0)])

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def send(self, *items: WorkItem, bucket: int = 0, width: int = 1, headers: Headers = ()) -> None:
        for item in items:
            partition = item.priority * width + bucket
            self.writer.write([LogWrite(self.names.work(item.model), encode_work(item), item.key, partition, headers)])

    def results(self) -> dict[str, Result]:
        """Terminal records by request id; fails when a request has two."""
        found = [decode_result(record.value) for record in self.log.visible(self.names.results)]
        counts = Counter(result.request_id for result in found)
        assert all(count == 1 for count in counts.values()), counts.most_common(3)
        return {result.request_id: result for result in found}

    def reports(self, kind: type[ClusterRecord]) -> list[ClusterRecord]:
        decoded = [decode_cluster(record.value) for record in self.log.visible(self.names.cluster)]
        return [record for record in decoded if isinstance(record, kind)]

    def committed(self, model: str, number: int) -> int:
        place = TopicPartition(self.names.work(model), number)
        found = self.log.reader(self.names.worker_group).committed([place])[place]
        return -1 if found is None else found.offset


class Rig:
    """One worker incarnation in a world."""

    def __init__(
        self,
        world: World,
        incarnation: str = INCARNATION,
        script: EngineScript | None = None,
        observers: tuple[Observer[WorkerEvent, WorkerCommand], ...] = (),
    ) -> None:
        self.world = world
        worker = incarnation.split("-")[0]
        settings, clock, names = world.settings, world.clock, world.names
        self.identity = Identity(
            worker=worker,
            incarnation=incarnation,
            host="here",
            pid=1,
            devices=(Device(DEVICE, "cpu", 1 << 30),),
            backends=("sim",),
            versions={},
            images_at=incarnation if settings.sequence_images_mb else "",
        )
        outcomes = Outcomes(
            names,
            self.identity,
            settings.record_bytes_max,
            settings.deadletter_bytes_max,
            lambda launch: stage2_of(settings.record_bytes_max),
            None if world.cipher is None else Vault(world.cipher, names.keys),
        )
        self.machine = WorkerMachine(self.identity, settings, outcomes)
        self.engines = SimEngines(clock, script)
        self.writer = world.log.transactional_writer(names.worker_transactional_id(worker))
        self.writer.init()
        self.reader = world.log.reader(names.worker_group, f"{incarnation}-work")
        runner = TransactionRunner(self.writer, self.reader, clock, names.prefix)
        self.images = SimImages(incarnation, world.images)
        self.host = WorkerHost(
            self.machine,
            self.reader,
            world.log.reader(names.worker_group, f"{incarnation}-placements"),
            InlineCommitter(runner),
            world.log.plain_writer(),
            self.engines,
            clock,
            names,
            observers,
            images=self.images if settings.sequence_images_mb else None,
        )

    def run(self, ms: int = 200) -> None:
        for _ in range(ms):
            self.host.run_turn()
            self.world.clock.advance(1)

    def run_until(self, done: Callable[[], object], ms: int = 20_000) -> None:
        for _ in range(ms):
            if done():
                return
            self.host.run_turn()
            self.world.clock.advance(1)
        raise AssertionError(f"not within {ms} virtual ms")


def serving(
    script: EngineScript | None = None, settings: Settings | None = None, cipher: Cipher | None = None, **changes: Any
) -> tuple[World, Rig]:
    """A worker that serves model `m` with all its lanes."""
    world = World(settings, cipher)
    rig = Rig(world, script=script)
    world.place(world.add_model("m", **changes))
    rig.run(100)
    world.give("m", list(range(LANES)))
    rig.run(20)
    return world, rig
