"""What sie.decisions says about placements and workers, as far as results can be held against it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from sie_stream.decisions import Decision

Incarnation = tuple[str, str]
"""(worker, incarnation)."""


class Deeds(Struct):
    """Folded from decisions, in their order."""

    placed: dict[tuple[int, str], frozenset[str]] = field(default_factory=dict)
    """{(cause, model or variant of one): workers that replicas or partitions of it went to}. The cause is the placement
    epoch."""
    ended_ms: dict[Incarnation, int] = field(default_factory=dict)
    """From when on no transaction of it can commit: fenced, replaced by the next one, or left. The broker's time."""
    joined: set[Incarnation] = field(default_factory=set)
    first_cause: int = -1
    """Of the oldest decision that is still there; -1: there is none."""


def deeds_of(decisions: Iterable[Decision]) -> Deeds:
    deeds = Deeds()
    for decision in decisions:
        if deeds.first_cause < 0:
            deeds.first_cause = decision.cause_offset
        _placements(deeds, decision)
        incarnation = str(decision.chosen.get("incarnation", ""))
        match decision.kind:
            case "worker_joined":
                deeds.joined.add((decision.subject, incarnation))
            case "worker_fenced" | "worker_left":
                deeds.ended_ms.setdefault((decision.subject, incarnation), decision.at_ms)
            case "worker_replaced":
                old = str(decision.chosen.get("fenced", ""))
                deeds.ended_ms.setdefault((decision.subject, old), decision.at_ms)
            case _:
                pass
    return deeds


def _placements(deeds: Deeds, decision: Decision) -> None:
    for move in decision.moves:
        worker = move.target.partition("/")[0]
        if worker:
            key = (decision.cause_offset, move.model)
            deeds.placed[key] = deeds.placed.get(key, frozenset()) | {worker}
