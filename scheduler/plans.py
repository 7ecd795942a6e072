"""A plan under way: replicas that go elsewhere, wave by wave, so that others find room or the fleet is in better order.

At most one plan at a time, and it is state of the fold: a scheduler that takes over from a snapshot goes on with it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from scheduler.seats import DeviceKey, Seat, devices_of
from sie_stream.decisions import SolverRun

Purpose = Literal["room", "rebalance"]


class PlannedMove(Struct, frozen=True):
    """One running replica goes from here to there. Moves of a wave start when those of the wave before are over."""

    model: str
    generation: int
    source: Seat
    target: Seat
    memory_bytes: int
    """On each device."""
    wave: int


class PlannedStart(Struct, frozen=True):
    """The replica that the room is made for. Until the plan ends the room is kept for it."""

    model: str
    generation: int
    target: Seat
    memory_bytes: int


class PlanUnderWay(Struct):
    decision: str
    """That began it; the replicas it moves are `leaving_for` it."""
    offset: int
    """Of the record that caused it."""
    kind: str
    """Of that record."""
    purpose: Purpose
    moves: tuple[PlannedMove, ...]
    starts: tuple[PlannedStart, ...]
    workers: dict[str, str]
    """{worker: incarnation} of all it relies on."""
    solver: SolverRun
    started_ms: int
    wave: int = -1
    """Of the moves under way; -1: none has begun."""

    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(item.model for item in (*self.moves, *self.starts)))

    def waits(self, model: str) -> bool:
        """Whether the room is being made for replicas of this model."""
        return any(start.model == model for start in self.starts)

    def kept(self) -> dict[DeviceKey, int]:
        """Bytes that nobody else may take: of the starts, and of moves that have not begun."""
        kept: dict[DeviceKey, int] = {}
        for target, memory_bytes in (
            *((move.target, move.memory_bytes) for move in self.moves if move.wave > self.wave),
            *((start.target, start.memory_bytes) for start in self.starts),
        ):
            for device in devices_of(target):
                kept[device] = kept.get(device, 0) + memory_bytes
        return kept
