"""How many of something, in words."""

from __future__ import annotations


def counted(count: int, one: str, many: str) -> str:
    """`counted(1, "device is", "devices are")`: `1 device is`."""
    return f"{count} {one if count == 1 else many}"


def replicas_in_words(count: int) -> str:
    """`1 replica`, `2 replicas`."""
    return counted(count, "replica", "replicas")


def wanted_in_words(count: int) -> str:
    """`1 replica is wanted`, `2 replicas are wanted`: a sentence, or the beginning of one."""
    return f"{replicas_in_words(count)} {'is' if count == 1 else 'are'} wanted"
