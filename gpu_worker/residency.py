"""Which models are on the device now: the worker's own decision, turn by turn. Pure.

A model with requests that wait comes to the device as soon as there is room, or room can be made by models that nothing
waits for. Where all that are there have work, they keep their places for a turn: until TURN_MS have passed since
somebody began to wait, or RELOADS_MAX models came and went meanwhile. Then whoever has waited longest comes in, and a
new turn begins; so nobody starves, and nobody is exchanged for every request. A more urgent lane does not wait for the
end of a turn. A model that an engine holds requests of is under a lease and never leaves; one that is to leave gets no
more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from gpu_worker.memory.mapper import DeviceMemory, Move

TURN_MS = 250.0
RELOADS_MAX = 4
AHEAD_EVERY_MS = 20.0
"""How often it is looked at what may be wanted next: nobody waits for that, and it looks at every model."""


class Demand(NamedTuple):
    """A model that requests wait for. lane: of the most urgent of them; less than 0: before all lanes."""

    slot: int
    lane: int


class Activate(NamedTuple):
    slot: int
    pages: tuple[int, ...]
    waited_ms: float = 0.0
    """Since requests for it began to wait; 0: nothing waits for it."""


class Evict(NamedTuple):
    slot: int


Order = Activate | Evict | Move


class Residency:
    """Of one device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._since: dict[int, float] = {}
        """Who waits to come in, and since when."""
        self._leaving: dict[int, None] = {}
        self._turn_since: float | None = None
        """Since when somebody waits in vain; None: nobody does."""
        self._looked_at = float("-inf")
        self._reloads = 0
        """Models that came in since then, past those who wait."""

    def runnable(self, slot: int) -> bool:
        """Whether an engine may be given requests of it."""
        one = self.memory.slots.get(slot)
        return one is not None and one.place == "in" and slot not in self._leaving

    def used(self, slot: int, at_ms: float) -> None:
        """Requests were given to an engine."""
        one = self.memory.slots.get(slot)
        if one is not None:
            one.likelihood.used(at_ms)

    def due_in_ms(self, at_ms: float) -> float | None:
        """When the turn ends; None: nobody waits for that."""
        return None if self._turn_since is None else max(0.0, self._turn_since + TURN_MS - at_ms)

    def decide(self, demand: Sequence[Demand], leased: AbstractSet[int], at_ms: float) -> list[Order]:
        """`demand`: all models that requests wait for, wherever they are. `leased`: slots that engines hold requests
        of. What is ordered counts as done in `memory`, but for the arrival of activated models.
        """
        lanes: dict[int, int] = {}
        for slot, lane in demand:
            lanes[slot] = min(lane, lanes.get(slot, lane))
        slots = self.memory.slots
        self._since = {
            slot: self._since.get(slot, at_ms) for slot in lanes if slot in slots and slots[slot].place == "out"
        }
        self._leaving = {slot: None for slot in self._leaving if slot in slots and slots[slot].place == "in"}
        orders = self._let_in(lanes, leased, at_ms)
        if at_ms - self._looked_at >= AHEAD_EVERY_MS:
            self._looked_at = at_ms
            orders += [*([] if self._since else self._fill(at_ms)), *self.memory.moves(at_ms)]
        return orders

    def _let_in(self, lanes: dict[int, int], leased: AbstractSet[int], at_ms: float) -> list[Order]:
        orders: list[Order] = []
        passed = False
        for slot in sorted(self._since, key=lambda slot: (lanes[slot], self._since[slot], slot)):
            forced = not passed and self._turn_over(at_ms)
            may_wait = [one for one in lanes if forced or lanes[one] > lanes[slot]]
            gone = self._who_leaves(slot, lanes, may_wait, leased, at_ms)
            if gone is None and forced:
                everyone = self._resident(set())
                # They drain first, and what becomes free meanwhile is nobody else's.
                self._leaving = dict.fromkeys(self.memory.giving_way(self.memory.lacking(slot), everyone, at_ms) or ())
                return orders
            if gone is None:
                if not passed and self._turn_since is None:
                    self._turn_since, self._reloads = at_ms, 0
                passed = True
                continue
            for leaver in gone:
                self.memory.evict(leaver)
            waited_ms = at_ms - self._since.pop(slot)
            orders += [*map(Evict, gone), Activate(slot, self.memory.activate(slot), waited_ms)]
            if passed:
                self._reloads += 1
            else:
                # Whoever waited longest is in: the others wait for a turn that begins now.
                self._leaving.clear()
                self._turn_since, self._reloads = (at_ms if self._since else None), 0
        if not passed:
            self._turn_since = None
            self._leaving.clear()
        return orders

    def _turn_over(self, at_ms: float) -> bool:
        return self._turn_since is not None and (at_ms - self._turn_since >= TURN_MS or self._reloads >= RELOADS_MAX)

    def _who_leaves(
        self,
        slot: int,
        lanes: Mapping[int, int],
        may_wait: Sequence[int],
        leased: AbstractSet[int],
        at_ms: float,
    ) -> tuple[int, ...] | None:
        """Models without a lease that make room: of those that nothing waits for, else also of `may_wait`."""
        lacking = self.memory.lacking(slot)
        there = self._resident(leased)
        gone = self.memory.giving_way(lacking, [one for one in there if one not in lanes], at_ms)
        if gone is None and may_wait:
            gone = self.memory.giving_way(lacking, [one for one in there if one not in lanes or one in may_wait], at_ms)
        return gone

    def _resident(self, leased: AbstractSet[int]) -> list[int]:
        return [one.slot for one in self.memory.slots.values() if one.place == "in" and one.slot not in leased]

    def _fill(self, at_ms: float) -> list[Order]:
        """Nobody waits: the likeliest model that there is room for comes in, one after the other."""
        slots = self.memory.slots.values()
        if any(one.place == "coming" for one in slots):
            return []
        fitting = [
            one
            for one in slots
            if one.place == "out" and one.below == "host" and one.moving is None and self.memory.lacking(one.slot) <= 0
        ]
        if not fitting:
            return []
        best = max(fitting, key=lambda one: (one.likelihood.at(at_ms), -one.slot))
        return [Activate(best.slot, self.memory.activate(best.slot))]
