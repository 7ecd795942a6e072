"""What is left in the topics of variants whose rollout ended: who works it off, and what is said when nobody can.

A variant that ended is worked off by its own replicas. If they were given up, or are gone and have no place, the stable
version gets a replica on the variant's topic. While no device can hold that one either, the requests wait: it is said
once, and tried again with whatever memory comes free. Nothing that runs is taken away for it.
"""

from __future__ import annotations

from scheduler.launches import accept
from scheduler.limits import NEVER_MS, RETRIES_MAX
from scheduler.rollout import RolloutState
from scheduler.state import ModelState
from scheduler.step import Step
from scheduler.variants import end_unit, rescue_unit, unit_of


def follow_unit(step: Step, model: ModelState | None, unit: ModelState) -> None:
    """After every record, for each unit of a model: end it with its rollout, and see that what is left is answered."""
    if unit.status == "accepted":
        if model is None or not any(unit_of(step.state, model.model, name) is unit for name in model.rollouts):
            end_unit(step, unit, had_traffic=True)
    elif model is None or model.status == "deleting":
        if not unit.replicas and unit.working_off and unit.give_up_at_ms == NEVER_MS:
            step.look_at(unit)  # with its model goes the reason to wait without end
    elif unit.version != model.version and (unit.failures > RETRIES_MAX or has_no_place(unit)):
        rescue_unit(step, unit, accept(bytes(model.spec), step.settings.topics))
    elif unit.replicas:
        unit.rest_waits = False
    elif has_no_place(unit) and not unit.rest_waits:
        _say_waits(step, model, unit)


def may_owe(unit: ModelState, rollout: RolloutState | None) -> bool:
    """Whether its topic may hold anything: requests, or a shadow's copies of them, which are worked off as well."""
    return unit.owes or (rollout is not None and rollout.phase != "loading")


def has_no_place(unit: ModelState) -> bool:
    """Nobody works its topic off, and no device has room for a replica."""
    return not unit.replicas and bool(unit.unplaced) and any(not one.drained for one in unit.partitions)


def rest_in_words(model: ModelState, unit: ModelState | None, rollout: RolloutState) -> str:
    """For who ends a rollout: what becomes of what its version was given; empty when its replicas are there."""
    if unit is None or unit.replicas or not may_owe(unit, rollout):
        return ""
    return (
        f" It has no replica: what is left in {unit.route.topic} is worked off by the first that finds a place, of "
        f"{rollout.version_before} if {rollout.version} has none. `sie-stream rollout status {model.model}` counts it."
    )


def _say_waits(step: Step, model: ModelState, unit: ModelState) -> None:
    unit.rest_waits = True
    lost_at = unit.lost_at
    step.decide(
        "rollout_rest_waits",
        model.model,
        f"No device can hold a replica of {unit.version} that works off what is left in {unit.route.topic}. It waits "
        f"there, and is worked off as soon as one can: add a worker, or free memory. `sie-stream rollout status "
        f"{model.model}` counts it.",
        chosen={"unit": unit.model, "version": unit.version, "topic": unit.route.topic},
        rejected=unit.unplaced,
        do_nothing="Nothing that runs is taken away for it.",
        facts=(step.fact(lost_at.offset, lost_at.kind) if lost_at else None,),
    )
    step.touch("instances", model.model)
