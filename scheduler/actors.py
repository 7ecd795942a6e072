"""How decisions name who asked for something."""

from __future__ import annotations

UNNAMED = "somebody unnamed"
"""Of commands that other tools wrote without an actor."""


def named(actor: str) -> str:
    """Within a sentence."""
    return actor or UNNAMED


def named_first(actor: str) -> str:
    """At the start of a sentence. A name stays as it is written."""
    return actor or UNNAMED.capitalize()
