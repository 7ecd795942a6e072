"""Rollouts in the fold: what starts them, what people order, and what each record of the log makes of them.

The decisions about one rollout are in rollout.py and gates.py; here they meet the cluster.
"""

from __future__ import annotations

from msgspec import structs

from scheduler.actors import named
from scheduler.adapter_bases import declared, shown_base
from scheduler.counts import counted
from scheduler.declarations import apply_model, refuse_confusing_name, refuse_oversize
from scheduler.gates import is_sane
from scheduler.latency_gates import StableLatency
from scheduler.launches import Accepted, accept, claimed_name
from scheduler.life import has_served
from scheduler.rollout import (
    FULL,
    Plan,
    RolloutState,
    Said,
    advance,
    ended,
    paused,
    promoted,
    resumed,
)
from scheduler.rollout_back import ignored, undo
from scheduler.rollout_bypass import bypass
from scheduler.rollout_fleet import old_ready, seen_of
from scheduler.rollout_plan import compared, plan_of, shares_of, taking_over
from scheduler.rollout_rests import follow_unit, may_owe, rest_in_words
from scheduler.rollout_windows import add_window
from scheduler.state import ROLLOUTS_KEPT, ModelState
from scheduler.step import Step
from scheduler.variants import (
    end_unit,
    ranges_of,
    start_unit,
    take_over,
    unit_of,
    units_of,
    why_not,
)
from sie_stream.commands import RolloutOrder, StartRollout
from sie_stream.control import ApplyModel
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.input_schema.breaking import Break, schema_breaks
from sie_stream.rollout_records import STABLE, VariantStats, VariantWindow
from sie_stream.routing import resized
from sie_stream.spec import from_json

CANARY = "canary"
WINDOW_MS_MAX = 10 * 60_000
WINDOW_AHEAD_MS = 60_000
"""How far the clocks of results and of this log may differ."""
VARIANT_CHARS_MAX = 16


def apply_or_roll_out(step: Step, record: ApplyModel) -> None:
    """A new version of a serving model whose declaration says `rollout` starts one; everything else is applied."""
    try:
        accepted = accept(bytes(record.spec), step.settings.topics, declared(step.state))
    except ConfigError:
        apply_model(step, record)  # says what is wrong with it
        return
    model = step.state.models.get(accepted.model)
    if model is None or model.status == "deleting":
        apply_model(step, record)
    elif model.rollouts:
        _under_way(step, model, accepted, record.actor)
    elif _wants_rollout(step, model, accepted):
        spec = from_json(accepted.spec)
        _start(step, model, accepted, plan_of(spec, CANARY), CANARY, record.actor)
    else:
        apply_model(step, record)


def _wants_rollout(step: Step, model: ModelState, accepted: Accepted) -> bool:
    """Nothing serves yet, or only the declaration of the same version changes: there is nothing to compare with."""
    return (
        has_served(model) and model.version != accepted.launch.version and from_json(accepted.spec).rollout is not None
    )


def _under_way(step: Step, model: ModelState, accepted: Accepted, actor: str) -> None:
    same = [one for one in model.rollouts.values() if bytes(one.spec) == bytes(accepted.spec)]
    if same or bytes(model.spec) == bytes(accepted.spec):
        what = f"the rollout of {same[0].version} goes on" if same else "its rollouts go on"
        step.decide(
            "model_unchanged",
            model.model,
            f"Nothing new is declared; {what}. `sie-stream rollout status {model.model}` shows it.",
            chosen={
                "version": accepted.launch.version,
                "generation": model.generation,
                "actor": actor,
                "rollout": same[0].rollout if same else "",
            },
        )
        return
    names = ", ".join(f"{one.version} ({one.variant}, {one.phase})" for one in model.rollouts.values())
    _reject(
        step,
        model.model,
        "rollout_under_way",
        f"A rollout is under way: {names}. Promote or abort it first.",
        actor,
        (),
    )


def _reject(step: Step, model: str, code: str, reason: str, actor: str, breaks: tuple[Break, ...]) -> None:
    step.decide(
        "model_rejected",
        model,
        reason,
        chosen={"code": code, "actor": actor},
        rejected=tuple(str(one) for one in breaks),
        do_nothing="The declaration is ignored; whatever was accepted before goes on.",
    )


