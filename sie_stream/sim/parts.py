"""What the processes of a world have in common: settings, the engine's pace, and which class makes which process."""

from __future__ import annotations

from typing import Protocol

from gpu_worker.sim.images import SimImages
from sie_stream.settings import Settings
from sie_stream.sim.faults import Faults
from sie_stream.sim.scenario import Engine, Fleet, Role
from sie_stream.sim.traffic import Traffic
from sie_stream.sim.world import Body, Lane, World


class MadeOf(Protocol):
    """A class of bodies."""

    def __call__(self, world: World, lane: Lane, parts: Parts) -> Body: ...


class Parts:
    """Makes bodies. `faults` and `traffic` are set once they exist; tests put broken bodies into `bodies`."""

    def __init__(self, settings: Settings, fleet: Fleet, engine: Engine, bodies: dict[Role, MadeOf]) -> None:
        self.settings = settings
        self.fleet = fleet
        self.engine = engine
        self.bodies = bodies
        self.faults: Faults | None = None
        self.traffic: Traffic | None = None
        self.images: dict[str, SimImages] = {}
        """By incarnation of their worker."""
        self.moved: dict[str, int] = {}
        """What became of requests that were moved while they ran: {note of the worker: how often}."""

    def make(self, world: World, lane: Lane) -> Body:
        return self.bodies[lane.process.role](world, lane, self)
