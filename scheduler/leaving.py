"""Replicas that leave although their version stays: of a drained worker, or one more than is wanted."""

from __future__ import annotations

from scheduler.state import ModelState, ReplicaState
from scheduler.step import Step


def let_surplus_go(model: ModelState) -> None:
    """More replicas than are wanted: those placed last leave, loading ones first."""
    present = model.present()
    surplus = len(present) - model.replicas_wanted
    if surplus > 0:
        for replica in sorted(present, key=lambda r: (r.state == "loading", r.placement_epoch))[-surplus:]:
            replica.leaving = True


def drain_leaving(step: Step, model: ModelState, serving: list[ReplicaState]) -> None:
    """New before old: those that stay serve, so the replicas of a draining worker hand over."""
    for replica in model.replicas:
        if replica.leaving and replica.state == "ready" and replica not in serving:
            replica.state = "draining"
            step.decide(
                "replica_draining",
                model.model,
                _why_leaving(step, model, replica, serving),
                chosen={"worker": replica.worker, "device": replica.device, "memory_bytes": replica.memory_bytes},
                do_nothing="It would keep its memory, and its worker could not be stopped without interrupting it.",
            )
            step.touch("instances", model.model)


def _why_leaving(step: Step, model: ModelState, leaving: ReplicaState, serving: list[ReplicaState]) -> str:
    others = ", ".join(replica.worker for replica in serving) or "nobody"
    if leaving.worker in step.state.cordons:
        return f"{leaving.worker} is being drained, and {others} can serve without it."
    return f"{model.replicas_wanted} replicas are wanted, and {others} can serve without this one."
