"""Yielding in the fold: which models have less than they ask for, or move to cheaper devices, while a pool is full.

What gives way, and when it gets back, is decided by `yielding.relieve`. Here the state becomes its pools and models,
and its steps become caps on replicas and places where a model may be.

A pool is what the worker label `pool` names, else all devices of one kind. Its capacity is memory, and what is used of
it is what replicas that are to stay have reserved: those that leave are as good as gone. The worker label `cost` (a
whole number per device and hour) says which pool is cheaper. Models move only between pools that have a label: that is
how placement is told where they may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import structs

from scheduler.offers import device_offers, wish_of
from scheduler.placement import DeviceOffer, ReplicaWish, refusal
from scheduler.rules import POOL_LABEL
from scheduler.seats import devices_of
from scheduler.sleep import want_replicas
from scheduler.state import ClusterState, ModelState
from scheduler.step import Step
from scheduler.yielding import Pool, Relief, Tenant, relieve
from scheduler.yielding import Step as YieldStep
from sie_stream.spec.model import Tag

COST_LABEL = "cost"
COSTS = {"cuda": 1_000, "mig": 250, "cpu": 100}
"""Where no label says it. Only the order counts."""
COST_OTHER = 500
COST_DIGITS_MAX = 9
PROTECTED, CHEAP_IS_FINE = "high-sla", "cost-sensitive"
YIELDING = (CHEAP_IS_FINE, "batch-job")

TAGS: tuple[Tag, ...] = ("high-sla", "cost-sensitive", "batch-job")
"""Those that matter here."""

Offers = dict[tuple[str, str], DeviceOffer]
"""{(worker, device): what it offers}, of workers in service."""
Free = dict[tuple[str, str], int]
"""{(worker, device): bytes that nobody who stays has reserved}."""


def lacks_guarantee(model: ModelState) -> bool:
    """A high-sla model asks for replicas for which there is no room."""
    return bool(model.unplaced) and PROTECTED in model.rules.tags and model.status == "accepted"


def give_way(step: Step) -> None:
    """Part of a tick: every few seconds, and at once while a high-sla model lacks replicas."""
    state = step.state
    accepted = [model for model in state.models.values() if model.status == "accepted"]
    yielded = state.yielded.caps or state.yielded.moved or any(model.pool for model in accepted)
    if not yielded and not any(tag in model.rules.tags for model in accepted for tag in YIELDING):
        return
    for model in accepted:
        if model.pool:
            _keep_home(step, model)
    offers = {(offer.worker, offer.device): offer for offer in device_offers(state) if offer.service == "in service"}
    free = _free(state, offers)
    labelled = {name: offer for offer in offers.values() if (name := offer.labels.get(POOL_LABEL))}
    tenants = tuple(_tenant(model, offers, free, labelled) for model in accepted)
    pools = _pools(offers, free, tenants)
    there = {pool.name for pool in pools}
    state.yielded, relief = relieve(
        state.yielded, step.now_ms, pools, [tenant for tenant in tenants if tenant.pool in there]
    )
    for one in relief.steps:
        _apply(step, one, pools)
    _say_unmet(step, relief)


def _say_unmet(step: Step, relief: Relief) -> None:
    """Once, until it is over."""
    if relief.unmet and not step.state.relief_unmet:
        step.decide(
            "relief_unmet",
            ", ".join(sentence.split(" ", 1)[0].rstrip(":") for sentence in relief.unmet),
            " ".join(relief.unmet),
            do_nothing="There is nothing else to do; more devices, or fewer replicas, would help.",
        )
    step.state.relief_unmet = bool(relief.unmet)


# ---------------------------------------------------------------- what there is


def _pool_of(offer: DeviceOffer) -> str:
    return offer.labels.get(POOL_LABEL) or offer.kind


def _cost(offer: DeviceOffer) -> int:
    label = offer.labels.get(COST_LABEL, "")
    if label.isascii() and label.isdigit() and len(label) <= COST_DIGITS_MAX:
        return int(label)
    return COSTS.get(offer.kind, COST_OTHER)


def _free(state: ClusterState, offers: Offers) -> Free:
    free = {at: offer.memory_bytes for at, offer in offers.items()}
    for model in state.models.values():
        for replica in model.replicas:
            for at in devices_of(replica.seat):
                if at in free and (model.stays(replica) or replica.generation != model.generation):
                    free[at] -= replica.memory_bytes
    return free


def _pools(offers: Offers, free: Free, tenants: Sequence[Tenant]) -> tuple[Pool, ...]:
    """By name. Where a high-sla model lacks replicas, memory in pieces too small for one of them is none."""
    piece: dict[str, int] = {}
    for tenant in tenants:
        if tenant.lacking:
            piece[tenant.pool] = max(piece.get(tenant.pool, 1), tenant.units)
    sums: dict[str, list[int]] = {}
    """Capacity, used, cost."""
    for at, offer in offers.items():
        name, cost = _pool_of(offer), _cost(offer)
        size = piece.get(name, 1)
        used = offer.memory_bytes - free[at]
        pool = sums.setdefault(name, [0, 0, cost])
        pool[0] += used + free[at] // size * size
        pool[1] += used
        pool[2] = max(pool[2], cost)
    return tuple(Pool(name, *sums[name]) for name in sorted(sums) if sums[name][0])


def _tenant(model: ModelState, offers: Offers, free: Free, labelled: dict[str, DeviceOffer]) -> Tenant:
    pool = _present_pool(model, offers, free)
    present, scaling = len(model.present()), model.scaling
    wanted = model.replicas_wanted
    if scaling is not None and model.scale_state is not None:
        wanted = min(model.needed, scaling.replicas_max)
    return Tenant(
        model=model.model,
        tags=tuple(tag for tag in TAGS if tag in model.rules.tags),
        pool=pool,
        replicas=present,
        replicas_min=model.replicas_wanted if scaling is None else scaling.replicas_min,
        units=model.launch.memory_bytes * model.launch.tensor_parallel,
        wanted=wanted,
        lacking=max(model.replicas_wanted - present, 0) if lacks_guarantee(model) else 0,
        cheaper=_cheaper(model, pool, offers, labelled),
    )


def _present_pool(model: ModelState, offers: Offers, free: Free) -> str:
    """Where most of its replicas are; without any: the pool it asks for, or the one with most memory free."""
    at: dict[str, int] = {}
    for replica in model.present():
        offer = offers.get((replica.worker, replica.device))
        if offer is not None:
            at[_pool_of(offer)] = at.get(_pool_of(offer), 0) + 1
    if not at:
        asked = model.rules.node_selector.get(POOL_LABEL)
        for place, offer in offers.items():
            pool = _pool_of(offer)
            if asked in (None, pool):
                at[pool] = at.get(pool, 0) + free[place]
    return max(at, key=lambda pool: (at[pool], pool), default="")


def _cheaper(model: ModelState, pool: str, offers: Offers, labelled: dict[str, DeviceOffer]) -> tuple[str, ...]:
    """Labelled pools with a device that it can run on, the cheapest first. Whether it is cheaper is `relieve`'s.

    `labelled`: a device of each pool that has a label.
    """
    tags, selector = model.rules.tags, model.rules.node_selector
    bound = POOL_LABEL in selector and not model.pool
    if CHEAP_IS_FINE not in tags or PROTECTED in tags or bound:
        return ()
    if pool not in labelled:
        return ()
    rest = {name: value for name, value in selector.items() if name != POOL_LABEL}
    wish = structs.replace(wish_of(model), rules=structs.replace(model.rules, node_selector=rest))
    others = sorted((name for name in labelled if name != pool), key=lambda name: (_cost(labelled[name]), name))
    return tuple(
        name for name in others if _takes(wish, [offer for offer in offers.values() if _pool_of(offer) == name])
    )


def _takes(wish: ReplicaWish, offers: Sequence[DeviceOffer]) -> bool:
    """Whether one worker has as many devices as it spans, each of which could hold its part."""
    fitting = Counter(offer.worker for offer in offers if refusal(wish, (), (offer,)) is None)
    return max(fitting.values(), default=0) >= wish.tensor_parallel


# ---------------------------------------------------------------- what follows


def _apply(step: Step, one: YieldStep, pools: Sequence[Pool]) -> None:
    model = step.state.models[one.model]
    used = {pool.name: f"{pool.utilisation_bp / 100:.0f} %" for pool in pools}
    step.decide(
        "model_yielded" if one.kind in ("give_up", "move") else "model_restored",
        one.model,
        one.reason,
        chosen={"step": one.kind, "pool": one.pool, "to_pool": one.to_pool, "replicas": one.replicas} | used,
        do_nothing="high-sla models would find no room when their load rises."
        if one.kind in ("give_up", "move")
        else "It would have less than it asks for although there is room.",
    )
    if one.kind == "give_up" and model.replicas_wanted > one.replicas:
        want_replicas(step, model, one.replicas)
        if model.scale_state is not None:
            model.scale_state = structs.replace(model.scale_state, wanted=one.replicas, changed_ms=step.now_ms)
    if one.kind in ("move", "return"):
        _go_to(step, model, one.to_pool)


def _go_to(step: Step, model: ModelState, pool: str) -> None:
    """New before old: its replicas elsewhere serve until those in the pool are ready."""
    model.pool = pool
    selector = {**model.rules.node_selector, POOL_LABEL: pool}
    model.rules = structs.replace(model.rules, node_selector=selector)
    for replica in model.present():
        if step.state.workers[replica.worker].labels.get(POOL_LABEL) != pool:
            replica.leaving = True
    step.touch("instances", model.model)
    step.look_at(model)


def _keep_home(step: Step, model: ModelState) -> None:
    """Keep a model where it moved to, whatever was declared or taken back since; let it go once it came home."""
    away = step.state.yielded.moved.get(model.model)
    strangers = [r for r in model.present() if step.state.workers[r.worker].labels.get(POOL_LABEL) != model.pool]
    if away is None and not strangers and len(model.present()) >= model.replicas_wanted:
        rest = {name: value for name, value in model.rules.node_selector.items() if name != POOL_LABEL}
        model.rules = structs.replace(model.rules, node_selector=rest)
        model.pool = ""
    elif strangers or model.rules.node_selector.get(POOL_LABEL) != model.pool:
        _go_to(step, model, model.pool)
