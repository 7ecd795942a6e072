"""Rebalance: replicas move to where they cost less, when that pays and nobody is disturbed by it.

Setting `rebalance_policy`: never; idle (only while the pool has little to do); always. It is looked for when something
has happened that could make another place better: a worker or a device came, a worker went back into service, a model
began or ceased to miss its SLA on a kind of device. And then once, after a calm; so a fleet to which nothing happens is
not moved, and a plan does not lead to the next one. Without a calm when a model that may not grow any further has a
queue (elastic.py). A plan has to gain more than its moves cost by a margin (move_plans.py).
"""

from __future__ import annotations

from scheduler.move_plans import plan_order
from scheduler.offers import placement_problem
from scheduler.replanning import begin_plan
from scheduler.state import NEVER_MS, ClusterState, ModelState
from scheduler.step import Step
from sie_stream.loads import ModelLoad, WorkerLoad

CALM_MS = 10_000
"""From what happened to the look: a returning fleet returns worker by worker."""
AGAIN_MS = 5_000
"""Until the next look, when the pool is busy or something is under way."""
SOON_MS = 2_000
"""When a model lacks what it may not grow to: its queue grows meanwhile."""
EVERY_MS = 60_000
"""Least time between two plans."""
IDLE_PERCENT = 20
"""Engine time of all workers, out of their time, up to which the pool is idle."""
USE_FRESH_MS = 10_000
"""An older report of a worker says nothing any more: those with nothing to do report nothing."""
MOVING_PART = 10
"""At most one of so many models may be under way: of a large elastic fleet a few always are."""
COMPLETIONS_MIN = 5
"""Fewer answers in a report say nothing about a latency."""
OVER_IN_A_ROW = 3
"""Reports above the SLA after which it is missed on that kind of device."""
UNDER_IN_A_ROW = 10
"""Reports well below it after which it is met again."""
WELL_BELOW_PERCENT = 80


def want_rebalance(step: Step) -> None:
    """Something happened after which other places could be better."""
    state = step.state
    if step.settings.rebalance_policy != "never":
        state.rebalance_due_ms = max(step.now_ms + CALM_MS, state.rebalanced_ms + EVERY_MS)


def want_rebalance_soon(step: Step) -> None:
    """Something happened that does not get better by waiting."""
    state = step.state
    if step.settings.rebalance_policy != "never":
        state.rebalance_due_ms = min(state.rebalance_due_ms, step.now_ms + SOON_MS)


def rebalance(step: Step) -> None:
    """Part of a tick."""
    state, policy = step.state, step.settings.rebalance_policy
    if policy == "never" or step.now_ms < state.rebalance_due_ms:
        return
    if state.plan is not None or _is_moving(state) or (policy == "idle" and not _is_idle(state)):
        state.rebalance_due_ms = step.now_ms + AGAIN_MS
        return
    state.rebalance_due_ms = NEVER_MS
    state.rebalanced_ms = step.now_ms
    found = plan_order(placement_problem(state, (), step.settings.placement_packing))
    if found.moves:
        begin_plan(step, found, "rebalance")


def _is_moving(state: ClusterState) -> bool:
    """Of more than a few models a replica is missing, loads, or is on its way out. (What moves is not moved again.)"""
    moving = sum(
        len(model.present()) < model.replicas_wanted
        or any(replica.state != "ready" or not model.stays(replica) for replica in model.replicas)
        for model in state.models.values()
        if model.status == "accepted"
    )
    return moving * MOVING_PART > len(state.models)


def _is_idle(state: ClusterState) -> bool:
    live = [worker for worker in state.workers.values() if worker.status == "live"]
    fresh = [worker for worker in live if state.now_ms - worker.load_ms <= USE_FRESH_MS]
    busy_bp = sum(max(worker.busy_bp.values(), default=0) for worker in fresh)
    return busy_bp <= 100 * IDLE_PERCENT * max(1, len(live))


# ---------------------------------------------------------------- what workers report


def note_latencies(step: Step, record: WorkerLoad) -> None:
    """Whether models meet their SLA on the kind of device they are on there.

    What makes no sense is left out: others write to the log, too.
    """
    state = step.state
    if not state.live(record.worker, record.incarnation) or not 0 < record.window_ms <= USE_FRESH_MS * 1_000:
        return
    for load in record.models:
        model = state.models.get(load.model)
        if model is not None and _note_latency(state, model, record.worker, load):
            want_rebalance(step)


def _note_latency(state: ClusterState, model: ModelState, worker: str, load: ModelLoad) -> bool:
    """True when the model begins or ceases to miss its SLA on that kind of device."""
    limit_ms = model.rules.p99_ms
    if not limit_ms or load.p99_ms is None or load.completions < COMPLETIONS_MIN:
        return False
    kind = _kind_of(state, model, worker)
    if not kind:
        return False
    streak = model.sla_streak.get(kind, 0)
    if load.p99_ms > limit_ms:
        streak = max(streak, 0) + 1
    elif load.p99_ms * 100 <= limit_ms * WELL_BELOW_PERCENT:
        streak = min(streak, 0) - 1
    else:
        streak = 0
    model.sla_streak[kind] = max(-UNDER_IN_A_ROW, min(OVER_IN_A_ROW, streak))
    missed = kind in model.sla_missed
    if not missed and streak >= OVER_IN_A_ROW:
        model.sla_missed = (*model.sla_missed, kind)
        return True
    if missed and streak <= -UNDER_IN_A_ROW:
        model.sla_missed = tuple(other for other in model.sla_missed if other != kind)
        return True
    return False


def _kind_of(state: ClusterState, model: ModelState, worker: str) -> str:
    """Of the device of the model's replica there; empty: none, or of an older version."""
    for replica in model.replicas:
        if replica.worker == worker and replica.state == "ready" and model.stays(replica):
            for found in state.workers[worker].devices:
                if found.device == replica.device:
                    return found.kind
    return ""
