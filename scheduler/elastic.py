"""Elastic replicas in the fold: loads that workers report become the number of replicas wanted.

Only models that declare more than one number (replicas min < max) are looked at, every EVERY_MS of log time. A model of
which nobody reports anything has nothing to do. What is decided, and why it is calm, is in autoscale.py.

A model with `min: 0` keeps one replica all the same: nobody reports a topic that no worker reads, so nothing would wake
it up.
"""

from __future__ import annotations

from msgspec import structs

from scheduler.autoscale import ScalePolicy, decide, first_state
from scheduler.demand import Load
from scheduler.state import LoadTally, ModelState
from scheduler.step import Step
from sie_stream.control import ModelLoad, WorkerLoad

EVERY_MS = 5_000
COLD_START_MS = 5_000
"""Assumed until a replica of the model was loaded."""
DEMAND_MS = 1
"""Assumed until requests were completed."""
FULL_BP = 10_000
COUNT_MAX = 1 << 40
"""No worker counts further in two seconds; what is written to the log by others must not stop the fold."""


def worker_load(step: Step, record: WorkerLoad) -> None:
    """Add what a worker reports to the tallies of its models."""
    if not step.state.live(record.worker, record.incarnation) or not all(map(_is_sane, record.models)):
        step.ignore()
        return
    for load in record.models:
        model = step.state.models.get(load.model)
        if model is None or model.scaling is None:
            continue
        tally = model.load
        known = [p99 for p99 in (tally.p99_ms, load.p99_ms) if p99 is not None]
        model.load = LoadTally(
            since_ms=tally.since_ms,
            arrivals=tally.arrivals + load.arrivals,
            completions=tally.completions + load.completions,
            busy_ms=tally.busy_ms + load.busy_ms,
            p99_ms=max(known, default=None),
            waiting={**tally.waiting, record.worker: load.waiting},
            running={**tally.running, record.worker: load.running},
        )


def _is_sane(load: ModelLoad) -> bool:
    counts = (load.arrivals, load.completions, load.waiting, load.running, load.busy_ms, load.p99_ms or 0)
    return all(0 <= count <= COUNT_MAX for count in counts)


def scale_models(step: Step) -> None:
    """Part of a tick."""
    state = step.state
    if step.now_ms < state.scale_due_ms:
        return
    state.scale_due_ms = step.now_ms + EVERY_MS
    for model in state.models.values():
        # While keys move to another version, less load on this one does not mean that less is needed.
        if model.scaling is not None and model.status == "accepted" and model.routed_generation and not model.rollouts:
            _scale(step, model)


def _scale(step: Step, model: ModelState) -> None:
    assert model.scaling is not None
    before = model.scale_state or first_state(model.scaling, step.now_ms, model.replicas_wanted)
    load = _load(step.now_ms, model)
    model.load = LoadTally(since_ms=step.now_ms)
    model.scale_state, decision = decide(model.scaling, before, load)
    if not decision.changed:
        return
    model.replicas_wanted = decision.wanted
    step.decide(
        "replicas_scaled",
        model.model,
        decision.reason,
        chosen={
            "before": decision.before,
            "wanted": decision.wanted,
            "rule": decision.rule,
            "needed": decision.need,
            "arrivals": load.arrivals,
            "waiting": load.waiting,
            "utilisation_bp": load.utilisation_bp,
            "window_ms": load.window_ms,
        },
        do_nothing=f"It would stay at {decision.before} replicas.",
    )
    step.touch("instances", model.model)
    step.look_at(model)


def _load(now_ms: int, model: ModelState) -> Load:
    """The observation since the last one. Workers that said nothing have nothing waiting."""
    tally = model.load
    window_ms = max(1, now_ms - tally.since_ms) if tally.since_ms else EVERY_MS
    ready = [replica for replica in model.present() if replica.state == "ready"]
    loading = [replica for replica in model.present() if replica.state == "loading"]
    capacity_ms = max(1, len(ready)) * window_ms
    return Load(
        at_ms=now_ms,
        window_ms=window_ms,
        arrivals=tally.arrivals,
        completions=tally.completions,
        waiting=sum(tally.waiting.values()),
        running=sum(tally.running.values()),
        ready=len(ready),
        loading=len(loading),
        utilisation_bp=min(FULL_BP, tally.busy_ms * FULL_BP // capacity_ms),
        p99_ms=tally.p99_ms,
        cold_start_ms=model.cold_start_ms or COLD_START_MS,
        demand_ms=DEMAND_MS,
    )


def redeclare(model: ModelState, scaling: ScalePolicy | None, declared: int) -> None:
    """A new declaration: its bounds hold; what an elastic model has grown to, and learnt about its load, stays."""
    grown = model.scaling is not None and scaling is not None
    model.scaling = scaling
    if scaling is None or not grown:
        model.replicas_wanted = declared
        model.scale_state = None
        return
    model.replicas_wanted = min(max(model.replicas_wanted, scaling.floor), scaling.replicas_max)
    if model.scale_state is not None:
        model.scale_state = structs.replace(model.scale_state, wanted=model.replicas_wanted)
