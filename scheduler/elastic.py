"""Elastic replicas in the fold: loads that workers report become the number of replicas wanted.

Only models that declare more than one number (replicas min < max) are sized, every EVERY_MS of log time. A model of
which nobody reports anything has nothing to do. What is decided, and why it is calm, is in autoscale.py; how a model
without replicas hears of work, in sleep.py; who has fewer than it needs so that others have theirs, in relief.py.
"""

from __future__ import annotations

from msgspec import structs

from scheduler.autoscale import ScalePolicy, decide, first_state
from scheduler.busy import engines_on_one, noticed
from scheduler.counts import replicas_in_words
from scheduler.demand import Load
from scheduler.direction import direct_traffic, shares_devices, slice_devices
from scheduler.rebalance import want_rebalance, want_rebalance_soon
from scheduler.relief import give_way, lacks_guarantee
from scheduler.sleep import sleeps, want_replicas
from scheduler.state import NEVER_MS, ClusterState, LoadTally, ModelState
from scheduler.step import Step
from sie_stream.control import WorkerLoad, WorkWaiting
from sie_stream.loads import ModelLoad

EVERY_MS = 5_000
COLD_START_MS = 5_000
"""Assumed until a replica of the model was loaded."""
DEMAND_MS = 1
"""Assumed until requests were completed."""
CRAMPED_MS = 600_000
"""A model that needed more than it may have is taken to need it again for so long: a burst has more than one peak."""
FULL_BP = 10_000
INGRESS = "ingress"
"""In place of a worker's name, for what nobody has taken up yet."""
COUNT_MAX = 1 << 40
"""No worker counts further in two seconds; what is written to the log by others must not stop the fold."""


def worker_load(step: Step, record: WorkerLoad) -> None:
    """Add what a worker reports to the tallies of its models."""
    worker = step.state.workers.get(record.worker)
    sane = all(map(_is_sane, record.models)) and all(0 <= one.busy_bp <= FULL_BP for one in record.devices)
    if worker is None or not step.state.live(record.worker, record.incarnation) or not sane:
        step.ignore()
        return
    there = {device.device for device in worker.devices}
    worker.busy_bp = {one.device: one.busy_bp for one in record.devices if one.device in there}
    worker.load_ms = step.now_ms
    for load in record.models:
        model = step.state.models.get(load.model)
        if model is not None:
            _add(model.load, record.worker, load)


def _add(tally: LoadTally, worker: str, load: ModelLoad) -> None:
    tally.arrivals += load.arrivals
    tally.completions += load.completions
    tally.busy_ms += load.busy_ms
    if load.p99_ms is not None:
        tally.p99_ms[worker] = max(tally.p99_ms.get(worker, 0), load.p99_ms)
    tally.waiting[worker] = load.waiting
    tally.running[worker] = load.running


def _is_sane(load: ModelLoad) -> bool:
    return (
        0 <= load.arrivals <= COUNT_MAX
        and 0 <= load.completions <= COUNT_MAX
        and 0 <= load.waiting <= COUNT_MAX
        and 0 <= load.running <= COUNT_MAX
        and 0 <= load.busy_ms <= COUNT_MAX
        and 0 <= (load.p99_ms or 0) <= COUNT_MAX
    )


def look_at_loads(step: Step) -> None:
    """Part of a tick: direct the traffic of every model, then size the elastic ones, then see who has to give way."""
    state = step.state
    if step.now_ms < state.scale_due_ms:
        if any(model.unplaced and lacks_guarantee(model) for model in state.models.values()):
            give_way(step)
        return
    state.scale_due_ms = step.now_ms + EVERY_MS
    tallies: dict[str, LoadTally] = {}
    for name, model in state.models.items():
        tally, model.load = model.load, LoadTally(since_ms=step.now_ms)
        tallies[name] = tally
        if tally.arrivals or model.busy.known:
            window_ms = step.now_ms - tally.since_ms if tally.since_ms else EVERY_MS
            model.busy = noticed(model.busy, window_ms, tally.arrivals, tally.completions, tally.busy_ms)
    resting = slice_devices(step, tallies)
    for name, model in state.models.items():
        tally = tallies[name]
        if model.status == "accepted" and model.routed_generation:
            direct_traffic(step, model, tally, EVERY_MS, resting.get(name, ()))
            # While keys move to another version, less load on this one does not mean that less is needed.
            if model.scaling is not None and not model.rollouts:
                scale(step, model, tally)
    give_way(step)


