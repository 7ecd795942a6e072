"""The bytes of one device by use and by owner. They always add up: weights + kv + workspace + free = total."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct

Use = Literal["weights", "kv", "workspace"]
USES: tuple[Use, ...] = get_args(Use)


class Balance(Struct, frozen=True):
    """What a ledger holds now, in bytes."""

    total: int
    weights: int
    kv: int
    workspace: int
    free: int


class Ledger:
    """Nothing is booked above the total: who needs more makes room first."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self._booked: dict[tuple[Use, str], int] = {}
        self._by_use: dict[Use, int] = dict.fromkeys(USES, 0)

    def book(self, use: Use, owner: str, size: int) -> None:
        """Raises ValueError for an owner that has booked this use already, and when not so much is free."""
        if (use, owner) in self._booked:
            raise ValueError(f"{owner} has booked {use} already")
        if not 0 <= size <= self.free_bytes:
            raise ValueError(f"{size} bytes of {use} wanted, {self.free_bytes} of {self.total_bytes} are free")
        self._booked[use, owner] = size
        self._by_use[use] += size
        self.free_bytes -= size

    def give_back(self, use: Use, owner: str) -> int:
        """What it had booked; 0 for nothing."""
        size = self._booked.pop((use, owner), 0)
        self._by_use[use] -= size
        self.free_bytes += size
        return size

    def booked(self, use: Use, owner: str) -> bool:
        return (use, owner) in self._booked

    def balance(self) -> Balance:
        uses = self._by_use
        return Balance(self.total_bytes, uses["weights"], uses["kv"], uses["workspace"], self.free_bytes)
