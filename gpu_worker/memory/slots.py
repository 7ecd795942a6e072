"""One model's weights as the memory mapper sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpu_worker.memory.worth import DISK_COST, Candidate, Likelihood

Below = Literal["host", "disk"]
"""Where the image is that a model is activated from."""
SwitchClass = Literal["resident", "host", "disk"]
SWITCH_CLASSES: tuple[SwitchClass, ...] = ("resident", "host", "disk")
Place = Literal["out", "coming", "in"]


class TooLarge(Exception):
    """The device can never hold the model beside what cannot leave it."""


@dataclass(slots=True, eq=False)
class Slot:
    """image_bytes: weights that can leave the device; 0: none. fixed_bytes: weights that stay as long as the model is
    loaded. kv: {name: bytes} of pools that models of its group share and that stay as long as the group.
    """

    slot: int
    group: str
    """The engine process it is in."""
    image_bytes: int
    fixed_bytes: int
    kv: dict[str, int]
    likelihood: Likelihood
    below: Below = "host"
    moving: Below | None = None
    """Where its image is being moved."""
    stays_until_ms: float = float("-inf")
    """Its image could not be moved a moment ago: not tried again before."""
    pages: tuple[int, ...] = ()
    place: Place = "out"

    def worth(self, at_ms: float) -> float:
        return self.likelihood.at(at_ms) * self.image_bytes * (DISK_COST if self.below == "disk" else 1.0)

    def candidate(self, at_ms: float, page_bytes: int) -> Candidate:
        """On the device: what its pages would free."""
        return Candidate(self.slot, len(self.pages) * page_bytes, self.worth(at_ms))
