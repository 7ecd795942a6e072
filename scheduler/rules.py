"""What a declaration says about where its replicas may be."""

from __future__ import annotations

from msgspec import Struct

from scheduler.solver.model import TIER_OF_P0, Toleration
from sie_stream.problems import Problem, SpecError
from sie_stream.spec import ModelSpec


class PlacementRules(Struct, frozen=True):
    tier: str = ""
    """Group of workers kept apart; empty: those that belong to none."""
    tags: tuple[str, ...] = ()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    requires: dict[str, str] = {}
    """Version ranges by what is versioned: {"pytorch": ">=2.6"}."""


def rules_of(spec: ModelSpec) -> PlacementRules:
    """Raises SpecError for a tier that cannot take the model, whatever the fleet."""
    if spec.tier == TIER_OF_P0 and spec.priority_level != "P0":
        message = (
            f"409 Conflict: {TIER_OF_P0} takes P0 models only, and {spec.name} is {spec.priority_level}. "
            f"Set priority_level to P0, or choose tier-1 or tier-2."
        )
        raise SpecError([Problem("tier", repr(spec.tier), message)])
    return PlacementRules(
        tier=spec.tier or "",
        tags=spec.tags,
        node_selector=spec.node_selector,
        tolerations=tuple(Toleration(t.key, t.operator, t.value, t.effect) for t in spec.tolerations),
        requires={name: text for name, text in spec.requires.model_dump().items() if text is not None},
    )
