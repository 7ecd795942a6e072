"""What a policy is to the simulator, and the fleet that all of them run on."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from sie_stream.sim.fleet.board import Board
from sie_stream.sim.fleet.events import Events
from sie_stream.sim.fleet.scenario import Fleet, Scenario

EPOCH_MS = 1_000_000
"""Log time at which a simulation begins to set up its fleet."""
WARM_UP_MS = 900_000
"""Longest time that setting up may take before traffic begins."""
RESTART_MS = 3_000
"""From the end of a worker process to its next incarnation."""


class Hit(Struct, frozen=True):
    """One fault. `target`: server, or GPU of the fleet, or worker, by the kind."""

    at_ms: int
    kind: str
    target: int
    for_ms: int
    at_once: int


class Policy(Protocol):
    """Decides which models are on which GPUs, and where requests go, through its board."""

    name: str
    board: Board
    events: Events

    def start(self) -> None:
        """Sets the fleet up, in virtual time, until models are loaded (at most WARM_UP_MS)."""
        ...

    def settle(self) -> None:
        """Before each step of traffic: whatever was decided shows on the board."""
        ...

    def hit(self, fault: Hit) -> None: ...

    def counts(self) -> dict[str, int]:
        """switches, migrations, and what else is worth a number."""
        ...


def device_count(fleet: Fleet) -> int:
    return fleet.servers * fleet.gpus


def offered_mb(fleet: Fleet) -> int:
    """Memory of a GPU that models may take."""
    return fleet.memory_mb - fleet.reserve_mb


def worker_count(scenario: Scenario) -> int:
    fleet = scenario.fleet
    return fleet.servers if fleet.workers == "per-server" else device_count(fleet)
