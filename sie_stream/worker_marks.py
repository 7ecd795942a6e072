"""Labels and taints of a worker, as settings write them: `gpu=a100,zone=eu-1` and `spot=true:NoSchedule`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args, get_type_hints

from sie_stream.control import Taint
from sie_stream.errors import ConfigError, did_you_mean

EFFECTS: tuple[str, ...] = get_args(get_type_hints(Taint)["effect"])


def parse_labels(text: str) -> dict[str, str]:
    """{name: value}. Raises ConfigError for what is no NAME=VALUE, and for a name that comes twice."""
    labels: dict[str, str] = {}
    for part in _parts(text):
        name, equals, value = part.partition("=")
        if not equals or not name or name in labels:
            raise ConfigError(f"setting worker_labels: {part!r}, NAME=VALUE is expected, each name once.")
        labels[name] = value
    return labels


def parse_taints(text: str) -> tuple[Taint, ...]:
    """Raises ConfigError for what is no KEY[=VALUE]:EFFECT."""
    taints: list[Taint] = []
    for part in _parts(text):
        mark, colon, effect = part.rpartition(":")
        key, _, value = mark.partition("=")
        if not colon or not key or effect not in EFFECTS:
            raise ConfigError(
                f"setting worker_taints: {part!r}, KEY=VALUE:EFFECT is expected; effects are {', '.join(EFFECTS)}."
                f"{did_you_mean(effect, EFFECTS)}"
            )
        taints.append(Taint(key, value, effect))  # type: ignore[arg-type]  # checked above
    return tuple(taints)


def _parts(text: str) -> Iterator[str]:
    return (part for part in map(str.strip, text.split(",")) if part)
