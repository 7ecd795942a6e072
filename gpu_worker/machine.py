"""The worker's decisions: what happened in, what to do out. Pure; simulation and replay call exactly this.

The parts: placement rows -> replicas.py and partitions.py; records -> admission.py; what each engine does next ->
batching.py; failures -> retries.py; results -> outcomes.py; answers under way -> token_streams.py;
transactions -> commits.py and pacing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from gpu_worker import commits, handover, partitions, switching
from gpu_worker.admission import admit, admit_backlogs
from gpu_worker.back_pressure import apply_back_pressure
from gpu_worker.batching import FAST_BATCH_MS, end_expired, next_finish_ms, on_batch_completed, run_engine
from gpu_worker.engine_ends import on_engine_ended
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineStarted,
    EngineStepped,
    ImageMoved,
    LoadFailed,
    ModelLoaded,
    ModelSwitched,
    SequenceAdopted,
    SequenceExported,
    SwitchFailed,
    TokensStreamed,
)
from gpu_worker.facts import (
    CommitAborted,
    CommitSucceeded,
    DataKeyChanged,
    DeviceFailed,
    DeviceMended,
    Identity,
    PartitionPositioned,
    PartitionReadOut,
    PlacementChanged,
    PlacementUnreadable,
    PositionLost,
    RecordsPolled,
    SendReports,
    StopRequested,
    StreamTokens,
    TimePassed,
    TopicMissing,
    WorkerCommand,
    WorkerEvent,
)
from gpu_worker.managed import managed_devices
from gpu_worker.outcomes import Outcomes
from gpu_worker.pacing import CommitPacer
from gpu_worker.replicas import engine_of, follow_replicas, on_load_failed, on_loaded, on_weights_moved
from gpu_worker.retries import POISON, on_batch_failed
from gpu_worker.sequence_images import ImagesFetched, ImagesTaken
from gpu_worker.token_streams import on_tokens_streamed
from gpu_worker.worker_state import WorkerState
from sie_stream.control import DeviceBack, DeviceLost, WorkerHeartbeat, WorkerJoined, WorkerLeft, WorkerLoad
from sie_stream.settings import Settings

SWEEP_MS = 100.0
"""How often waiting items are looked through for passed deadlines."""
BUSY_WAIT_MS = 1.0
SLOW_WAIT_MS = 4.0
IDLE_WAIT_MS = 200.0
"""While an engine or a transaction is at work the host waits for them, and looks at the topics this often."""


class WorkerMachine:
    """Implements loop.Machine. Every turn starts with TimePassed."""

    def __init__(self, identity: Identity, settings: Settings, outcomes: Outcomes) -> None:
        pacer = CommitPacer(float(settings.commit_interval_ms_min), float(settings.commit_interval_ms_max))
        managed = managed_devices(identity.devices, settings)
        self.state = WorkerState(identity, settings, outcomes, pacer, managed=managed)
        self._commits = commits.Commits()
        self._joined = False
        self._left = False
        self._heartbeat_at = 0.0
        self._sweep_at = 0.0

    @property
    def finished(self) -> bool:
        """After StopRequested: everything is committed and WorkerLeft is among the commands."""
        return self._left

    @property
    def busy(self) -> bool:
        """Whether an engine or a transaction may answer at any moment."""
        return (
            bool(self._commits.under_way)
            or any(engine.outstanding or engine.loading is not None for engine in self.state.engines.values())
            or switching.under_way(self.state)
            or bool(self.state.handover.fetching)
        )

    @property
    def records_max(self) -> int:
        """How many records the next poll may return; 0: none now."""
        return 0 if self.state.full_since else self.state.settings.worker_poll_max

    def wait_ms(self) -> float:
        """How long the next turn may wait for something to happen."""
        next_finish = next_finish_ms(self.state)
        wait = IDLE_WAIT_MS
        if self.busy:
            wait = SLOW_WAIT_MS if self._in_no_hurry(next_finish) else BUSY_WAIT_MS
        due = commits.due_in_ms(self.state, self._commits, next_finish)
        dues = (due, switching.turn_due_in_ms(self.state))
        return min([wait, *(one for one in dues if one is not None)])

    def _in_no_hurry(self, next_finish: float | None) -> bool:
        """Only slow batches or requests of continuous models run: the topics can be looked at less often."""
        if next_finish is not None:
            return next_finish > FAST_BATCH_MS
        return not self._commits.under_way and any(engine.outstanding for engine in self.state.engines.values())

    def decide(self, events: Sequence[WorkerEvent]) -> Sequence[WorkerCommand]:
        state = self.state
        state.commands = []
        state.reports = []
        state.deltas = []
        for event in events:
            self._take(event)
        if self._left:
            return state.commands
        self._join()
        admit_backlogs(state)
        self._sweep_expired()
        switching.switch_models(state)
        for engine in state.engines.values():
            run_engine(state, engine)
        handover.order_exports(state)
        handover.forget_old(state)
        partitions.position_awaiting(state)
        apply_back_pressure(state)
        commits.renew_idle(state, self._commits)
        due = commits.due_in_ms(state, self._commits, next_finish_ms(state))
        if due is not None and due <= 0:
            commits.start(state, self._commits)
        partitions.report_released(state)
        self._leave_when_done()
        if state.deltas:
            state.commands.append(StreamTokens(state.deltas))
        if state.reports:
            state.commands.append(SendReports(tuple(state.reports)))
        return state.commands

    def _take(self, event: WorkerEvent) -> None:
        state = self.state
        match event:
            case TimePassed():
                state.now_ms = event.now_ms
                state.at_ms = event.at_ms
            case RecordsPolled():
                if len(event.records) >= state.settings.worker_poll_max:
                    state.pacer.fell_behind(state.at_ms)
                admit(state, event.records)
            case BatchCompleted():
                on_batch_completed(state, engine_of(state, event.engine), event)
            case CommitSucceeded():
                commits.on_succeeded(state, self._commits, event)
            case CommitAborted():
                commits.on_aborted(state, self._commits, event)
            case PlacementChanged():
                self._follow(event)
            case PlacementUnreadable():
                state.note("placement_unreadable", model=event.model, message=event.message)
            case DataKeyChanged():
                state.outcomes.heed(event.key, event.value)
            case TopicMissing():
                pass  # for observers: the host looks again
            case PartitionPositioned():
                partitions.on_positioned(state, event)
            case PartitionReadOut():
                partitions.on_read_out(state, event)
            case PositionLost():
                partitions.on_position_lost(state, event)
            case EngineStarted():
                engine_of(state, event.engine).versions = event.versions
            case ModelLoaded():
                on_loaded(state, event)
            case LoadFailed():
                on_load_failed(state, event)
            case ModelSwitched() | SwitchFailed() | ImageMoved():
                on_weights_moved(state, event)
            case BatchFailed():
                on_batch_failed(state, engine_of(state, event.engine), event)
            case SequenceExported() | SequenceAdopted() | ImagesFetched() | ImagesTaken():
                handover.take(state, event)
            case EngineStepped():
                engine_of(state, event.engine).finished_at = state.at_ms
            case TokensStreamed():
                on_tokens_streamed(state, engine_of(state, event.engine), event)
            case EngineDied():
                engine = engine_of(state, event.engine)
                message = f"the engine process ended ({event.cause})"
                on_engine_ended(state, engine, POISON, message, event.cause)
            case DeviceFailed():
                me = state.identity
                state.reports.append(DeviceLost(me.worker, me.incarnation, event.device, event.cause))
            case DeviceMended():
                state.reports.append(DeviceBack(state.identity.worker, state.identity.incarnation, event.device))
            case StopRequested():
                state.stopping = True
                partitions.drain_all(state)
            case _:
                assert_never(event)

    def _follow(self, event: PlacementChanged) -> None:
        if self.state.stopping:
            return
        partitions.follow_partitions(self.state, event.model, event.row)
        handover.want_exports(self.state, event.model, event.row)
        follow_replicas(self.state, event.model, event.row)

    def _join(self) -> None:
        """Tell who we are first, then that we live."""
        state, identity = self.state, self.state.identity
        if not self._joined:
            self._joined = True
            state.reports.insert(
                0,
                WorkerJoined(
                    identity.worker,
                    identity.incarnation,
                    identity.host,
                    identity.pid,
                    identity.devices,
                    identity.backends,
                    identity.versions,
                    identity.labels,
                    identity.taints,
                    identity.tier,
                    identity.topology,
                ),
            )
            self._heartbeat_at = state.at_ms + state.settings.heartbeat_ms
        elif state.at_ms >= self._heartbeat_at:
            self._heartbeat_at = state.at_ms + state.settings.heartbeat_ms
            state.reports.append(WorkerHeartbeat(identity.worker, identity.incarnation))
            self._report_load()

    def _report_load(self) -> None:
        """What the models had to do, if anything."""
        state, identity = self.state, self.state.identity
        if not state.meter.due(state.at_ms):
            return
        running = {model: sum(p.running for p in places.values()) for model, places in state.by_model.items()}
        waiting = {model: count - running.get(model, 0) for model, count in state.open_by_model.items() if count}
        window_ms, loads, devices = state.meter.take(state.at_ms, waiting, running)
        if loads:
            state.reports.append(WorkerLoad(identity.worker, identity.incarnation, window_ms, loads, devices))

    def _sweep_expired(self) -> None:
        state = self.state
        if state.at_ms < self._sweep_at or not state.open_total:
            return
        self._sweep_at = state.at_ms + SWEEP_MS
        late = state.queues.take_expired(state.now_ms)
        if late:
            end_expired(state, late)

    def _leave_when_done(self) -> None:
        state = self.state
        if not state.stopping or state.partitions or state.dirty or self._commits.under_way:
            return
        if any(engine.outstanding or engine.suspects for engine in state.engines.values()):
            return
        self._left = True
        state.reports.append(WorkerLeft(state.identity.worker, state.identity.incarnation))
