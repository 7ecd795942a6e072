"""Replicas that are to go while their version stays: each serves until another one does.

Of a drained worker, one more than is wanted, or moved away by an undo or a plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.counts import wanted_in_words
from scheduler.rules import POOL_LABEL
from scheduler.state import ClusterState, ModelState, ReplicaState
from scheduler.step import Step


def let_surplus_go(model: ModelState) -> None:
    """More replicas than are wanted: those placed last leave, loading ones first."""
    present = model.present()
    surplus = len(present) - model.replicas_wanted
    if surplus > 0:
        for replica in sorted(present, key=lambda r: (r.state == "loading", r.placement_epoch))[-surplus:]:
            replica.leaving = True


def drain_leaving(step: Step, model: ModelState, serving: Sequence[ReplicaState]) -> None:
    """New before old: those that stay serve, so the leaving replicas hand over."""
    for replica in model.replicas:
        if replica.leaving and replica.state == "ready" and replica not in serving:
            replica.state = "draining"
            others = ", ".join(other.worker for other in serving)
            why = f"{others} can serve without it" if others else "it has nothing to do"
            step.decide(
                "replica_draining",
                model.model,
                f"{leaves_because(step.state, model, replica)}, and {why}.",
                chosen={"worker": replica.worker, "device": replica.shown, "memory_bytes": replica.memory_bytes},
                do_nothing="It would keep its memory, and its worker could not be stopped without interrupting it.",
            )
            step.touch("instances", model.model)


def leaves_because(state: ClusterState, model: ModelState, replica: ReplicaState) -> str:
    """The beginning of a sentence."""
    if replica.leaving_for:
        return f"{replica.leaving_for} {'moves it' if replica.planned else 'puts it back where it was'}"
    worker = state.workers.get(replica.worker)
    if model.pool and worker is not None and worker.labels.get(POOL_LABEL) != model.pool:
        return f"{model.model} moves to the pool {model.pool}"
    if state.empties(replica.worker):
        return f"{replica.worker} is being drained"
    return wanted_in_words(model.replicas_wanted)


def stay_after_all(step: Step, model: ModelState) -> None:
    """A move that cannot be ended, because the replica it placed is gone, is given up: what serves stays where it is.

    Not on a worker that is being drained: there it goes on leaving, for that.
    """
    missing = max(0, model.replicas_wanted - len(model.present()))
    for replica in [r for r in model.replicas if r.leaving_for and r.state != "draining"][:missing]:
        undo, planned = replica.leaving_for, replica.planned
        replica.leaving_for, replica.planned = "", False
        replica.leaving = step.state.empties(replica.worker)
        step.decide(
            "move_given_up" if planned else "undo_given_up",
            model.model,
            f"A replica that {undo} placed is gone before it was ready, so this one keeps its place.",
            chosen={"worker": replica.worker, "device": replica.shown, "plan" if planned else "undo": undo},
            do_nothing="It would leave, and a replica would be missing.",
        )
        step.touch("instances", model.model)