def start_rollout(step: Step, record: StartRollout) -> None:
    """`rollout start`: by the declared steps, or the default ones; or one more variant with a fixed share."""
    try:
        accepted = accept(bytes(record.spec), step.settings.topics, declared(step.state))
    except ConfigError as error:
        _reject(step, claimed_name(bytes(record.spec)) or "unnamed", error.code, str(error), record.actor, ())
        return
    name, variant = accepted.model, record.variant
    model = step.state.models.get(name)
    why = ""
    if model is None or model.status == "deleting" or model.published_route is None:
        why = f"No model of that name serves.{did_you_mean(name, step.state.models)} Apply it."
    elif not (variant.isascii() and variant.isalnum() and variant.islower() and len(variant) <= VARIANT_CHARS_MAX):
        why = f"variant {variant!r}: at most {VARIANT_CHARS_MAX} lower-case letters and digits, e.g. canary or b."
    elif variant == STABLE or variant in model.rollouts:
        why = f"There is a variant {variant!r} already."
    elif accepted.launch.version in [model.version, *(one.version for one in model.rollouts.values())]:
        why = f"Version {accepted.launch.version} serves already; a rollout needs another one."
    elif any(one.plan.promotes for one in model.rollouts.values()) or (model.rollouts and not record.share):
        why = "A version that takes over by steps is to get all keys, so it goes alone. End the other variants first."
    elif not 0 <= record.share <= (left := FULL - sum(max(r.share, r.plan.steps[-1]) for r in model.rollouts.values())):
        why = f"--share {record.share * 100 / FULL:g}: at most {left * 100 / FULL:g} % of the keys are left to give."
    if why or model is None:
        _reject(step, name, "rollout_refused", why, record.actor, ())
        return
    spec = from_json(accepted.spec)
    plan = plan_of(spec, variant)
    if record.share:
        plan = compared(plan, spec, record.share)
    _start(step, model, accepted, plan, variant, record.actor)


def _start(step: Step, model: ModelState, accepted: Accepted, plan: Plan, variant: str, actor: str) -> None:
    breaks = (
        *schema_breaks(bytes(model.launch.input_schema), bytes(accepted.launch.input_schema), "input"),
        *schema_breaks(bytes(model.launch.output_schema), bytes(accepted.launch.output_schema), "output"),
    )
    version = accepted.launch.version
    if breaks:
        found, things = "; ".join(str(one) for one in breaks), counted(len(breaks), "thing", "things")
        reason = f"schema_incompatible: {version} breaks {things} that {model.version} promises: {found}."
        _reject(step, model.model, "schema_incompatible", reason, actor, breaks)
        return
    try:
        refuse_confusing_name(step, accepted.model)
        refuse_oversize(step, accepted)
    except ConfigError as error:
        _reject(step, model.model, error.code, str(error), actor, ())
        return
    rollout = RolloutState(
        rollout=f"r-{step.offset}",
        variant=variant,
        version=version,
        version_before=model.version,
        spec=accepted.spec,
        spec_before=model.spec,
        plan=plan,
        started_ms=step.now_ms,
        actor=actor,
        since_ms=step.now_ms,
    )
    model.rollouts[variant] = rollout
    step.state.rolling[model.model] = None
    start_unit(step, model, variant, accepted, rollout.part_of(model.replicas_wanted))
    step.decide(
        "rollout_started",
        model.model,
        taking_over(plan, version, model.version),
        chosen={
            "rollout": rollout.rollout,
            "variant": variant,
            "version": version,
            "version_before": model.version,
            "steps": shares_of(plan),
            "actor": actor,
            **shown_base(accepted.launch),
        },
        do_nothing=f"Version {model.version} would go on alone.",
    )


# ---------------------------------------------------------------- what people order


def rollout_order(step: Step, record: RolloutOrder) -> None:
    """Carry it out, or say why not; either way a decision about the model."""
    model = step.state.models.get(record.model)
    rollout = model.rollouts.get(record.variant) if model is not None else None
    if model is None:
        ignored(step, record, f"No model of that name is declared.{did_you_mean(record.model, step.state.models)}")
    elif rollout is None and record.order == "undo":
        undo(step, model, record)
    elif rollout is None:
        known = ", ".join(f"{name} (--variant {name})" for name in model.rollouts)
        others = f"; these are: {known}" if known else ""
        ignored(step, record, f"No rollout of variant {record.variant!r} is under way{others}.")
    else:
        _order(step, model, rollout, record)


def _order(step: Step, model: ModelState, rollout: RolloutState, record: RolloutOrder) -> None:
    actor = named(record.actor)
    after: RolloutState | None = None
    at = f"{rollout.share * 100 / FULL:g} % of the keys"
    said = Said("rollout_paused", f"Paused by {actor}: {rollout.version} stays at {at}; a breach still takes it back.")
    match record.order:
        case "pause":
            after = paused(rollout, record.actor)
        case "resume":
            after = resumed(rollout, step.now_ms)
            said = Said("rollout_resumed", f"Resumed by {actor}: {rollout.version} goes on from {at}, held anew.")
        case "promote":
            moved = promoted(rollout, seen_of(step, model, rollout), record.actor, step.now_ms)
            if moved is not None and len(model.rollouts) == 1:  # it is to get all keys
                after, said = moved
        case "abort" | "undo":
            if rollout.phase != "adopting" or old_ready(step, model):
                after = ended(rollout, "aborted", f"Aborted by {actor}.", step.now_ms)
                rest = rest_in_words(model, unit_of(step.state, model.model, rollout.variant), rollout)
                gone = f"Aborted by {actor}: no key goes to {rollout.version} any more.{rest}"
                said = Said("rollout_aborted", gone)
    if after is None:
        ignored(step, record, why_not(model, rollout, record.order))
        return
    _become(step, model, rollout, after, said)


