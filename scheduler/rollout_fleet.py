"""What a rollout sees of the cluster: which replicas of either version answer, and why others do not."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.limits import ENGINE_AWAY_MS, RETRIES_MAX
from scheduler.rollout import RolloutState
from scheduler.rollout_seen import Seen
from scheduler.state import ModelState, ReplicaState
from scheduler.step import Step
from scheduler.variants import serves_alone, unit_of

GOLDEN = "golden_mismatch"
"""Code of a replica that did not answer its golden requests as declared."""


def seen_of(step: Step, model: ModelState, rollout: RolloutState) -> Seen:
    unit = unit_of(step.state, model.model, rollout.variant)
    if unit is None:
        return Seen(ready=0, wanted=1, given_up=False, deleted=True)
    stable = _ready(step, model.replicas)
    stable_ready = len([one for one in stable if not _is_away(step, one)])
    ready = _ready(step, unit.present())
    away = [one for one in ready if _is_away(step, one)]
    # Keys that went round wait until its engine has stood for a while, as long as others answer them.
    absent = [one for one in ready if _is_shaky(step, one)] if rollout.bypassed and stable_ready else away
    loads = model if rollout.phase == "adopting" else unit
    message = loads.message
    # A stable version that lacks replicas for want of room asks no more of the new one than it has itself.
    has = len(model.present()) if model.unplaced else model.replicas_wanted
    return Seen(
        ready=len(ready) - len(absent) if unit.topic_ready else 0,
        wanted=min(unit.replicas_wanted, rollout.part_of(has)),
        no_room=" ".join(unit.unplaced).removesuffix("."),
        given_up=loads.failures > RETRIES_MAX,
        golden=message if loads.failures and f" {GOLDEN}: " in message else "",
        failure=message,
        deleted=model.status == "deleting",
        adopted=serves_alone(model, rollout.version) and model.routed_generation == model.generation,
        old_ready=len(old_ready(step, model)),
        stable_ready=stable_ready,
        away="; ".join(_why_away(step, one) for one in away),
    )


def old_ready(step: Step, model: ModelState) -> list[ReplicaState]:
    """Replicas of the version before that still hold the model's own topic, while it takes another version over."""
    return _ready(step, model.older())


def _ready(step: Step, replicas: Sequence[ReplicaState]) -> list[ReplicaState]:
    return [r for r in replicas if r.state == "ready" and step.state.takes_work(r.worker, r.incarnation)]


def _is_away(step: Step, replica: ReplicaState) -> bool:
    """Its engine ended, and loads again for so long that nobody should wait for it. Most are back in seconds."""
    return replica.down is not None and step.now_ms - replica.down.since_ms >= ENGINE_AWAY_MS


def _is_shaky(step: Step, replica: ReplicaState) -> bool:
    """Its engine is not back, or only just: what killed it may be among the requests that it runs first."""
    return replica.down is not None or step.now_ms - replica.back_ms < ENGINE_AWAY_MS


def _why_away(step: Step, replica: ReplicaState) -> str:
    assert replica.down is not None, replica
    seconds = (step.now_ms - replica.down.since_ms) / 1_000
    return f"the engine of {replica.worker}/{replica.shown} ended {seconds:g} s ago and loads again"
