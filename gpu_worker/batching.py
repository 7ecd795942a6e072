"""What each engine does next: a suspect alone, the next model to load, the next batches.

Up to two batches are given to a fast engine, so that it never waits for the host; one to an engine whose batches take
longer, so that an urgent request waits for one batch at most. A continuous model gets its items one by one, each as a
batch of its own, as many as it runs at once. Expired items never start.
"""

from __future__ import annotations

from gpu_worker.backends.base import EngineInput
from gpu_worker.engine_ends import on_engine_ended
from gpu_worker.engine_port import BatchCompleted
from gpu_worker.facts import SubmitBatch
from gpu_worker.handover import take_image
from gpu_worker.outcomes import Turn
from gpu_worker.queues import is_expired, ready_on
from gpu_worker.replicas import check_load_timeout, next_to_load, start_load, stop_engine
from gpu_worker.retries import ENGINE_TIMEOUT, abandon, finish, runs_of
from gpu_worker.state import Batch, Engine, Item, Replica
from gpu_worker.switching import note_used, overdue, runnable
from gpu_worker.touched import end_outside, take_arrivals
from gpu_worker.worker_state import WorkerState
from sie_stream.rollout_records import SHADOW

FAST_BATCH_MS = 20.0
"""Engines whose batches take longer hold one batch at a time."""
BATCHES_FAST = 2
SMOOTHING = 0.2
URGENT_SHARE = 4
"""A continuous model that is full takes 1/4 more of the most urgent lane: its engine lets them pass the others."""


def run_engine(state: WorkerState, engine: Engine) -> None:
    """Give `engine` whatever it should do now."""
    check_timeouts(state, engine)
    if engine.down_until > state.at_ms:
        return
    if engine.suspects:
        if not engine.outstanding:
            _run_suspect(state, engine)
        return
    if engine.loading is None and engine.to_load and not state.stopping:
        start_load(state, engine, next_to_load(state, engine))
    if engine.running and not state.stopping:
        _submit_batches(state, engine)
        if not engine.replicas and not engine.outstanding:
            stop_engine(state, engine, "no model is placed on it any more")