def scale(step: Step, model: ModelState, tally: LoadTally) -> None:
    """One more observation of an elastic model, and what follows for its replicas."""
    assert model.scaling is not None
    before = model.scale_state or first_state(model.scaling, step.now_ms, model.replicas_wanted)
    load = _load(step.now_ms, model, tally)
    model.scale_state, decision = decide(_policy(step.state, model, load), before, load)
    model.needed = decision.need
    _note_cramped(step, model, load)
    if not decision.changed:
        return
    want_replicas(step, model, decision.wanted)
    if step.state.rebalance_due_ms == NEVER_MS:
        want_rebalance(step)
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
        do_nothing=f"It would stay at {replicas_in_words(decision.before)}.",
    )


def _note_cramped(step: Step, model: ModelState, load: Load) -> None:
    """A model that may not grow any further gets all that its replicas can do: neighbours move, or it does.

    Only when more requests wait than are worked on: what the law would like to have in addition is no reason to move.
    """
    assert model.scaling is not None
    if model.needed > model.scaling.replicas_max and load.waiting > load.running:
        if not model.cramped_until_ms:
            want_rebalance_soon(step)
        model.cramped_until_ms = step.now_ms + CRAMPED_MS
    elif step.now_ms >= model.cramped_until_ms:
        model.cramped_until_ms = 0


def work_waiting(step: Step, record: WorkWaiting) -> None:
    """An ingress found work of a sleeping model: wake it, unless that has happened already or it is held down."""
    model = step.state.models.get(record.model)
    asleep = model is not None and model.scaling is not None and sleeps(model, record.route_epoch)
    if model is None or not asleep or not 0 < record.waiting <= COUNT_MAX:
        step.ignore()
        return
    seen = structs.replace(model.load, waiting={**model.load.waiting, INGRESS: record.waiting})
    model.load = LoadTally(since_ms=step.now_ms)
    scale(step, model, seen)
    if not model.replicas_wanted:
        model.load = structs.replace(model.load, waiting=seen.waiting)  # so that what it needs is known meanwhile


def _policy(state: ClusterState, model: ModelState, load: Load) -> ScalePolicy:
    """What is declared, no more than it may have while it gives way, and awake while it cannot fall asleep in peace.

    A model whose replicas are not all there may look idle only because nobody can report what waits.
    """
    assert model.scaling is not None
    policy = model.scaling
    cap = state.yielded.caps.get(model.model, policy.replicas_max)
    unsettled = model.replicas_wanted > 0 and (load.ready < model.replicas_wanted or bool(model.older()))
    least = max(policy.replicas_min, 1) if unsettled else policy.replicas_min
    most = max(min(policy.replicas_max, cap), least if unsettled else 0)
    sharing = engines_on_one(model.launch.backend)
    if sharing > 1 and not shares_devices(state, model):
        sharing = 1
    if (sharing, least, most) == (policy.sharing, policy.replicas_min, policy.replicas_max):
        return policy
    return structs.replace(policy, sharing=sharing, replicas_min=least, replicas_max=most)


def _load(now_ms: int, model: ModelState, tally: LoadTally) -> Load:
    """The observation since the last one. Workers that said nothing have nothing waiting."""
    window_ms = max(1, now_ms - tally.since_ms) if tally.since_ms else EVERY_MS
    states = [replica.state for replica in model.present()]
    ready, loading = states.count("ready"), states.count("loading")
    capacity_ms = max(1, ready) * window_ms
    return Load(
        at_ms=now_ms,
        window_ms=window_ms,
        arrivals=tally.arrivals,
        completions=tally.completions,
        waiting=sum(tally.waiting.values()),
        running=sum(tally.running.values()),
        ready=ready,
        loading=loading,
        utilisation_bp=min(FULL_BP, tally.busy_ms * FULL_BP // capacity_ms),
        p99_ms=max(tally.p99_ms.values(), default=None),
        cold_start_ms=model.cold_start_ms or COLD_START_MS,
        demand_ms=DEMAND_MS,
    )


def redeclare(model: ModelState, scaling: ScalePolicy | None, declared: int) -> None:
    """A new declaration: its bounds hold; what an elastic model has grown to, and learnt about its load, stays.

    It wakes a model that sleeps: whoever declares a version wants to see it ready.
    """
    grown = model.scaling is not None and scaling is not None
    if model.scaling != scaling:
        model.cramped_until_ms = 0  # with other bounds it may have room; with a fixed number nobody looks any more
    model.scaling = scaling
    if scaling is None or not grown:
        model.replicas_wanted = declared
        model.scale_state = None
        return
    model.replicas_wanted = min(max(model.replicas_wanted, scaling.floor, 1), scaling.replicas_max)
    if model.scale_state is not None:
        model.scale_state = structs.replace(model.scale_state, wanted=model.replicas_wanted)
