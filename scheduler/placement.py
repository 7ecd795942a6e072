"""Where replicas go: one pure function, `place(problem) -> plan`.

First form: first fit over declared device memory. The first replica of any model comes before the second of another,
then wishes are taken in order of priority and name; the devices of each are tried from the least to the most loaded, so
that the models of a fleet spread over it. The solver of a later issue replaces the body of `place` and keeps its
signature.

A replica needs a device of a live worker that offers the model's backend, has the memory free, and does not hold
another replica of the same version. (Partitions name workers: a second replica on the same worker would add nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs


class DeviceOffer(Struct, frozen=True):
    """A device of a live worker, and what is already promised on it."""

    worker: str
    incarnation: str
    device: str
    kind: str
    memory_bytes: int
    reserved_bytes: int
    replicas: int
    backends: tuple[str, ...]

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes


class ReplicaWish(Struct, frozen=True):
    """One replica that should exist and does not."""

    model: str
    generation: int
    priority: int
    backend: str
    memory_bytes: int
    hosts: tuple[str, ...] = ()
    """Workers that hold a replica of this version already."""
    failed_on: tuple[tuple[str, str], ...] = ()
    """(worker, device) on which it failed: tried only when nothing else is left."""
    prefer: tuple[str, ...] = ()
    """Workers that held it before and came back."""
    listed: int = 0
    """Replicas of the model, of any version, that exist already."""


class PlacementProblem(Struct, frozen=True):
    devices: tuple[DeviceOffer, ...]
    wishes: tuple[ReplicaWish, ...]


class Chosen(Struct, frozen=True):
    wish: ReplicaWish
    worker: str
    incarnation: str
    device: str
    free_bytes_before: int
    rejected: tuple[str, ...]
    """Devices that were not taken, and why: one sentence each."""


class Unplaceable(Struct, frozen=True):
    wish: ReplicaWish
    why_not: tuple[str, ...]
    """One sentence per device; one sentence in all when there are no devices."""


class PlacementPlan(Struct, frozen=True):
    chosen: tuple[Chosen, ...]
    unplaceable: tuple[Unplaceable, ...]


REASONS_MAX = 16
"""Sentences kept per decision; the rest is counted."""


def place(problem: PlacementProblem) -> PlacementPlan:
    """Place as many wishes as fit. Every wish is in exactly one list; no device is filled above its memory."""
    offers = list(problem.devices)
    placed_on: dict[tuple[str, int], tuple[str, ...]] = {}
    chosen: list[Chosen] = []
    unplaceable: list[Unplaceable] = []
    for wish in _in_order(problem.wishes):
        hosts = wish.hosts + placed_on.get((wish.model, wish.generation), ())
        order = sorted(range(len(offers)), key=lambda place: _rank(wish, offers[place]))
        taken = next((place for place in order if refusal(wish, hosts, offers[place]) is None), None)
        if taken is None:
            unplaceable.append(Unplaceable(wish, _why_not(wish, hosts, [offers[place] for place in order])))
            continue
        offer = offers[taken]
        passed_over = [offers[place] for place in order if place != taken]
        chosen.append(
            Chosen(
                wish, offer.worker, offer.incarnation, offer.device, offer.free_bytes, _others(wish, hosts, passed_over)
            )
        )
        placed_on[wish.model, wish.generation] = (*placed_on.get((wish.model, wish.generation), ()), offer.worker)
        offers[taken] = structs.replace(
            offer, reserved_bytes=offer.reserved_bytes + wish.memory_bytes, replicas=offer.replicas + 1
        )
    return PlacementPlan(tuple(chosen), tuple(unplaceable))


def _in_order(wishes: Sequence[ReplicaWish]) -> list[ReplicaWish]:
    """Fewest replicas first, or one model's second replica could keep another from having any."""
    earlier: dict[str, int] = {}
    keyed: list[tuple[int, int, str, int]] = []
    for number, wish in enumerate(wishes):
        count = earlier.get(wish.model, 0)
        earlier[wish.model] = count + 1
        keyed.append((wish.listed + count, wish.priority, wish.model, number))
    return [wishes[number] for *_, number in sorted(keyed)]


def _rank(wish: ReplicaWish, offer: DeviceOffer) -> tuple[bool, bool, int, int, str, str]:
    """Sort key of the devices to try: not failed there, preferred worker, fewest replicas, most free memory, name."""
    return (
        (offer.worker, offer.device) in wish.failed_on,
        offer.worker not in wish.prefer,
        offer.replicas,
        -offer.free_bytes,
        offer.worker,
        offer.device,
    )


def refusal(wish: ReplicaWish, hosts: Sequence[str], offer: DeviceOffer) -> str | None:
    """Why this device cannot hold the wish, as a sentence; None when it can."""
    name = f"{offer.worker}/{offer.device}"
    if wish.backend not in offer.backends:
        return f"{name}: backend {wish.backend!r} is not offered ({', '.join(offer.backends) or 'none'})."
    if offer.worker in hosts:
        return f"{name}: worker {offer.worker} already holds a replica of this version."
    if wish.memory_bytes > offer.memory_bytes:
        return f"{name}: needs {wish.memory_bytes} bytes, the whole device has {offer.memory_bytes}."
    if wish.memory_bytes > offer.free_bytes:
        return f"{name}: needs {wish.memory_bytes} bytes, {offer.free_bytes} of {offer.memory_bytes} are free."
    return None


def _why_not(wish: ReplicaWish, hosts: Sequence[str], offers: Sequence[DeviceOffer]) -> tuple[str, ...]:
    if not offers:
        return ("no live worker offers a device.",)
    return _sentences([refusal(wish, hosts, offer) or "" for offer in offers[:REASONS_MAX]], len(offers))


def _others(wish: ReplicaWish, hosts: Sequence[str], offers: Sequence[DeviceOffer]) -> tuple[str, ...]:
    """Why not the others: unfit, or fit and further down the order."""
    sentences = [refusal(wish, hosts, offer) or _further_down(wish, offer) for offer in offers[:REASONS_MAX]]
    return _sentences(sentences, len(offers))


def _further_down(wish: ReplicaWish, offer: DeviceOffer) -> str:
    name = f"{offer.worker}/{offer.device}"
    if (offer.worker, offer.device) in wish.failed_on:
        return f"{name}: fits, but the replica failed there before."
    return f"{name}: fits, but comes later in the order ({offer.replicas} replicas, {offer.free_bytes} bytes free)."


def _sentences(sentences: Sequence[str], devices: int) -> tuple[str, ...]:
    if devices == len(sentences):
        return tuple(sentences)
    return (*sentences, f"... and {devices - len(sentences)} more devices.")
