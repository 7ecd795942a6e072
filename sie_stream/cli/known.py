"""Whether a name that found nothing is known at all: an empty answer to a misspelt name would be a wrong one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sie_stream.decisions import Decision, place_of
from sie_stream.edge.tables import latest_values
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.ids import TopicNames, instance_id
from sie_stream.ports import LogReader

SHOWN = 8
"""So many of the known names are told."""


def refuse_unknown(option: str, name: str, known: Collection[str]) -> None:
    """Raises ConfigError with the nearest and some of the known names, unless the name is one of them."""
    if name in known:
        return
    names = sorted(known)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    told = f" Known are {', '.join(names[:SHOWN])}{more}." if names else ""
    raise ConfigError(f"{option} {name!r}: nothing of that name is known here.{did_you_mean(name, names)}{told}")


def declared_models(reader: LogReader, topics: TopicNames) -> set[str]:
    """Names of the models that are declared now."""
    return set(latest_values(reader, topics.models))


def names_in(decisions: Iterable[Decision]) -> set[str]:
    """What decisions are about: models and their instances, workers, devices (WORKER/DEVICE), schedulers."""
    names: set[str] = set()
    for decision in decisions:
        places = [decision.subject, *(place for move in decision.moves for place in (move.source, move.target))]
        names |= {part for place in places for part in (place, place.partition("/")[0])}
        models = {move.model for move in decision.moves if move.model}
        names |= models | {instance_id(model) for model in models}
    return {name for name in names if name and place_of(name) is None}  # what is undone is named by its id
