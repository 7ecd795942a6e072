"""How many replicas, in words."""

from __future__ import annotations


def replicas_in_words(count: int) -> str:
    """`1 replica`, `2 replicas`."""
    return f"{count} replica{'' if count == 1 else 's'}"


def wanted_in_words(count: int) -> str:
    """`1 replica is wanted`, `2 replicas are wanted`: a sentence, or the beginning of one."""
    return f"{replicas_in_words(count)} {'is' if count == 1 else 'are'} wanted"