# ---------------------------------------------------------------- what happens


def variant_window(step: Step, record: VariantWindow) -> None:
    """Statistics of one variant. Who reports them is not asked: they are counted once, by their end."""
    model = step.state.models.get(record.model)
    if model is None or not model.rollouts or not is_sane(record.stats) or not _is_of_now(step, record):
        step.ignore()
        return
    for variant, rollout in model.rollouts.items():
        model.rollouts[variant] = add_window(rollout, record, step.now_ms)


def _is_of_now(step: Step, record: VariantWindow) -> bool:
    """A window that ends in the future would make every later one look old."""
    spans = 0 <= record.start_ms < record.end_ms <= record.start_ms + WINDOW_MS_MAX
    return spans and record.end_ms <= step.now_ms + WINDOW_AHEAD_MS


def follow_rollouts(step: Step) -> None:
    """After every record, while anything is rolled out: let each rollout take what follows."""
    for name in list(step.state.rolling):
        model = step.state.models.get(name)
        if model is not None:
            for rollout in list(model.rollouts.values()):
                _follow(step, model, rollout)
        units = units_of(step.state, name)
        for unit in units:
            follow_unit(step, model, unit)
        if not units and (model is None or not model.rollouts):
            del step.state.rolling[name]


def _follow(step: Step, model: ModelState, rollout: RolloutState) -> None:
    unit = unit_of(step.state, model.model, rollout.variant)
    if unit is not None and rollout.phase != "adopting":
        wanted = rollout.part_of(model.replicas_wanted)
        if unit.status == "accepted" and unit.replicas_wanted < wanted:
            unit.replicas_wanted = wanted
            step.look_at(unit)
    seen = seen_of(step, model, rollout)
    after, said = bypass(rollout, seen, step.now_ms) or advance(rollout, seen, step.now_ms)
    if after is not rollout:
        _become(step, model, rollout, after, said)


def _become(step: Step, model: ModelState, before: RolloutState, after: RolloutState, said: Said | None) -> None:
    """Make `after` true: the shares, the units, the record of why."""
    if after.phase == "ended":
        _end(step, model, before, after)
    else:
        ranges = resized(before.ranges, after.share, ranges_of(model, without=before.variant))
        after = model.rollouts[before.variant] = structs.replace(after, ranges=ranges)
        if after.phase == "adopting" and before.phase != "adopting":
            take_over(step, model, accept(bytes(after.spec), step.settings.topics))
    if said is not None:
        step.decide(said.kind, model.model, said.reason, chosen=_numbers(before, after), do_nothing=said.do_nothing)
        step.touch("instances", model.model)
    step.look_at(model)


def _end(step: Step, model: ModelState, before: RolloutState, after: RolloutState) -> None:
    del model.rollouts[before.variant]
    if before.phase == "adopting" and after.ending != "completed" and model.status != "deleting":
        # The old replicas serve until those of the next generation, which is the old version again, are ready.
        for replica in model.present():
            if replica.state == "ready":
                replica.state = "draining"
        take_over(step, model, accept(bytes(after.spec_before), step.settings.topics))
    # Of its statistics the numbers of steps and gates are kept, not the sketches.
    kept = structs.replace(
        after, new=VariantStats(), old=VariantStats(), latency=(), stable_latency=StableLatency(), step=before.step
    )
    model.rollout_history = (*model.rollout_history, kept)[-ROLLOUTS_KEPT:]
    unit = unit_of(step.state, model.model, before.variant)
    if unit is not None:
        end_unit(step, unit, had_traffic=may_owe(unit, before))


def _numbers(before: RolloutState, after: RolloutState) -> dict[str, str | int]:
    chosen: dict[str, str | int] = {
        "rollout": before.rollout,
        "variant": before.variant,
        "version": before.version,
        "phase": after.ending or after.phase,
        "share_before": before.share,
        "share": after.share,
        "samples": before.new.samples,
        "stable_samples": before.old.samples,
        "windows": before.windows,
    }
    return chosen | {f"gate {gate.gate}": f"{gate.verdict}: {gate}" for gate in before.gates}
