"""The policy under test: the real scheduler fold, over a synthetic sie.cluster, with simulated worker hosts.

Every decision is made by `SchedulerMachine.step`, with the solver, the elastic law and the partitions of production;
this file writes the records that scheduler processes and workers would write, carries out side effects, and follows the
published placement rows. Shares of traffic are those of the partitions: which buckets of a model's keys go to which
partition is asked of `sie_stream/routing.py`, for a sample of sessions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from time import process_time

import msgspec

from scheduler.machine import SchedulerMachine, fold_settings
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    DeviceBack,
    DeviceLost,
    DrainWorker,
    EnsureTopic,
    FenceWorker,
    PublishState,
    RecordDecision,
    SchedulerCommand,
    SchedulerElected,
    Tick,
    TopicEnsured,
    UncordonWorker,
    WorkerExited,
    WorkerFenced,
    WorkerHeartbeat,
    WorkerLeft,
)
from sie_stream.decisions import Decision
from sie_stream.settings import Settings
from sie_stream.sim.fleet.board import Board
from sie_stream.sim.fleet.events import Events
from sie_stream.sim.fleet.hosts import Hosts
from sie_stream.sim.fleet.policy import EPOCH_MS, RESTART_MS, WARM_UP_MS, Hit
from sie_stream.sim.fleet.population import Population
from sie_stream.sim.fleet.scenario import Scenario
from sie_stream.sim.fleet.workers import SimWorker, device_name, joined, workers_of

SCHEDULER = "s-sim"
FENCE_MS = 200
"""init_transactions on a transactional id, as measured on Kafka (0.06 to 0.6 s)."""
TOPIC_MS = 50
REPORT_MS = 2_000
DEVICE_SEEN_MS = 500
"""Until a worker has seen that a device does not answer."""
EXIT_SEEN_MS = 100
"""Until a supervisor has seen that a process ended, and said so."""
APPLY_EVERY_MS = 100

Beat = Callable[[], None]


class FoldPolicy:
    """`beat` is called now and then while the fleet is set up, which takes a while, so that progress can be shown."""

    name = "sie-stream"

    def __init__(
        self, scenario: Scenario, population: Population, board: Board, settings: Settings, beat: Beat | None = None
    ) -> None:
        self.board = board
        self.events = Events(EPOCH_MS)
        self.machine = SchedulerMachine(settings)
        self.decisions: dict[str, int] = {}
        """By kind."""
        self.step_s: list[tuple[float, bool]] = []
        """CPU time of each step that decided something, and whether the solver ran; heartbeats decide nothing. Not part
        of the digest."""
        self._scenario = scenario
        self._settings = settings
        self._population = population
        self._beat = beat or (lambda: None)
        self._offset = 0
        self._digest = hashlib.sha256()
        self._workers = {worker.name: worker for worker in workers_of(scenario.fleet)}
        self._hosts = Hosts(scenario.fleet, population, board, self.events, self._workers, self._say)
        self._restarting: dict[str, int] = {}
        """Workers that are drained for a restart: how long they are to be away."""
        self._to_restart: list[tuple[str, int]] = []

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    # ------------------------------------------------------------ the policy

    def start(self) -> None:
        self._say(SchedulerElected(SCHEDULER, fold_settings(self._settings), "simulated"))
        for worker in self._workers.values():
            self._join(worker)
        self.events.every(self._settings.tick_ms, lambda: self._say(Tick(SCHEDULER)))
        self.events.every(self._settings.heartbeat_ms, self._heartbeats)
        for number, spec in enumerate(self._population.specs):
            record = ApplyModel(msgspec.Raw(spec), "scenario")
            self.events.after(number * APPLY_EVERY_MS, lambda record=record: self._say(record))
        ends_ms = self.events.now_ms + WARM_UP_MS
        while self.events.now_ms < ends_ms and not self._is_set_up():
            self.events.run_until(self.events.now_ms + 1_000)
            self._beat()
        self.settle()
        self.events.every(REPORT_MS, lambda: self._hosts.report(REPORT_MS))

    def settle(self) -> None:
        self._hosts.settle()

    def hit(self, fault: Hit) -> None:
        workers = list(self._workers.values())
        match fault.kind:
            case "server-lost":
                for worker in workers:
                    if worker.server == fault.target and worker.up:
                        self._end(worker)
                        self.events.after(fault.for_ms, lambda worker=worker: self._join(worker))
            case "gpu-lost":
                self._lose_gpu(fault)
            case "worker-paused":
                self._pause(workers[fault.target % len(workers)], fault.for_ms)
            case "drain":
                for number in range(fault.at_once):
                    name = workers[(fault.target + number) % len(workers)].name
                    self._say(DrainWorker(name, "scenario"))
                    self.events.after(fault.for_ms, lambda name=name: self._say(UncordonWorker(name, "scenario")))
            case "rolling-restart":
                self._to_restart += [(worker.name, fault.for_ms) for worker in workers]
                for _ in range(fault.at_once):
                    self._restart_next()

    def counts(self) -> dict[str, int]:
        """switches: replicas loaded; migrations: replicas that handed over to others and went."""
        return {
            "switches": self.board.tally.loads,
            "migrations": self.decisions.get("replica_draining", 0),
            "redelivered": round(self.board.tally.interrupted),
            "restarted": self.decisions.get("worker_drained", 0),
        }

    # ------------------------------------------------------------ the log

    def _say(self, record: ClusterRecord) -> None:
        """Append a record, fold it, and carry out what follows."""
        if isinstance(record, WorkerHeartbeat):  # two of three records; a clock takes as long as these do
            self._carry_out(self._step(record), None)
            return
        started = process_time()
        commands = self._step(record)
        self._carry_out(commands, process_time() - started)

    def _step(self, record: ClusterRecord) -> list[SchedulerCommand]:
        commands = self.machine.step(self._offset, self.events.now_ms, record)
        self._offset += 1
        return commands

    def _carry_out(self, commands: Sequence[SchedulerCommand], took_s: float | None) -> None:
        if not commands:
            return
        solved = False
        for command in commands:
            self._digest.update(msgspec.json.encode(command))
            solved |= isinstance(command, RecordDecision) and command.decision.solver is not None
            self._follow(command)
        if took_s is not None and any(isinstance(command, RecordDecision) for command in commands):
            self.step_s.append((took_s, solved))

    def _follow(self, command: SchedulerCommand) -> None:
        match command:
            case RecordDecision():
                kind = command.decision.kind
                self.decisions[kind] = self.decisions.get(kind, 0) + 1
                self._notice(command.decision)
            case PublishState():
                if command.table == "placements":
                    self._hosts.row(command.name, command.body)
                elif command.table == "routes":
                    self._hosts.route(command.name, command.body)
            case EnsureTopic():
                outcome = TopicEnsured(command.model, command.topic, command.partitions)
                self.events.after(TOPIC_MS, lambda: self._say(outcome))
            case FenceWorker():
                fenced = WorkerFenced(command.worker, command.incarnation, FENCE_MS)
                self.events.after(FENCE_MS, lambda: self._fence(fenced))

    def _fence(self, fenced: WorkerFenced) -> None:
        """From here on that incarnation commits nothing: what it had in its engines is done again by others."""
        worker = self._workers[fenced.worker]
        if worker.incarnation == fenced.incarnation:
            self._hosts.clear(worker, killed=True)
        self._say(fenced)

    def _heartbeats(self) -> None:
        for worker in self._workers.values():
            if worker.up and not worker.paused:
                self._say(WorkerHeartbeat(worker.name, worker.incarnation))

    def _is_set_up(self) -> bool:
        models = self.machine.state.models
        if len(models) < len(self._population.names):
            return False
        return all(
            model.replicas
            and len(model.present()) >= model.replicas_wanted
            and all(replica.state == "ready" for replica in model.replicas)
            for model in models.values()
        )

    # ------------------------------------------------------------ lives of workers

    def _join(self, worker: SimWorker) -> None:
        if worker.up or not worker.devices:
            return
        worker.begin_life()
        self._say(joined(worker, self._scenario.fleet))

    def _end(self, worker: SimWorker) -> None:
        """The process is gone at once."""
        worker.up = False
        self._hosts.clear(worker, killed=True)

    def _exit(self, worker: SimWorker) -> None:
        """The process ends, and a supervisor on its server says so."""
        self._end(worker)
        exited = WorkerExited(worker.name, worker.incarnation, 1, "supervisor")
        self.events.after(EXIT_SEEN_MS, lambda: self._say(exited))

    def _lose_gpu(self, fault: Hit) -> None:
        """Its host goes on and says so, and again when it is repaired. A new life of the host has it in order."""
        worker = next(w for w in self._workers.values() if fault.target in w.devices)
        if not worker.up or worker.paused or fault.target in worker.lost:
            return
        incarnation, device = worker.incarnation, device_name(fault.target, self._scenario.fleet)
        worker.lost = (*worker.lost, fault.target)
        self._hosts.lose(worker, fault.target)
        lost = DeviceLost(worker.name, incarnation, device, "XID 79: the GPU has fallen off the bus")
        self.events.after(DEVICE_SEEN_MS, lambda: self._say(lost))

        def back() -> None:
            if worker.up and worker.incarnation == incarnation:
                worker.lost = tuple(other for other in worker.lost if other != fault.target)
                self._say(DeviceBack(worker.name, incarnation, device))

        self.events.after(fault.for_ms, back)

    def _pause(self, worker: SimWorker, for_ms: int) -> None:
        if not worker.up or worker.paused:
            return
        worker.paused = True
        self._hosts.pause(worker, True)
        incarnation = worker.incarnation

        def goes_on() -> None:
            if worker.incarnation != incarnation or not worker.up:
                return
            worker.paused = False
            self._hosts.pause(worker, False)
            if not self.machine.state.live(worker.name, incarnation):
                self._exit(worker)
                self.events.after(RESTART_MS, lambda: self._join(worker))

        self.events.after(for_ms, goes_on)

    def _restart_next(self) -> None:
        if self._to_restart:
            name, for_ms = self._to_restart.pop(0)
            self._restarting[name] = for_ms
            self.events.after(0, lambda: self._say(DrainWorker(name, "scenario")))

    def _notice(self, decision: Decision) -> None:
        """A worker that is drained for a restart stops, and comes back."""
        if decision.kind != "worker_drained" or decision.subject not in self._restarting:
            return
        worker, for_ms = self._workers[decision.subject], self._restarting.pop(decision.subject)
        self.events.after(0, lambda: self._restart(worker, for_ms))

    def _restart(self, worker: SimWorker, for_ms: int) -> None:
        worker.up = False
        self._hosts.clear(worker, killed=True)
        self._say(WorkerLeft(worker.name, worker.incarnation))

        def comes_back() -> None:
            self._join(worker)
            self._say(UncordonWorker(worker.name, "scenario"))
            self._restart_next()

        self.events.after(for_ms, comes_back)
