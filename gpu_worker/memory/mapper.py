"""The memory mapper of one device: the ledger, the pages, every model's slot, and the tier its image is in.

Decisions are asked for (`lacking`, `giving_way`, `moves`); the caller takes them and says what is done (`activate`,
`evict`, `remove`, `drop_group` ...). Leases are the caller's: it names the slots that may give way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpu_worker.memory.ledger import Ledger, Use
from gpu_worker.memory.pages import PagePool, pages_of
from gpu_worker.memory.slots import Below, Slot, TooLarge
from gpu_worker.memory.worth import Candidate, Likelihood, giving_way

WORKSPACE_BYTES = 32 * 1024 * 1024
"""Activations of an engine process: kept free for each that has a model on the device."""
WORKSPACE_SHARE = 16
"""But no more than this part of a small device."""
RESIDENT_WORTH = 0.5
"""The host image of a model that is on the device is of use only after it has left."""
BETTER = 1.5
"""A model comes from the disk in another's place only if it is so much more likely, or they would change for ever."""


MOVE_AGAIN_MS = 30_000.0
"""After an image could not be moved (a full disk): each try writes all it can, and would begin at once."""


class Move(NamedTuple):
    """An image to be moved to another tier, beside what is on the device."""

    slot: int
    to: Below


class DeviceMemory:
    """total_bytes: of the device. host_bytes: what images in host memory may take together."""

    def __init__(self, total_bytes: int, page_bytes: int, host_bytes: int) -> None:
        self.ledger = Ledger(total_bytes)
        self.pool = PagePool(total_bytes // page_bytes)
        self.page_bytes = page_bytes
        self.host_bytes = host_bytes
        self.workspace_bytes = min(WORKSPACE_BYTES, total_bytes // WORKSPACE_SHARE)
        self.slots: dict[int, Slot] = {}
        self._staying: dict[str, dict[tuple[Use, str], int]] = {}
        """What each group has booked that stays as long as its process."""

    # ------------------------------------------------------------ models come and go

    def add(
        self, slot: int, group: str, image_bytes: int, fixed_bytes: int, kv: Mapping[str, int], at_ms: float
    ) -> Slot:
        """A loaded model, its image in host memory. Raises TooLarge when the device cannot hold it beside what never
        leaves, or when another model could not be held beside it any more; ValueError for a slot that is there.
        """
        if slot in self.slots:
            raise ValueError(f"slot {slot} is there already")
        added = Slot(slot, group, image_bytes, fixed_bytes, dict(kv), Likelihood(at_ms))
        everyone = [*self.slots.values(), added]
        largest = max(self._paged(one.image_bytes) for one in everyone)
        staying = self._never_leaves(everyone)
        if staying + largest > self.ledger.total_bytes:
            raise TooLarge(
                f"its weights take {image_bytes + fixed_bytes} bytes, its KV pool {sum(kv.values())}; the device has "
                f"{self.ledger.total_bytes} bytes (setting device_memory_mb), of which {staying} are for what never "
                f"leaves it (KV pools, workspace, weights that stay) and {largest} for its largest model"
            )
        self.slots[slot] = added
        return added

    def remove(self, slot: int) -> None:
        """The model is unloaded. Nothing happens for a slot that is not there."""
        gone = self.slots.pop(slot, None)
        if gone is not None:
            self._take_off(gone)
            self.ledger.give_back("weights", _fixed(slot))

    def drop_group(self, group: str) -> None:
        """Its engine process ended: nothing of it is left."""
        for one in [one for one in self.slots.values() if one.group == group]:
            self.remove(one.slot)
        # Also those of models that were unloaded before: a pool lives as long as its process.
        for use, owner in self._staying.pop(group, ()):
            self.ledger.give_back(use, owner)

    # ------------------------------------------------------------ on and off the device

    def lacking(self, slot: int) -> int:
        """Bytes that must become free before it can be activated; 0 or less: none."""
        one = self.slots[slot]
        return self._paged(one.image_bytes) + sum(self._unbooked(one).values()) - self.ledger.free_bytes

    def activate(self, slot: int) -> tuple[int, ...]:
        """Its page table. Raises ValueError when it is on the device or on the way, and when there is no room."""
        one = self.slots[slot]
        if one.place != "out":
            raise ValueError(f"slot {slot} is active already ({one.place})")
        lacking = self.lacking(slot)
        if lacking > 0:
            raise ValueError(f"slot {slot} needs {lacking} bytes more than are free")
        for (use, owner), size in self._unbooked(one).items():
            self.ledger.book(use, owner, size)
            if use != "weights":
                self._staying.setdefault(one.group, {})[use, owner] = size
        one.pages = self.pool.take(pages_of(one.image_bytes, self.page_bytes))
        self.ledger.book("weights", _image(slot), len(one.pages) * self.page_bytes)
        one.place = "coming" if one.image_bytes else "in"
        return one.pages

    def arrived(self, slot: int) -> None:
        """The engine has its weights in the pages."""
        one = self.slots.get(slot)
        if one is not None and one.place == "coming":
            one.place = "in"

    def evict(self, slot: int) -> None:
        """Its pages are free. Raises ValueError for a model that is not on the device, or cannot leave it."""
        one = self.slots[slot]
        if one.place == "out" or not one.image_bytes:
            raise ValueError(f"slot {slot} has no pages to give")
        self._take_off(one)

    def giving_way(self, wanted: int, among: Iterable[int], at_ms: float) -> tuple[int, ...] | None:
        """Who of `among` leaves so that `wanted` bytes become free: as few as possible, of the least worth."""
        slots = [self.slots[slot] for slot in among]
        candidates = [one.candidate(at_ms, self.page_bytes) for one in slots if one.place == "in" and one.image_bytes]
        return giving_way(candidates, wanted)

    # ------------------------------------------------------------ tiers below

    @property
    def host_used(self) -> int:
        """Images in host memory, and those on the way there or away."""
        return sum(one.image_bytes for one in self.slots.values() if one.below == "host" or one.moving == "host")

    def moves(self, at_ms: float) -> list[Move]:
        """What should change tier now: images above the host's memory go to the disk, and one likely model at a time
        comes from there (prefetch). Each move is noted as begun.
        """
        leaving = sum(one.image_bytes for one in self.slots.values() if one.moving == "disk")
        over = self.host_used - leaving - self.host_bytes
        found = [Move(slot, "disk") for slot in giving_way(self._demotable(at_ms), over) or ()]
        if over <= 0 and not any(one.moving for one in self.slots.values()):
            found += self._prefetch(at_ms)
        for move in found:
            self.slots[move.slot].moving = move.to
        return found

    def moved(self, slot: int, to: Below) -> None:
        """The engine has moved its image."""
        one = self.slots.get(slot)
        if one is not None:
            one.below = to
            one.moving = None

    def not_moved(self, slot: int, at_ms: float) -> None:
        """The engine could not move its image: it is left where it is for a while."""
        one = self.slots.get(slot)
        if one is not None:
            one.moving = None
            one.stays_until_ms = at_ms + MOVE_AGAIN_MS

    def _demotable(self, at_ms: float) -> list[Candidate]:
        return [
            Candidate(one.slot, one.image_bytes, one.likelihood.at(at_ms) * (RESIDENT_WORTH if one.pages else 1.0))
            for one in self.slots.values()
            if one.image_bytes
            and one.below == "host"
            and one.moving is None
            and one.place != "coming"
            and one.stays_until_ms <= at_ms
        ]

    def _prefetch(self, at_ms: float) -> list[Move]:
        waiting = [
            one
            for one in self.slots.values()
            if one.below == "disk" and one.place == "out" and one.image_bytes and one.stays_until_ms <= at_ms
        ]
        if not waiting:
            return []
        best = max(waiting, key=lambda one: (one.likelihood.at(at_ms), -one.slot))
        if best.image_bytes > self.host_bytes:
            return []
        over = self.host_used + best.image_bytes - self.host_bytes
        demoted = giving_way(self._demotable(at_ms), over)
        if demoted is None:
            return []
        lost = sum(one.worth for one in self._demotable(at_ms) if one.slot in demoted)
        if demoted and best.likelihood.at(at_ms) <= BETTER * lost:
            return []
        return [*(Move(slot, "disk") for slot in demoted), Move(best.slot, "host")]

    # ------------------------------------------------------------ inside

    def _take_off(self, one: Slot) -> None:
        self.ledger.give_back("weights", _image(one.slot))
        self.pool.give(one.pages)
        one.pages = ()
        one.place = "out"

    def _paged(self, size: int) -> int:
        return pages_of(size, self.page_bytes) * self.page_bytes

    def _unbooked(self, one: Slot) -> dict[tuple[Use, str], int]:
        return {key: size for key, size in self._reserved(one).items() if not self.ledger.booked(*key)}

    def _reserved(self, one: Slot) -> dict[tuple[Use, str], int]:
        """{(use, owner): bytes} of what never leaves once the model has been on the device."""
        found: dict[tuple[Use, str], int] = {}
        for name, size in sorted(one.kv.items()):
            found["kv", f"{one.group} {name}"] = size
        found["workspace", one.group] = self.workspace_bytes
        if one.fixed_bytes:
            found["weights", _fixed(one.slot)] = one.fixed_bytes
        return found

    def _never_leaves(self, slots: Iterable[Slot]) -> int:
        together = {key: size for booked in self._staying.values() for key, size in booked.items()}
        for one in slots:
            together |= self._reserved(one)
        return sum(together.values())


def _image(slot: int) -> str:
    return f"image {slot}"


def _fixed(slot: int) -> str:
    return f"fixed {slot}"
