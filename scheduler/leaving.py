"""Replicas that are to go while their model stays: each serves until another one does."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.state import ModelState, ReplicaState
from scheduler.step import Step


def drain_leaving(step: Step, model: ModelState, serving: Sequence[ReplicaState]) -> None:
    """New before old: those that stay serve, so the leaving replicas hand over."""
    for replica in model.replicas:
        if replica.leaving and replica.state == "ready" and replica not in serving:
            replica.state = "draining"
            step.decide(
                "replica_draining",
                model.model,
                f"{leaves_because(replica)}, and {', '.join(r.worker for r in serving)} can serve without it.",
                chosen={"worker": replica.worker, "device": replica.device, "memory_bytes": replica.memory_bytes},
                do_nothing=f"{replica.worker} would keep it.",
            )
            step.touch("instances", model.model)


def leaves_because(replica: ReplicaState) -> str:
    """The beginning of a sentence."""
    if replica.leaving_for:
        return f"{replica.leaving_for} puts it back where it was"
    return f"{replica.worker} is being drained"


def stay_after_all(step: Step, model: ModelState) -> None:
    """An undo that cannot be ended, because a replica it placed is gone, is given up: what serves stays where it is."""
    missing = max(0, model.replicas_wanted - len(model.present()))
    for replica in [r for r in model.replicas if r.leaving_for and r.state != "draining"][:missing]:
        undo, replica.leaving, replica.leaving_for = replica.leaving_for, False, ""
        step.decide(
            "undo_given_up",
            model.model,
            f"A replica that {undo} placed is gone before it was ready, so this one keeps its place.",
            chosen={"worker": replica.worker, "device": replica.device, "undo": undo},
            do_nothing="It would leave, and a replica would be missing.",
        )
        step.touch("instances", model.model)
