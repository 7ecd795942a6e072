"""Taking back a rollout that was completed: the version before it comes again, all at once."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from scheduler.actors import named_first
from scheduler.launches import accept
from scheduler.rollout import RolloutState
from scheduler.state import ROLLOUTS_KEPT, ModelState
from scheduler.step import Step
from scheduler.variants import take_over
from sie_stream.commands import RolloutOrder


def undo(step: Step, model: ModelState, record: RolloutOrder) -> None:
    """The version before the rollout that was completed last comes back, new before old; or why it does not."""
    done = [one for one in standing(model.rollout_history) if one.version == model.version]
    if not done or model.status == "deleting" or model.rollouts:
        ignored(step, record, _why_not(model))
        return
    last = done[-1]
    reason = (
        f"{named_first(record.actor)} takes {last.rollout} back: version {last.version_before} replaces "
        f"{last.version}, its replicas are placed beside those of {last.version}."
    )
    take_over(step, model, accept(bytes(last.spec_before), step.settings.topics))
    model.rollout_history = (*model.rollout_history, _entry(step, last, record, reason))[-ROLLOUTS_KEPT:]
    step.decide(
        "rollout_undone",
        model.model,
        reason,
        chosen={"rollout": last.rollout, "version": last.version_before, "actor": record.actor},
        do_nothing=f"Version {last.version} would stay.",
    )


def standing(history: Sequence[RolloutState]) -> list[RolloutState]:
    """Those that were completed and not taken back since. An undo takes back the newest that went the other way."""
    found: list[RolloutState] = []
    for one in history:
        if one.ending == "completed":
            found.append(one)
        elif one.ending == "undone":
            back = (one.version_before, one.version)
            number = next((n for n in reversed(range(len(found))) if _way(found[n]) == back), None)
            if number is not None:
                del found[number]
    return found


def _way(rollout: RolloutState) -> tuple[str, str]:
    return rollout.version, rollout.version_before


def ignored(step: Step, record: RolloutOrder, why: str) -> None:
    """The order changes nothing; a decision says why."""
    step.decide("rollout_ignored", record.model, why, chosen={"order": record.order, "actor": record.actor})


def _why_not(model: ModelState) -> str:
    if model.status == "deleting":
        return "The model is being deleted; to have it again, `sie-stream apply -f FILE` once it is gone."
    if model.rollouts:
        names = list(model.rollouts)
        orders = " or ".join(f"`sie-stream rollout abort {model.model} --variant {name}`" for name in names)
        return f"Variants are under way: {', '.join(names)}. End them first ({orders})."
    return (
        f"Its version {model.version} did not come by a rollout that can be taken back. To have an older "
        "version, apply its declaration: `sie-stream apply -f FILE`."
    )


def _entry(step: Step, last: RolloutState, record: RolloutOrder, why: str) -> RolloutState:
    """For the history: from the version that was completed to the one before, without steps."""
    return RolloutState(
        rollout=f"r-{step.offset}",
        variant=last.variant,
        version=last.version_before,
        version_before=last.version,
        spec=last.spec_before,
        spec_before=last.spec,
        plan=structs.replace(last.plan, steps=()),
        started_ms=step.now_ms,
        actor=record.actor,
        phase="ended",
        since_ms=step.now_ms,
        ending="undone",
        ended_ms=step.now_ms,
        why=why,
    )
