"""Deleted models that are over: worked off to their ends, or given up because nobody can do that."""

from __future__ import annotations

from scheduler.evidence import memory_changes, went
from scheduler.limits import DELETE_GIVE_UP_MS, NEVER_MS, RETRIES_MAX
from scheduler.rollout_past import remember
from scheduler.state import ModelState
from scheduler.step import Step
from sie_stream.ids import base_of, variant_of


def drop_if_over(step: Step, model: ModelState) -> None:
    """Forget a deleted model that is worked off, or that nobody can work off: its replicas and its rows go."""
    left = [partition for partition in model.partitions if not partition.drained]
    if not left:
        _drop(step, model, "All its partitions are worked off to their ends, so nothing of it is in work.", "none")
        return
    if model.replicas or any(partition.state != "free" for partition in left):
        model.give_up_at_ms = NEVER_MS
        return
    nobody = nobody_serves(model)
    if not nobody and _may_wait(step, model):
        model.give_up_at_ms = NEVER_MS
        return
    if model.give_up_at_ms == NEVER_MS:
        model.give_up_at_ms = step.now_ms + DELETE_GIVE_UP_MS
    if nobody:
        why = nobody
    elif step.now_ms >= model.give_up_at_ms:
        why = f"It has had no replica for {DELETE_GIVE_UP_MS} ms"
    else:
        return
    again = "it is applied again"
    if base_of(model.model) != model.model:
        again = f"a rollout with variant {variant_of(model.model)} has a replica again, which works off the same topic"
    _drop(
        step,
        model,
        f"{why}, so nobody works off its topic. Requests left there have no result until {again}.",
        ", ".join(str(partition.partition) for partition in left),
    )


def _may_wait(step: Step, model: ModelState) -> bool:
    """A variant of a model that goes on: nobody deleted it, and the stable version works it off when there is room."""
    base = step.state.models.get(base_of(model.model))
    return base is not None and base is not model and base.status == "accepted"


def nobody_serves(model: ModelState) -> str:
    """Why waiting for a replica is of no use, as the start of a sentence; empty when one may come.

    A model that had a place, served there or still loaded, may get it back: its worker may be starting again. One that
    never had any would wait for a fleet that the person who deletes it does not have.
    """
    if model.replicas:
        return ""
    if model.failures > RETRIES_MAX:
        return f"Its replicas were given up after {RETRIES_MAX} retries"
    placed = "placed" in model.timings_ms or any(partition.epoch >= 0 for partition in model.partitions)
    if model.unplaced and not placed:
        return "No device can hold it, and no worker ever held its partitions"
    return ""


def _drop(step: Step, model: ModelState, why: str, left: str) -> None:
    del step.state.models[model.model]
    remember(step.state, model)
    step.capacity_freed = True
    step.decide(
        "model_deleted",
        model.model,
        why,
        moves=tuple(went(model.model, replica) for replica in model.replicas),
        memory=memory_changes(step.state, removed=model.replicas),
        chosen={
            "version": model.version,
            "replicas_unloaded": len(model.replicas),
            "memory_bytes": sum(replica.memory_bytes for replica in model.replicas),
            "topic_kept": model.route.topic,
            "partitions_left": left,
        },
        do_nothing="It would stay listed as deleting, with its replicas.",
    )
    for table in ("placements", "instances", "models"):
        step.touch(table, model.model)
