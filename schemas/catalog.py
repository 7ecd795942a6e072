"""The released schemas: what is in released/catalog.json, and the schemas that this version writes.

Ids are fixed: an id means the same schema in every installation, so records stay readable when they are copied to
another cluster. Ids of user-registered schemas start at USER_ID_FIRST.
"""

from __future__ import annotations

from importlib.resources import files

import msgspec
from msgspec import Struct

from sie_stream.ids import TopicNames

NAMESPACE = "sie.v1"
USER_ID_FIRST = 1000


class Released(Struct, frozen=True):
    """One released version of one schema."""

    id: int
    name: str
    version: int
    file: str
    """Below released/."""
    sha256: str


def schema_text(name: str) -> str:
    """Text of the schema as it is being developed: <name>.avsc."""
    return files("schemas").joinpath(f"{name}.avsc").read_text(encoding="utf-8")


def released_text(released: Released) -> str:
    return files("schemas").joinpath("released", released.file).read_text(encoding="utf-8")


def _load() -> tuple[Released, ...]:
    text = files("schemas").joinpath("released", "catalog.json").read_bytes()
    return tuple(msgspec.json.decode(text, type=list[Released]))


RELEASED: tuple[Released, ...] = _load()
BY_ID: dict[int, Released] = {released.id: released for released in RELEASED}
NAMES: tuple[str, ...] = tuple(dict.fromkeys(released.name for released in RELEASED))
CURRENT: dict[str, Released] = {
    name: max((r for r in RELEASED if r.name == name), key=lambda r: r.version) for name in NAMES
}
"""Newest release of each schema: the one this version writes."""


def subjects(names: TopicNames) -> tuple[tuple[str, str], ...]:
    """(subject, schema name) of every topic, TOPIC-value as Confluent's clients look it up.

    There is a work topic per model, so WorkItem stands under its full name.
    """
    control = (
        names.cluster,
        names.models,
        names.instances,
        names.routes,
        names.placements,
        names.decisions,
        names.telemetry,
    )
    topics = (
        (names.requests, "InferenceRequest"),
        (names.outputs, "RawOutput"),
        (names.results, "Result"),
        (names.shadow, "Result"),
        (names.deadletter, "DeadLetter"),
        (names.tokens, "TokenDelta"),
        *((topic, "ControlEnvelope") for topic in control),
    )
    return (*((f"{topic}-value", name) for topic, name in topics), (f"{NAMESPACE}.WorkItem", "WorkItem"))
