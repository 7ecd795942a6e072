"""The scheduler itself: `step(offset, timestamp_ms, record)` folds one record of sie.cluster and says what follows.

Pure: the same records in the same order give the same commands, byte for byte, in every process. The machine does not
know whether it leads; it always says what a leader would do. The host drops the commands of records below the offset
that an earlier leader committed, and publishes the others in one transaction with the offset.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import structs

from scheduler.converge import converge, model_due_ms
from scheduler.declarations import (
    ask_topic_again,
    delete_model,
    drain_deleted,
    topic_ensured,
    topic_failed,
)
from scheduler.devices import device_back, device_lost
from scheduler.elastic import look_at_loads, work_waiting, worker_load
from scheduler.engines import engine_lost
from scheduler.holds import change_hold
from scheduler.maintenance import cordon_worker, drain_worker, say_drained, uncordon_worker
from scheduler.membership import (
    check_workers,
    fence_lost_again,
    forgive_silence,
    worker_exited,
    worker_fenced,
    worker_heard,
    worker_joined,
    worker_left,
)
from scheduler.rebalance import note_latencies, rebalance, want_rebalance
from scheduler.replanning import advance_plan
from scheduler.replicas import (
    give_up_waiting,
    partition_released,
    replica_answered,
    replica_failed,
    replica_ready,
)
from scheduler.rollouts import apply_or_roll_out, follow_rollouts, rollout_order, start_rollout, variant_window
from scheduler.state import NEVER_MS, ClusterState
from scheduler.step import Step
from scheduler.undo import undo_decision
from scheduler.variants import check_routes, routes_held
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    CordonWorker,
    DeleteModel,
    DeviceBack,
    DeviceLost,
    DrainWorker,
    EngineLost,
    FoldSettings,
    HoldTopic,
    PartitionReleased,
    ReleaseTopic,
    ReplicaAnswered,
    ReplicaFailed,
    ReplicaReady,
    RolloutOrder,
    RoutesHeld,
    SchedulerCommand,
    SchedulerElected,
    StartRollout,
    Tick,
    TopicEnsured,
    TopicFailed,
    UncordonWorker,
    UndoDecision,
    VariantWindow,
    WorkerExited,
    WorkerFenced,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkWaiting,
)
from sie_stream.settings import Settings

Command = (
    ApplyModel
    | StartRollout
    | RolloutOrder
    | DeleteModel
    | CordonWorker
    | DrainWorker
    | UncordonWorker
    | UndoDecision
    | HoldTopic
    | ReleaseTopic
)


class SchedulerMachine:
    """Owns the state; `state` is for reading."""

    def __init__(self, settings: Settings, state: ClusterState | None = None) -> None:
        self.settings = settings
        """Of this process; in force as long as no leader on the log has told its own."""
        self.state = ClusterState() if state is None else state
        self._in_force = (self.state.settings, in_force(settings, self.state.settings))

    @property
    def settings_in_force(self) -> Settings:
        """What the newest leader told, over those of this process."""
        if self._in_force[0] is not self.state.settings:
            self._in_force = (self.state.settings, in_force(self.settings, self.state.settings))
        return self._in_force[1]

    def step(self, record_offset: int, timestamp_ms: int, record: ClusterRecord) -> list[SchedulerCommand]:
        """Fold one record. Offsets must grow; `timestamp_ms` is the broker's, and a step back of it is ignored."""
        state = self.state
        assert record_offset >= state.next_offset, f"offset {record_offset} was folded already"
        state.next_offset = record_offset + 1
        state.now_ms = max(state.now_ms, timestamp_ms)
        step = Step(state, self.settings_in_force, record_offset, record)
        dispatch(step, record)
        if state.rolling:
            follow_rollouts(step)
        if step.dirty or step.capacity_freed:
            while step.dirty or step.capacity_freed:
                converge(step)
                advance_plan(step)
            say_drained(step)
        return step.commands()


def in_force(settings: Settings, told: FoldSettings | None) -> Settings:
    """The settings to fold with: what the leader told, wherever decisions depend on it."""
    return settings if told is None else structs.replace(settings, **structs.asdict(told))


def fold_settings(settings: Settings) -> FoldSettings:
    """What a leader tells."""
    return FoldSettings(**{name: getattr(settings, name) for name in FoldSettings.__struct_fields__})


