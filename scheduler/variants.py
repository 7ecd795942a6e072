"""Variants of a model in the fold: each but the stable one is a unit with topic, replicas and partitions of its own.

A unit is a ModelState under a name that no declaration can have (`ids.variant_unit`), so placement, retries, the
handover of partitions and working off to the end are the same code as for a model. It has no route of its own: its
share is in the route of its model.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from scheduler.declarations import new_generation, new_model, want_topic
from scheduler.launches import Accepted
from scheduler.limits import DELETE_LINGER_MS
from scheduler.partitions import worked_off
from scheduler.rollout import FULL, RolloutState
from scheduler.state import ClusterState, IngressState, ModelState, RouteWait
from scheduler.step import Step
from sie_stream.control import TRIAL, RoutesHeld, VariantRow
from sie_stream.ids import base_of, variant_unit
from sie_stream.rollout_records import STABLE, VariantRule
from sie_stream.routing import Range, rest_of

INGRESS_GONE_MS = 15_000
"""An ingress that said nothing for so long is gone: it speaks every five seconds, and what it would still write is
fenced by its group."""
INGRESSES_MAX = 1_000
NAME_CHARS_MAX = 256
"""What others write to the log must not grow the state without end."""
ROUTE_CONFIRM_MS = 10_000
"""A route that is not held everywhere after this long is told about, with the names of those that do not hold it."""


def is_unit(model: ModelState) -> bool:
    return base_of(model.model) != model.model


def unit_of(state: ClusterState, model: str, variant: str) -> ModelState | None:
    return state.models.get(variant_unit(model, variant))


def units_of(state: ClusterState, model: str) -> list[ModelState]:
    start = f"{model}."  # asked after every record: most names are sorted out by this alone
    return [unit for name, unit in state.models.items() if name.startswith(start) and base_of(name) == model]


# ---------------------------------------------------------------- the route


def route_variants(state: ClusterState, model: ModelState) -> tuple[tuple[VariantRow, ...], tuple[VariantRule, ...]]:
    """Variants and content rules of the route of a model, the stable one first."""
    rows: list[VariantRow] = []
    rules: list[VariantRule] = []
    for rollout in model.rollouts.values():
        unit = unit_of(state, model.model, rollout.variant)
        if unit is None or not unit.partitions or not (rollout.share or rollout.shadow) or _is_adopted(model, rollout):
            continue
        rows.append(
            VariantRow(
                rollout.variant,
                rollout.version,
                0 if rollout.bypassed else rollout.share,
                () if rollout.bypassed else rollout.ranges,
                unit.route.topic,
                len(unit.partitions) // unit.route.lanes,
                rollout.shadow,
            )
        )
        if rollout.share:
            rules.extend(rule for rule in rollout.plan.rules if not rollout.bypassed or rule.variant == STABLE)
    if not rows:
        return model.route.variants, ()
    ranges = rest_of([one for row in rows for one in row.ranges])
    stable = model.published_route.variants[0].version if model.published_route is not None else model.version
    weight = sum(end - first for first, end in ranges)
    return (VariantRow(STABLE, stable, weight, ranges), *rows), tuple(rules)


def _is_adopted(model: ModelState, rollout: RolloutState) -> bool:
    """The model itself serves the version of the rollout."""
    return rollout.phase == "adopting" and serves_alone(model, rollout.version)


def serves_alone(model: ModelState, version: str) -> bool:
    """Its present generation runs this version, is ready, and holds every partition.

    Before that keys that came back would wait in the model's own topic for the older generation to release it.
    """
    ready = {replica.key for replica in model.present() if replica.state == "ready"}
    held = all(one.state == "assigned" and one.owner in ready for one in model.partitions)
    return model.version == version and bool(ready) and held


def ranges_of(model: ModelState, without: str = "") -> list[Range]:
    """Buckets of the variants beside the stable one."""
    return [one for rollout in model.rollouts.values() if rollout.variant != without for one in rollout.ranges]


def shares_in_words(variants: Sequence[VariantRow]) -> str:
    if len(variants) == 1:
        return f"Version {variants[0].version} is in charge."
    shares = ", ".join(
        f"{row.variant} ({row.version}) {row.weight * 100 / FULL:g} %{' and copies' if row.shadow else ''}"
        for row in variants
    )
    return f"Shares of the keys: {shares}."


def why_not(model: ModelState, rollout: RolloutState, order: str) -> str:
    """Why an order about a rollout cannot be carried out."""
    others = ", ".join(name for name in model.rollouts if name != rollout.variant)
    if order == "promote" and others:
        return f"{rollout.version} is to get all keys, and others have a part of them: abort {others} first."
    if order == "pause" and rollout.paused:
        return (
            f"The rollout of {rollout.version} is paused already, by {rollout.paused}; `sie-stream rollout resume "
            f"{model.model}{_option(rollout)}` lets it go on."
        )
    if order == "resume" and not rollout.paused:
        return f"The rollout of {rollout.version} is not paused: it is {rollout.phase}."
    if order == "promote" and rollout.bypassed:
        return f"{rollout.version} lost its replicas: its keys go to {rollout.version_before} until it has them again."
    if order == "promote" and rollout.phase == "loading":
        return (
            f"No replica of {rollout.version} is ready yet, so no key can go to it. `sie-stream rollout status "
            f"{model.model}` shows when one is."
        )
    state = f"{rollout.phase}{', paused' if rollout.paused else ''}"
    return f"It cannot be done now: the rollout of {rollout.version} is {state}."


def _option(rollout: RolloutState) -> str:
    """What names its variant to a command; the usual one needs no name."""
    return "" if rollout.variant == "canary" else f" --variant {rollout.variant}"


# ---------------------------------------------------------------- units


def start_unit(step: Step, model: ModelState, variant: str, accepted: Accepted, wanted: int) -> ModelState:
    """Replicas and a topic for one more version, beside what serves now."""
    name = variant_unit(model.model, variant)
    own = _for_unit(step, accepted, name, wanted)
    unit = step.state.models.get(name)
    if unit is None:
        unit = new_model(step, own)
    else:
        new_generation(step, unit, own)
    unit.cramped_until_ms = model.cramped_until_ms  # it gets a part of the same keys: as much for each replica
    _applied(step, unit)
    return unit


def _for_unit(step: Step, accepted: Accepted, name: str, wanted: int) -> Accepted:
    domain = TRIAL if accepted.launch.backend in step.settings.trial_backends else ""
    return structs.replace(
        accepted,
        model=name,
        launch=structs.replace(accepted.launch, model=name, domain=domain),
        route=structs.replace(accepted.route, topic=step.settings.topics.work(name), input_topic=""),
        replicas_wanted=wanted,
        width=max(wanted, accepted.width),
        scaling=None,
    )


def _applied(step: Step, model: ModelState) -> None:
    model.timings_ms = {"applied": step.now_ms}
    model.applied_offset = step.offset
    model.applied_ms = step.now_ms
    model.message = ""
    want_topic(step, model)
    step.touch("models", model.model)
    step.touch("instances", model.model)
    step.look_at(model)


def take_over(step: Step, model: ModelState, accepted: Accepted) -> None:
    """The model itself gets this version as its present generation."""
    new_generation(step, model, accepted)
    _applied(step, model)


def end_unit(step: Step, unit: ModelState, had_traffic: bool) -> None:
    """Work off what is in its topic, as for a deleted model; what never had traffic has nothing in it."""
    if unit.status == "deleting":
        return
    unit.status = "deleting"
    unit.owes = had_traffic
    unit.delete_at_ms = step.now_ms + DELETE_LINGER_MS
    unit.message = "its rollout ended; works off what is in its topic"
    if not had_traffic:
        for partition in unit.partitions:
            if partition.state == "free":
                worked_off(partition)
    step.touch("placements", unit.model)
    step.look_at(unit)


def rescue_unit(step: Step, unit: ModelState, stable: Accepted) -> None:
    """Its own version cannot work its topic off, so the stable one does: no request stays without an answer."""
    at_ms, status = unit.delete_at_ms, unit.status
    # On the topic as it is: nobody would widen it, and with fewer partitions than wanted nothing would be placed.
    new_generation(step, unit, structs.replace(_for_unit(step, stable, unit.model, 1), width=unit.width))
    unit.delete_at_ms, unit.status = at_ms, status
    step.touch("placements", unit.model)
    step.look_at(unit)


# ---------------------------------------------------------------- who holds the route


def wait_for_ingress(step: Step, model: ModelState) -> None:
    """A changed route is being published at this offset."""
    model.route_wait = RouteWait(step.offset, step.now_ms) if step.state.ingresses else None


def routes_held(step: Step, record: RoutesHeld) -> None:
    if record.left:
        step.state.ingresses.pop(record.ingress, None)
    else:
        if record.ingress not in step.state.ingresses and (
            len(step.state.ingresses) >= INGRESSES_MAX or len(record.ingress) > NAME_CHARS_MAX
        ):
            step.ignore()
            return
        known = step.state.ingresses.setdefault(record.ingress, IngressState(step.now_ms))
        known.heard_ms = step.now_ms
        for model, epoch in record.epochs.items():
            if epoch and model in step.state.models:
                known.epochs[model] = epoch
            else:
                known.epochs.pop(model, None)
    check_routes(step)


def check_routes(step: Step) -> None:
    """Say from which moment on a route holds everywhere, or who does not hold it yet."""
    state = step.state
    for name in [name for name, one in state.ingresses.items() if step.now_ms - one.heard_ms > INGRESS_GONE_MS]:
        del state.ingresses[name]
    for model in state.models.values():
        if model.route_wait is not None:
            _check_route(step, model, model.route_wait)


def _check_route(step: Step, model: ModelState, wait: RouteWait) -> None:
    ingresses = step.state.ingresses
    missing = [name for name, one in ingresses.items() if one.epochs.get(model.model, 0) < wait.epoch]
    took_ms = step.now_ms - wait.since_ms
    chosen: dict[str, str | int] = {"route_epoch": wait.epoch, "took_ms": took_ms}
    if not missing:
        model.route_wait = None
        step.decide(
            "route_held",
            model.model,
            f"Every ingress ({', '.join(ingresses) or 'none is left'}) routes by epoch {wait.epoch} or a later one "
            f"from now on; nothing is written by an older one any more.",
            chosen=chosen,
            facts=(step.fact(wait.epoch, "cause of the route"),),
        )
    elif took_ms > ROUTE_CONFIRM_MS and not wait.told:
        model.route_wait = RouteWait(wait.epoch, wait.since_ms, told=True)
        step.decide(
            "route_not_held",
            model.model,
            f"After {took_ms} ms {', '.join(missing)} still routes by an older epoch, or does not say.",
            chosen={**chosen, "missing": ", ".join(missing)},
            do_nothing="Nothing is done: it either takes the route, or is fenced by its group.",
        )
