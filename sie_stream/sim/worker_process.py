"""A worker of a world: the host of production, virtual engines, and a committer in a lane of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpu_worker.backends.base import EngineInput, EngineOutput, failed
from gpu_worker.committer import TransactionRunner
from gpu_worker.facts import (
    Commit,
    CommitAborted,
    CommitSucceeded,
    DeviceFailed,
    DeviceMended,
    Identity,
    Note,
    WorkerCommand,
    WorkerEvent,
)
from gpu_worker.host import WorkerHost
from gpu_worker.machine import WorkerMachine
from gpu_worker.outcomes import Outcomes
from gpu_worker.sim.engine import EngineScript, SimEngines
from gpu_worker.sim.images import SimImages, Standing
from sie_stream.control import (
    Device,
)
from sie_stream.errors import LogError
from sie_stream.postprocess import stage2_of
from sie_stream.sim.parts import Parts
from sie_stream.sim.traffic import right_answer
from sie_stream.sim.world import Lane, Process, World
from sie_stream.sim.writers import SimTransactionalWriter

MIB = 1024 * 1024
STOP_BUDGET_MS = 10_000
COMMIT_MS = (1, 12)


class LaneCommitter:
    """Implements CommitPort: one commit at a time, beside the loop."""

    def __init__(self, runner: TransactionRunner, lane: Lane) -> None:
        self._runner = runner
        self._lane = lane
        self._outcome: CommitSucceeded | CommitAborted | LogError | None = None

    def start(self, commit: Commit) -> None:
        self._lane.later(self._lane.world.between(COMMIT_MS), lambda: self._run(commit))

    def _run(self, commit: Commit) -> None:
        try:
            self._outcome = self._runner.run(commit)
        except LogError as error:
            self._outcome = error

    def outcome(self) -> CommitSucceeded | CommitAborted | None:
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, LogError):
            raise outcome
        return outcome


class MoveTally:
    """Implements loop.Observer."""

    def __init__(self, moved: dict[str, int]) -> None:
        self._moved = moved

    def saw(self, events: Sequence[WorkerEvent], commands: Sequence[WorkerCommand]) -> None:
        for command in commands:
            if isinstance(command, Note) and command.event.startswith(("sequence_", "images_")):
                self._moved[command.event] = self._moved.get(command.event, 0) + 1


class WorkerBody:
    host_type = WorkerHost
    runner_type = TransactionRunner
    writer_type = SimTransactionalWriter

    def __init__(self, world: World, lane: Lane, parts: Parts) -> None:
        process, settings = lane.process, parts.settings
        names, log, client = settings.topics, world.log, lane.client
        commit_lane = world.lane(process, "commit")
        self._world = world
        self._name = process.name
        self.parts = parts
        self._stop_at_ms = 0
        self._writer = self.writer_type(
            log.cluster,
            names.worker_transactional_id(process.name),
            settings.transaction_timeout_ms,
            settings.record_bytes_max,
            commit_lane.client,
        )
        work = log.reader(names.worker_group, client)
        identity = Identity(
            worker=process.name,
            incarnation=process.incarnation,
            host="sim",
            pid=1,
            devices=tuple(
                Device(f"cpu:{number}", "cpu", parts.fleet.memory_mb * MIB) for number in range(parts.fleet.devices)
            ),
            backends=("sim",),
            versions={},
            images_at=process.incarnation if settings.sequence_images_mb else "",
        )
        stage2 = stage2_of(settings.record_bytes_max)
        outcomes = Outcomes(
            names, identity, settings.record_bytes_max, settings.deadletter_bytes_max, lambda launch: stage2
        )
        self.engines = SimEngines(log.clock, self.script())
        self.host = self.host_type(
            WorkerMachine(identity, settings, outcomes),
            work,
            log.reader(names.worker_group, client),
            LaneCommitter(self.runner_type(self._writer, work, log.clock, names.prefix), commit_lane),
            log.plain_writer(client=client),
            self.engines,
            log.clock,
            names,
            (MoveTally(parts.moved),),
            device_changes=self.device_changes,
            images=self._images(process) if settings.sequence_images_mb else None,
        )
        self._device_lost = False

    def _images(self, process: Process) -> SimImages:
        def standing() -> Standing:
            if not process.alive:
                return "gone"
            return "silent" if self._world.clock.now_ms() < process.frozen_until_ms else "there"

        return SimImages(process.incarnation, self.parts.images, standing)

    def device_changes(self) -> tuple[DeviceFailed | DeviceMended, ...]:
        """What the scenario does to the first device of this worker."""
        lost = self.parts.faults is not None and self.parts.faults.lost_device(self._name)
        if lost == self._device_lost:
            return ()
        self._device_lost = lost
        return (DeviceFailed("cpu:0", "XID 79: by the scenario") if lost else DeviceMended("cpu:0"),)

    def start(self) -> None:
        self._writer.init()

    def turn(self) -> float | None:
        chance = self._world.random
        engine = self.parts.engine
        span = engine.slow_ms if chance.random() < engine.slow_share else engine.batch_ms
        slowness = self.parts.faults.slowness(self._name) if self.parts.faults is not None else 1.0
        self.engines.script.batch_ms = self._world.between(span) * slowness
        self.host.run_turn()
        if self.host.finished:
            return None
        if self._stop_at_ms and self._world.clock.now_ms() > self._stop_at_ms:
            self._world.note(f"{self._name} did not stop in time")
            return None
        return chance.randint(1, max(8, math.ceil(self.host.machine.wait_ms())))

    def script(self) -> EngineScript:
        script = EngineScript()
        if self.parts.traffic is not None:
            unfit = self.parts.traffic.unfit
            script.kills, script.hangs, script.raises = unfit.kills, unfit.hangs, unfit.raises
            script.answer = self.answer
            script.broken = self.parts.traffic.broken
            if self.parts.engine.side_by_side:
                script.movable = self.parts.settings.sequence_images_mb > 0
                script.continuous = dict.fromkeys(self.parts.traffic.models[::2], self.parts.engine.side_by_side)
        return script

    def answer(self, item: EngineInput) -> EngineOutput:
        assert self.parts.traffic is not None
        if item.request_id in self.parts.traffic.unfit.refused:
            return failed(item, "engine_refused", "scripted refusal of this input")
        return EngineOutput(item.request_id, right_answer(item.request_id, item.inputs))

    def ask_to_stop(self) -> None:
        self._stop_at_ms = self._world.clock.now_ms() + STOP_BUDGET_MS
        self.host.request_stop()


def kill_engine(process: Process) -> None:
    if isinstance(process.body, WorkerBody):
        for engine in list(process.body.host.machine.state.engines):
            process.body.engines.kill(engine)
