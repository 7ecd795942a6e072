"""What a model with movable weights offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class Weight(Protocol):
    """One block of bytes that a model computes with and never writes to."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Where it lies now."""
        ...

    def move_to(self, address: int) -> None:
        """Use the same bytes at `address` from now on, and forget the old place. They need not be there yet."""
        ...


@runtime_checkable
class Movable(Protocol):
    """A loaded model whose weights can be moved."""

    def weights(self) -> Sequence[Weight]:
        """All of them that are worth moving; empty: none can be."""
        ...


@runtime_checkable
class SharesWeights(Protocol):
    """A backend whose models may hold weights together."""

    def keep_weights_apart(self) -> None:
        """From now on every model has weights of its own, so that it can leave the device without the others."""
        ...


@runtime_checkable
class Pooled(Protocol):
    """A loaded model that uses memory of pools it shares with others of its engine."""

    @property
    def pools(self) -> dict[str, int]:
        """{name: bytes}"""
        ...
