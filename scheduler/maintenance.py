"""Cordon, drain, uncordon: taking a worker out of service and back, without a request noticing.

    in service --cordon--> CORDONED --drain--> DRAINING --nothing left--> DRAINED --uncordon--> in service

A cordon names the worker, not its incarnation, so it outlives the restart it was made for. A draining worker's replicas
are `leaving`: each is replaced elsewhere, serves until its replacement is ready, hands its partitions over, and goes.
"""

from __future__ import annotations

from scheduler.actors import named
from scheduler.state import ModelState
from scheduler.step import Step
from scheduler.worker_state import Cordon
from sie_stream.control import CordonWorker, DrainWorker, UncordonWorker
from sie_stream.errors import did_you_mean


def cordon_worker(step: Step, record: CordonWorker) -> None:
    """Nothing new is placed there; what runs there stays."""
    if not _is_known(step, record.worker, record.actor):
        return
    found = step.state.cordons.get(record.worker)
    if found is not None:
        _refuse(step, record.worker, f"It is {found.phase} already.", record.actor)
        return
    step.state.cordons[record.worker] = Cordon("cordoned", step.now_ms, record.actor)
    _await_no_more(step, record.worker)
    step.decide(
        "worker_cordoned",
        record.worker,
        f"Asked for by {named(record.actor)}: nothing new is placed there.",
        chosen={"actor": record.actor, **_held(step, record.worker)},
        do_nothing="The next replica might be placed there.",
    )


def drain_worker(step: Step, record: DrainWorker) -> None:
    """Its replicas move elsewhere, new before old."""
    if not _is_known(step, record.worker, record.actor):
        return
    found = step.state.cordons.get(record.worker)
    if found is not None and found.phase != "cordoned":
        # The answer that whoever asks again is waiting for.
        kind = "worker_drained" if found.phase == "drained" else "worker_draining"
        chosen = {"actor": record.actor, **_held(step, record.worker)}
        step.decide(
            kind, record.worker, f"It is {found.phase} already, since {found.actor} asked for it.", chosen=chosen
        )
        return
    step.state.cordons[record.worker] = Cordon("draining", step.now_ms, record.actor)
    for model in step.state.models.values():
        _set_leaving(step, model, record.worker)
    _await_no_more(step, record.worker)
    step.decide(
        "worker_draining",
        record.worker,
        f"Asked for by {named(record.actor)}: each replica serves until another is ready elsewhere.",
        chosen={"actor": record.actor, **_held(step, record.worker)},
        do_nothing="A restart would interrupt what runs there.",
    )
    say_drained(step)


def uncordon_worker(step: Step, record: UncordonWorker) -> None:
    """Back in service. What was still leaving stays."""
    cordon = step.state.cordons.pop(record.worker, None)
    if cordon is None:
        if _is_known(step, record.worker, record.actor):
            _refuse(step, record.worker, "It is not cordoned.", record.actor)
        return
    for model in step.state.models.values():
        _stay(step, model, record.worker)
    step.capacity_freed = True
    step.decide(
        "worker_uncordoned",
        record.worker,
        f"Asked for by {named(record.actor)}: replicas may be placed there again.",
        chosen={"actor": record.actor, "was": cordon.phase, "for_ms": step.now_ms - cordon.since_ms},
        do_nothing="It would stay without new work.",
    )


def say_drained(step: Step) -> None:
    """DRAINING -> DRAINED, once nothing is held there any more."""
    for worker, cordon in step.state.cordons.items():
        if cordon.phase != "draining":
            continue
        held = _held(step, worker)
        if held["replicas"] or held["partitions"]:
            continue
        step.state.cordons[worker] = Cordon("drained", cordon.since_ms, cordon.actor)
        step.decide(
            "worker_drained",
            worker,
            _drained_because(step, worker),
            chosen={"actor": cordon.actor, "took_ms": step.now_ms - cordon.since_ms},
        )


def _drained_because(step: Step, worker: str) -> str:
    """What a worker lost was taken away, not handed over: whoever asked for the drain has to know."""
    found = step.state.workers.get(worker)
    if found is not None and found.status in ("lost", "fenced"):
        return "It was lost, and what it held was taken from it, not handed over; it holds nothing now."
    return "It holds no replica and no partition; it can be stopped without anybody noticing."


def _await_no_more(step: Step, worker: str) -> None:
    """Models that wait for it to come back wait in vain: it would get nothing new."""
    for model in step.state.models.values():
        if worker in model.lost_workers:
            step.look_at(model)


def _set_leaving(step: Step, model: ModelState, worker: str) -> None:
    """What it held before is remembered with the decision that follows, so that the drain can be undone."""
    leaving = [replica for replica in model.replicas if replica.worker == worker and replica.state != "draining"]
    if leaving:
        step.remember(model)
        step.look_at(model)
    for replica in leaving:
        replica.leaving = True


def _stay(step: Step, model: ModelState, worker: str) -> None:
    """What had no place elsewhere is where it may be again."""
    staying = [r for r in model.replicas if r.worker == worker and r.leaving and r.state != "draining"]
    for replica in [replica for replica in staying if not replica.leaving_for]:
        replica.leaving = False
        model.unplaced = ()
        model.message = ""
        step.touch("instances", model.model)
        step.look_at(model)


def _held(step: Step, worker: str) -> dict[str, str | int]:
    models = step.state.models.values()
    return {
        "replicas": sum(replica.worker == worker for model in models for replica in model.replicas),
        "partitions": sum(
            partition.owner is not None and partition.owner.worker == worker
            for model in models
            for partition in model.partitions
        ),
    }


def _is_known(step: Step, worker: str, actor: str) -> bool:
    if worker in step.state.workers:
        return True
    known = ", ".join(sorted(step.state.workers)) or "none"
    nearest = did_you_mean(worker, step.state.workers)
    _refuse(step, worker, f"No worker of that name has joined. Known: {known}.{nearest}", actor)
    return False


def _refuse(step: Step, worker: str, why: str, actor: str) -> None:
    step.decide("maintenance_ignored", worker, why, chosen={"actor": actor})
