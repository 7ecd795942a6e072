"""Rollouts that ended, also of models that are gone."""

from __future__ import annotations

from msgspec import Raw, structs

from scheduler.rollout import RolloutState
from scheduler.state import ROLLOUTS_KEPT, ClusterState, ModelState

GONE_KEPT = 64
"""Deleted models whose rollouts are remembered, those that were deleted last."""
NO_SPEC = Raw(b"null")


def past_of(state: ClusterState, model: str) -> tuple[RolloutState, ...]:
    """Oldest first: of a model of this name that was deleted, and of the one there is."""
    found = state.models.get(model)
    return state.gone_rollouts.get(model, ()) + (found.rollout_history if found is not None else ())


def remember(state: ClusterState, model: ModelState) -> None:
    """The model is gone, what was rolled out is history. Nothing of it can come back, so declarations are not kept."""
    kept = tuple(structs.replace(one, spec=NO_SPEC, spec_before=NO_SPEC) for one in model.rollout_history)
    if not kept:
        return
    before = state.gone_rollouts.pop(model.model, ())  # the newest stands last
    state.gone_rollouts[model.model] = (*before, *kept)[-ROLLOUTS_KEPT:]
    while len(state.gone_rollouts) > GONE_KEPT:
        del state.gone_rollouts[next(iter(state.gone_rollouts))]