def _submit_batches(state: WorkerState, engine: Engine) -> None:
    slots = BATCHES_FAST if engine.batch_ms <= FAST_BATCH_MS and running_ms(state, engine) <= FAST_BATCH_MS else 1

    def room(replica: Replica, lane: int) -> int:
        if not runnable(state, replica):
            return 0
        if not replica.sequences_max:
            return replica.launch.batch_max if engine.batches < slots else 0
        more = max(1, replica.sequences_max // URGENT_SHARE) if lane == 0 else 0
        return replica.sequences_max + more - replica.in_flight

    while engine.continuous or engine.batches < slots:
        taken = state.queues.take(engine, room)
        if taken is None:
            return
        replica, items = taken
        items = drop_expired(state, items)
        for part in [[item] for item in items] if replica.sequences_max else [items]:
            if part:
                submit(state, engine, replica, part)


def _run_suspect(state: WorkerState, engine: Engine) -> None:
    """The first suspect that can be run, alone. Its model is loaded first; other models wait."""
    while engine.suspects:
        item = engine.suspects[0]
        if state.stopping:
            abandon(state, engine.suspects.popleft())
            continue
        if is_expired(item, state.now_ms):
            drop_expired(state, [engine.suspects.popleft()])
            continue
        replica = ready_on(item.queue, engine)
        if replica is not None:
            # A load that was under way when a batch failed is waited for, and so is the way to the device.
            if engine.loading is None and runnable(state, replica):
                submit(state, engine, replica, [engine.suspects.popleft()])
            return
        if engine.loading is not None:
            return
        loadable = next((one for one in item.queue.replicas if one in engine.to_load), None)
        if loadable is not None:
            start_load(state, engine, loadable)
            return
        # Its model is not on this engine any more: wait like everybody else.
        state.queues.push_front(engine.suspects.popleft())


def submit(state: WorkerState, engine: Engine, replica: Replica, items: list[Item]) -> None:
    assert replica.finisher is not None
    batch_id = state.next_batch
    state.next_batch += 1
    note_used(state, replica)
    if state.managed:
        take_arrivals(items, replica)
    batch = Batch(batch_id, replica, replica.finisher, items, state.at_ms, state.now_ms)
    engine.hold(batch)
    for partition, run in runs_of(items):
        partition.running += len(run)
    inputs: list[EngineInput] = []
    for item in items:
        work = item.work
        inputs.append(
            EngineInput(
                work.request_id,
                work.inputs,
                None if work.token_ids is None else list(work.token_ids),
                work.parameters,
                work.seed,
                work.deadline_at_ms or None,
                work.priority,
                work.stream and work.variant[:1] != SHADOW,
                item.resume,
            )
        )
        item.told, item.told_as = 0, None
    image = take_image(state, batch) if state.handover.fetched else b""
    state.commands.append(SubmitBatch(engine.key, batch_id, replica.slot, inputs, image))


def on_batch_completed(state: WorkerState, engine: Engine, event: BatchCompleted) -> None:
    batch = engine.let_go(event.batch_id)
    if batch is None:
        return  # of an engine that was given up since
    busy_ms = event.inference_ms
    if batch.replica.sequences_max:
        busy_ms /= batch.replica.in_flight + 1  # the others had their share of that time
    else:
        engine.batch_ms += SMOOTHING * (event.inference_ms - engine.batch_ms)
    engine.finished_at = state.at_ms
    engine.deaths_in_a_row = 0
    answers = [pair for pair in zip(batch.items, event.outputs, strict=True) if pair[0].partition.state != "closed"]
    if not answers:
        return
    state.outcomes.answered(Turn(batch, event.inference_ms, state.now_ms), answers, state.output)
    if not batch.replica.answered:
        batch.replica.answered = True
        state.first_answers.append(batch.replica)
    items = [item for item, _ in answers]
    latency_ms = state.now_ms - items[0].work.requested_at_ms
    key = batch.replica.key
    state.meter.answered(key.model, key.device, len(items), busy_ms, latency_ms)
    for partition, run in runs_of(items):
        partition.running -= len(run)
    finish(state, items)


def drop_expired(state: WorkerState, items: list[Item]) -> list[Item]:
    """End those whose deadline has passed as `expired`; the others are returned."""
    late = [item for item in items if is_expired(item, state.now_ms)] if items[0].queue.deadlines else []
    if not late:
        return items
    end_expired(state, late)
    return [item for item in items if not is_expired(item, state.now_ms)]


def end_expired(state: WorkerState, late: list[Item]) -> None:
    for item in late:
        message = f"the deadline passed {state.now_ms - item.work.deadline_at_ms} ms before an engine was free"
        launch = item.queue.replicas[0].launch if item.queue.replicas else None
        if state.managed:
            end_outside(state, item)
        state.outcomes.ended(item, "expired", "deadline_exceeded", message, launch, state.now_ms, state.output)
    finish(state, late)


def check_timeouts(state: WorkerState, engine: Engine) -> None:
    """Kill an engine whose oldest batch, whose load, or whose way of weights to the device takes too long."""
    if check_load_timeout(state, engine):
        limit = state.settings.load_timeout_ms
        _give_up(state, engine, f"a load took longer than {limit} ms (setting load_timeout_ms)")
        return
    if late := overdue(state, engine.key):
        limit = state.settings.load_timeout_ms
        _give_up(state, engine, f"bringing {late} to the device took longer than {limit} ms (setting load_timeout_ms)")
        return
    limit = state.settings.engine_batch_timeout_ms
    if running_ms(state, engine) >= limit:
        oldest = next(iter(engine.outstanding.values()))
        _give_up(
            state,
            engine,
            f"a batch of {oldest.replica.key.model} ran longer than {limit} ms (setting engine_batch_timeout_ms)",
        )


def _give_up(state: WorkerState, engine: Engine, reason: str) -> None:
    stop_engine(state, engine, reason)
    on_engine_ended(state, engine, ENGINE_TIMEOUT, reason, reason)


def running_ms(state: WorkerState, engine: Engine) -> float:
    """How long the engine has been at its oldest batch, or without a sign of progress; 0 without a batch."""
    if not engine.outstanding:
        return 0.0
    oldest = next(iter(engine.outstanding.values()))
    return state.at_ms - max(oldest.submitted_at, engine.finished_at)


def next_finish_ms(state: WorkerState) -> float | None:
    """Expected time until some running batch finishes; None when none runs. Nobody knows it of a continuous model."""
    soonest: float | None = None
    for engine in state.engines.values():
        if engine.batches:
            left = max(0.0, engine.batch_ms - running_ms(state, engine))
            if soonest is None or left < soonest:
                soonest = left
    return soonest
