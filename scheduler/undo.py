"""Undo: put the replicas that a decision moved back where they were before it, as a new decision.

`plan_undo(state, decision)` is a pure function: what to place and what to let go, or why not. It restores places, never
versions, counts or deletions: those are declared, and come back by another declaration. All or nothing: a decision that
moved several models is undone for all of them or refused.

What was before a decision is in the journal of each model it moved (`ModelState.journal`, the newest JOURNAL_MAX
changes), so that the fold needs no other topic. New before old, as in every move: the restored replica has to fit
beside what is there, and the one that goes serves until it is ready.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct, structs

from scheduler.actors import named_first
from scheduler.counts import replicas_in_words, wanted_in_words
from scheduler.evidence import came, memory_changes, seat
from scheduler.offers import device_offers, wish_of
from scheduler.placement import DeviceOffer, refusal
from scheduler.precision import precision_on
from scheduler.seats import DeviceKey, Seat, devices_of, several, shown
from scheduler.state import JOURNAL_MAX, ClusterState, ModelState, PlacementChange, ReplicaState
from scheduler.step import Step
from sie_stream.control import UndoDecision
from sie_stream.decisions import Move, place_of


class ModelUndo(Struct, frozen=True):
    """What to do for one model."""

    model: str
    place: tuple[tuple[DeviceOffer, ...], ...]
    """By replica of the present version to be placed: its devices, with their memory before it."""
    leave: tuple[int, ...]
    """Indices into the model's replicas: they go once the others serve."""


class UndoPlan(Struct, frozen=True):
    """Either `models` or `refused` is empty."""

    models: tuple[ModelUndo, ...] = ()
    refused: tuple[str, ...] = ()
    """Why not, one sentence each."""


def plan_undo(state: ClusterState, decision: str) -> UndoPlan:
    """What restores the placement before `decision`. Changes nothing."""
    place = place_of(decision)
    if place is None:
        return UndoPlan(refused=(f"{decision!r} is no id of a decision: allowed is d-OFFSET-N, e.g. d-120-0.",))
    changes = [(model, change) for model in state.models.values() if (change := _change(model, decision)) is not None]
    if not changes:
        return UndoPlan(refused=(_unknown(state, decision, place[0]),))
    refused = [why for model, change in changes if (why := _not_now(model, change))]
    if refused:
        return UndoPlan(refused=tuple(refused))
    offers = {(offer.worker, offer.device): offer for offer in device_offers(state)}
    undone: list[ModelUndo] = []
    for model, change in changes:
        found, why_not = _plan_model(model, change, offers)
        refused += why_not
        if found is not None:
            undone.append(found)
    if refused:
        return UndoPlan(refused=tuple(refused))
    if not undone:
        return UndoPlan(refused=("Every replica it moved is where it was before; there is nothing to undo.",))
    return UndoPlan(models=tuple(undone))


def undo_decision(step: Step, record: UndoDecision) -> None:
    """Carry the plan out, or say why not. Either way a decision that names the undone one."""
    plan = plan_undo(step.state, record.decision)
    if plan.refused:
        step.decide(
            "undo_refused",
            record.decision,
            f"{record.decision} is not undone: {' '.join(plan.refused)}",
            chosen={"actor": record.actor},
            rejected=plan.refused,
            do_nothing="The placement stays as it is.",
            undoes=record.decision,
        )
        return
    undo = step.next_decision
    moves: list[Move] = []
    placed: list[ReplicaState] = []
    for item in plan.models:
        model = step.state.models[item.model]
        step.remember(model)
        model.lost_workers = ()
        left = _let_go(model, item, undo)
        for devices in item.place:
            replica = _place(step, model, devices)
            placed.append(replica)
            moves.append(came(model.model, replica, seat(left.pop(0)) if left else ""))
        step.touch("placements", model.model)
        step.touch("instances", model.model)
        step.look_at(model)
    step.decide(
        "placement_restored",
        ", ".join(item.model for item in plan.models),
        f"{named_first(record.actor)} takes back {record.decision}: the replicas it moved go back to where "
        f"they were. Those there now serve until the restored ones are ready.",
        chosen={"actor": record.actor, "undone": record.decision, "replicas": len(placed)},
        do_nothing="The placement would stay as it is.",
        moves=tuple(moves),
        memory=memory_changes(step.state, added=placed),
        undoes=record.decision,
    )