def dispatch(step: Step, record: ClusterRecord) -> None:
    """One handler per kind of fact, the most frequent first; the rest are commands."""
    match record:
        case WorkerHeartbeat():
            worker_heard(step, record)
        case WorkerLoad():
            note_latencies(step, record)
            worker_load(step, record)
        case Tick():
            tick(step, record)
        case PartitionReleased():
            partition_released(step, record)
        case ReplicaReady():
            replica_ready(step, record)
        case ReplicaAnswered():
            replica_answered(step, record)
        case ReplicaFailed():
            replica_failed(step, record)
        case WorkWaiting():
            work_waiting(step, record)
        case TopicEnsured():
            topic_ensured(step, record)
        case TopicFailed():
            topic_failed(step, record)
        case VariantWindow():
            variant_window(step, record)
        case RoutesHeld():
            routes_held(step, record)
        case WorkerJoined():
            worker_joined(step, record)
            look_for_better_places(step)
        case WorkerExited():
            worker_exited(step, record)
        case WorkerLeft():
            worker_left(step, record)
        case WorkerFenced():
            worker_fenced(step, record)
        case DeviceLost():
            device_lost(step, record)
        case DeviceBack():
            device_back(step, record)
            look_for_better_places(step)
        case EngineLost():
            engine_lost(step, record)
        case SchedulerElected():
            elected(step, record)
        case _:
            obey(step, record)


def look_for_better_places(step: Step) -> None:
    """After a record that may have brought capacity; one that was refused must not put a look off that is due."""
    if step.capacity_freed:
        want_rebalance(step)


def obey(step: Step, command: Command) -> None:
    """One handler per kind of command that people give."""
    match command:
        case ApplyModel():
            apply_or_roll_out(step, command)
        case StartRollout():
            start_rollout(step, command)
        case RolloutOrder():
            rollout_order(step, command)
        case DeleteModel():
            delete_model(step, command)
        case CordonWorker():
            cordon_worker(step, command)
        case DrainWorker():
            drain_worker(step, command)
        case UncordonWorker():
            uncordon_worker(step, command)
            look_for_better_places(step)
        case UndoDecision():
            undo_decision(step, command)
        case HoldTopic() | ReleaseTopic():
            change_hold(step, command)
        case _:
            assert_never(command)


def elected(step: Step, record: SchedulerElected) -> None:
    """It wrote this inside a transaction, so it is the only one that can commit decisions."""
    before = step.state.leader
    silent_ms = step.now_ms - step.state.last_tick_ms if step.state.last_tick_ms else None
    silence = "" if silent_ms is None else f" Nobody had ticked for {silent_ms} ms."
    step.state.leader = record.scheduler
    step.state.leader_is_new = True
    step.state.settings = record.settings or step.state.settings
    step.decide(
        "scheduler_elected",
        record.scheduler,
        f"It took the scheduler's transactional id{f' from {before}' if before else ''}.{silence}",
        chosen={"scheduler": record.scheduler, "before": before or "nobody", "release": record.release or "unknown"},
        took_ms=silent_ms,
    )


def tick(step: Step, record: Tick) -> None:
    """Time passes. Looks at workers and models only when one of them can be due."""
    state = step.state
    if record.scheduler != state.leader:
        step.ignore()
        return
    gap_ms = step.now_ms - state.last_tick_ms
    if state.last_tick_ms and gap_ms > max(step.settings.worker_lost_after_ms // 2, 2 * step.settings.tick_ms):
        forgive_silence(step, gap_ms)
    state.last_tick_ms = step.now_ms
    if state.leader_is_new:
        state.leader_is_new = False
        fence_lost_again(step)
        for model in state.models.values():
            if model.topic_due_ms != NEVER_MS:
                ask_topic_again(step, model)
    check_workers(step)
    look_at_loads(step)
    rebalance(step)
    check_routes(step)
    advance_plan(step)
    if step.now_ms >= state.models_due_ms:
        check_models(step)


def check_models(step: Step) -> None:
    """Look at every model that is due; the others say when they will be."""
    state = step.state
    load_timeout_ms = step.settings.load_timeout_ms
    state.models_due_ms = NEVER_MS
    for model in list(state.models.values()):
        due_ms = model_due_ms(state, model, load_timeout_ms)
        if step.now_ms < due_ms:
            state.models_due_ms = min(state.models_due_ms, due_ms)
            continue
        if step.now_ms >= model.delete_at_ms:
            drain_deleted(step, model)
        if step.now_ms >= model.topic_due_ms:
            ask_topic_again(step, model)
        give_up_waiting(step, model)
        step.look_at(model)