def _change(model: ModelState, decision: str) -> PlacementChange | None:
    return next((change for change in model.journal if change.decision == decision), None)


def _unknown(state: ClusterState, decision: str, offset: int) -> str:
    if offset >= state.next_offset:
        return f"No decision {decision} has been made: sie.cluster ends before offset {offset}."
    return (
        f"No model that is declared now was moved by {decision}, or it was not among the newest {JOURNAL_MAX} changes "
        f"of a model's placement. What is undone is where replicas are; a declaration is taken back by another one. "
        f"`sie-stream decisions` shows the ids."
    )


def _not_now(model: ModelState, change: PlacementChange) -> str:
    """Why this model cannot go back whatever room there is; empty when it can."""
    name = model.model
    if model.status == "deleting":
        return f"{name} is being deleted."
    if any(replica.generation != model.generation for replica in model.replicas):
        return f"{name} is changing to version {model.version}; try again when the older replicas are gone."
    if any(replica.leaving or replica.state == "draining" for replica in model.replicas):
        return f"A replica of {name} is moving already; try again when that is over."
    if len(change.before) != model.replicas_wanted:
        return f"{name} had {replicas_in_words(len(change.before))} before it and {_instead(model)}"
    return ""


def _instead(model: ModelState) -> str:
    """How many are wanted now, who decided that, and what helps."""
    wanted = f"{wanted_in_words(model.replicas_wanted)} now"
    would = "so the scheduler would change that at once."
    if model.scaling is None:
        return f"{wanted}, {would} Change the declaration instead."
    least, most = model.scaling.floor, model.scaling.replicas_max
    return f"{wanted} ({least} to {most}, by its load), {would} Try again when its load is what it was."


def _plan_model(
    model: ModelState, change: PlacementChange, offers: dict[DeviceKey, DeviceOffer]
) -> tuple[ModelUndo | None, list[str]]:
    """What to do for one model, None when it is where it was, and what stands against it. Takes memory off `offers`."""
    present = model.present()
    missing = Counter(change.before)
    staying: list[ReplicaState] = []
    leaving: list[ReplicaState] = []
    for replica in present:
        if missing[replica.seat] > 0:
            missing[replica.seat] -= 1
            staying.append(replica)
        else:
            leaving.append(replica)
    if not leaving and not any(missing.values()):
        return None, []
    hosts = [replica.worker for replica in staying]
    chosen: list[tuple[DeviceOffer, ...]] = []
    why_not: list[str] = []
    for place in [place for place in change.before if missing[place] > 0]:
        found = tuple(offers[device] for device in devices_of(place) if device in offers)
        why = _no_room(model, hosts, place, found)
        if why:
            why_not.append(f"{model.model} was on {why}")
            continue
        chosen.append(found)
        hosts.append(place[0])
        for device, offer in zip(devices_of(place), found, strict=True):
            offers[device] = structs.replace(offer, reserved_bytes=offer.reserved_bytes + model.launch.memory_bytes)
    indices = tuple(number for number, replica in enumerate(model.replicas) if replica in leaving)
    return ModelUndo(model.model, tuple(chosen), indices), why_not


def _no_room(model: ModelState, hosts: list[str], place: Seat, offers: tuple[DeviceOffer, ...]) -> str:
    count = len(place) - 1
    if count != model.launch.tensor_parallel:
        return f"{shown(place)}: it spans {model.launch.tensor_parallel} devices now."
    if len(offers) < count:
        return f"{shown(place)}: no live worker offers that device to replicas now."
    return refusal(wish_of(model), hosts, offers) or ""


def _let_go(model: ModelState, item: ModelUndo, undo: str) -> list[ReplicaState]:
    left = [model.replicas[number] for number in item.leave]
    for replica in left:
        replica.leaving = True
        replica.leaving_for = undo
    return left


def _place(step: Step, model: ModelState, devices: tuple[DeviceOffer, ...]) -> ReplicaState:
    replica = ReplicaState(
        worker=devices[0].worker,
        incarnation=devices[0].incarnation,
        device=devices[0].device,
        generation=model.generation,
        placement_epoch=step.offset,
        memory_bytes=model.launch.memory_bytes,
        placed_ms=step.now_ms,
        devices=several(tuple(offer.device for offer in devices)),
        precision=precision_on(model.rules.precisions, devices[0].kind, devices[0].product),
    )
    model.replicas.append(replica)
    return replica
