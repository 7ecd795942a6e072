"""What people ask for: ApplyModel, DeleteModel, and the work topic that a model needs."""

from __future__ import annotations

import msgspec

from scheduler.actors import named
from scheduler.adapter_bases import declared, kept_by, left_below, shown_base
from scheduler.drops import nobody_serves
from scheduler.elastic import redeclare
from scheduler.launches import Accepted, accept, claimed_name
from scheduler.limits import (
    DELETE_LINGER_MS,
    RETRIES_MAX,
    TOPIC_TIMEOUT_MS,
    topic_backoff_ms,
)
from scheduler.partitions import PartitionState, wanted_again
from scheduler.redeclared import keeps_replicas, take_over_as_is
from scheduler.state import NEVER_MS, ModelState
from scheduler.step import Step
from sie_stream.control import ApplyModel, DeleteModel, TopicEnsured, TopicFailed
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.ids import LANES, base_of, instance_id
from sie_stream.problems import Problem, SpecError
from sie_stream.spec import colliding
from sie_stream.spec.model import REPLICAS_MAX


def apply_model(step: Step, record: ApplyModel) -> None:
    """Accept, refuse or recognise a declaration. A change of what replicas are starts a new generation beside the one
    that serves; any other holds for the replicas that are there (see redeclared.py).
    """
    try:
        accepted = accept(bytes(record.spec), step.settings.topics, declared(step.state))
        refuse_confusing_name(step, accepted.model)
        refuse_oversize(step, accepted)
    except ConfigError as error:
        step.decide(
            "model_rejected",
            claimed_name(bytes(record.spec)) or "unnamed",
            str(error),
            chosen={"code": error.code, "actor": record.actor},
            do_nothing="The declaration is ignored; whatever was accepted before goes on.",
        )
        return
    model = step.state.models.get(accepted.model)
    if model is None:
        model = new_model(step, accepted)
        model.timings_ms = {"applied": step.now_ms}
        reason, otherwise = "A new model; its declaration is valid.", "Requests for it are answered unknown_model."
    elif bytes(model.spec) == bytes(accepted.spec):
        _apply_again(step, model, record.actor)
        return
    elif keeps_replicas(model, accepted):
        _restore(step, model)
        reason, otherwise = take_over_as_is(model, accepted), "The old declaration stays."
        _try_again(model)
    else:
        reason, otherwise = new_generation(step, model, accepted), "The old version stays."
        model.timings_ms = {"applied": step.now_ms}
    model.applied_offset = step.offset
    model.applied_ms = step.now_ms
    model.message = ""
    step.decide(
        "model_accepted",
        model.model,
        reason + left_below(step.state, model),
        chosen={
            "version": model.version,
            "generation": model.generation,
            "instance": model.instance,
            "replicas": model.replicas_wanted,
            "memory_bytes": model.launch.memory_bytes,
            "actor": record.actor,
            **shown_base(model.launch),
        },
        do_nothing=otherwise,
    )
    want_topic(step, model)
    step.touch("models", model.model)
    step.touch("instances", model.model)
    step.look_at(model)


def refuse_confusing_name(step: Step, name: str) -> None:
    """Raises SpecError when the name's topic and that of another model differ only in what Kafka cannot tell apart."""
    other = colliding(name, [*step.state.models, *step.state.topic_widths])
    if other is not None:
        message = f"there is a topic of {other!r}; the names differ only in '.' and '_', which Kafka cannot tell apart."
        raise SpecError([Problem("name", repr(name), message, nearest=name.replace(".", "-").replace("_", "-"))])


def refuse_oversize(step: Step, accepted: Accepted) -> None:
    """Raises SpecError when a row with all replicas, old and new, would not fit into a record."""
    launch_bytes = len(msgspec.json.encode(accepted.launch))
    needed = 2 * accepted.replicas_wanted * (launch_bytes + 256) + len(accepted.spec)
    allowed = step.settings.record_bytes_max * 9 // 10
    if needed > allowed:
        message = (
            f"too large: its row in the table of placements would take {needed} bytes, {allowed} are allowed. "
            f"Schemas and warm-up inputs count once for each replica, twice while a version is replaced."
        )
        raise SpecError([Problem("", f"{launch_bytes} bytes", message)])


def new_model(step: Step, accepted: Accepted) -> ModelState:
    model = ModelState(
        model=accepted.model,
        instance=instance_id(base_of(accepted.model)),
        spec=accepted.spec,
        version=accepted.launch.version,
        generation=1,
        launches={1: accepted.launch},
        route=accepted.route,
        not_enforced=accepted.not_enforced,
        replicas_wanted=accepted.replicas_wanted,
        width=max(accepted.width, step.state.topic_widths.get(accepted.model, 0)),
        applied_ms=step.now_ms,
        rules=accepted.rules,
        scaling=accepted.scaling,
    )
    step.state.models[model.model] = model
    return model


def new_generation(step: Step, model: ModelState, accepted: Accepted) -> str:
    """The new spec becomes the present generation. Returns the reason, as a sentence."""
    before = model.version
    _restore(step, model)
    model.generation += 1
    model.spec = accepted.spec
    model.version = accepted.launch.version
    model.launches[model.generation] = accepted.launch
    model.route = accepted.route
    model.not_enforced = accepted.not_enforced
    model.rules = accepted.rules
    redeclare(model, accepted.scaling, accepted.replicas_wanted)
    model.width = max(accepted.width, model.width)
    model.sla_missed = ()  # what was learnt about another version does not hold
    model.sla_streak = {}
    _try_again(model)
    if before != model.version:
        return f"Version {before} is replaced by {model.version}: new replicas are placed beside the old ones."
    return f"The declaration of version {before} changed: new replicas are placed beside the old ones."


def _try_again(model: ModelState) -> None:
    model.failures = 0
    model.retry_at_ms = 0
    model.failed_on = ()
    model.unplaced = ()


def _restore(step: Step, model: ModelState) -> bool:
    """Take back a deletion that is under way. False when there was none."""
    if model.status != "deleting":
        return False
    model.status = "accepted"
    model.delete_at_ms = NEVER_MS
    model.give_up_at_ms = NEVER_MS
    model.routed_generation = 0
    for partition in model.partitions:
        wanted_again(partition)
    step.touch("placements", model.model)
    return True


def _apply_again(step: Step, model: ModelState, actor: str) -> None:
    """The same declaration again: takes back a deletion, tries failed replicas again, otherwise changes nothing."""
    if _restore(step, model):
        reason = "The same declaration as before: its deletion is taken back."
    elif model.failures > RETRIES_MAX:
        reason = "The same declaration as before: its replicas, given up after failures, are tried again."
    else:
        step.decide(
            "model_unchanged",
            model.model,
            "The same declaration as before; nothing to do.",
            chosen={"version": model.version, "generation": model.generation, "actor": actor},
        )
        return
    model.applied_offset = step.offset
    _try_again(model)
    model.message = ""
    step.decide(
        "model_accepted",
        model.model,
        reason,
        chosen={"version": model.version, "generation": model.generation, "actor": actor},
        do_nothing="It would stay as it was before this was applied.",
    )
    step.touch("models", model.model)
    step.touch("instances", model.model)
    step.look_at(model)


def delete_model(step: Step, record: DeleteModel) -> None:
    """The route goes at once; the model goes on serving until what is in its topic is worked off.

    What nobody can work off (see drops.py) stays there, with the committed offsets, until retention ends: it is worked
    off when the model is applied again before that.
    """
    model = step.state.models.get(record.model) if base_of(record.model) == record.model else None
    if model is None or model.status == "deleting":
        why = (
            "It is being deleted already."
            if model is not None
            else f"No model of that name is declared.{did_you_mean(record.model, step.state.models)}"
        )
        step.decide("delete_ignored", record.model, why, chosen={"actor": record.actor})
        return
    model.status = "deleting"
    model.replicas_wanted = max(1, model.replicas_wanted)  # one that sleeps may have work that nobody has seen yet
    model.delete_at_ms = step.now_ms + DELETE_LINGER_MS
    model.published_route = None
    model.route_wait = None
    model.routed_generation = 0
    nobody = nobody_serves(model)
    model.message = f"deleted; {nobody[0].lower()}{nobody[1:]}" if nobody else "deleted; works off what is in its topic"
    rest = (
        f"{nobody}: unless that changes within {DELETE_LINGER_MS} ms, requests in its topic have no result until it is "
        f"applied again."
        if nobody
        else f"What is in the topic {DELETE_LINGER_MS} ms from now is worked off, then its replicas are unloaded."
    )
    step.decide(
        "model_deleting",
        model.model,
        f"Asked for by {named(record.actor)}. New requests are answered unknown_model. {rest}"
        f"{kept_by(step.state, model.model)}",
        chosen={
            "version": model.version,
            "linger_ms": DELETE_LINGER_MS,
            "topic_kept": model.route.topic,
            "worked_off": "no" if nobody else "yes",
        },
        do_nothing="It would go on serving.",
    )
    for table in ("routes", "models", "instances"):
        step.touch(table, model.model)
    step.look_at(model)


def want_topic(step: Step, model: ModelState) -> None:
    """Ask for the work topic unless it exists with all its partitions."""
    if model.topic_ready:
        return
    model.topic_due_ms = step.now_ms + TOPIC_TIMEOUT_MS
    step.ensure_topic(model)


def ask_topic_again(step: Step, model: ModelState) -> None:
    """No outcome came back in time, or a new leader cannot know whether the old one asked."""
    assert model.topic_due_ms != NEVER_MS, "only a topic that was asked for is asked for again"
    model.topic_due_ms = step.now_ms + TOPIC_TIMEOUT_MS
    step.ensure_topic(model)
    step.look_at(model)


TOPICS_MAX = 10_000
"""Topics of models that are not declared (any more), as far as others can invent them."""


def topic_ensured(step: Step, record: TopicEnsured) -> None:
    new = record.model not in step.state.models and record.model not in step.state.topic_widths
    if (
        not 0 < record.partitions <= LANES * REPLICAS_MAX
        or record.topic != step.settings.topics.work(record.model)
        or (new and len(step.state.topic_widths) >= TOPICS_MAX)
    ):
        step.ignore()  # nobody asked for that, and each would be a piece of state for ever
        return
    width = record.partitions // LANES
    step.state.topic_widths[record.model] = max(width, step.state.topic_widths.get(record.model, 0))
    model = step.state.models.get(record.model)
    if model is None or record.topic != model.route.topic:
        step.ignore()
        return
    model.width = max(model.width, width)
    for number in range(len(model.partitions), LANES * width):
        model.partitions.append(PartitionState(number))
    if not model.topic_ready:
        step.ignore()  # the outcome for a generation with fewer partitions; the one for this generation is on its way
        return
    if model.topic_due_ms != NEVER_MS:
        model.topic_due_ms = NEVER_MS
        model.topic_failures = 0
        model.message = ""
    model.timings_ms.setdefault("topic_ready", step.now_ms)
    step.look_at(model)


def topic_failed(step: Step, record: TopicFailed) -> None:
    model = step.state.models.get(record.model)
    if model is None or model.topic_due_ms == NEVER_MS:
        step.ignore()
        return
    model.topic_failures += 1
    wait_ms = topic_backoff_ms(model.topic_failures)
    model.topic_due_ms = step.now_ms + wait_ms
    model.message = f"topic {record.topic}: {record.message}"
    step.decide(
        "topic_failed",
        model.model,
        f"Topic {record.topic} could not be made: {record.message} Asked for again in {wait_ms} ms.",
        chosen={"topic": record.topic, "failures": model.topic_failures, "retry_in_ms": wait_ms},
        do_nothing="The model would have no route.",
    )
    step.touch("instances", model.model)
    step.look_at(model)


def drain_deleted(step: Step, model: ModelState) -> None:
    """The linger of a deleted model is over, so no ingress adds to its topic: workers are told where the end is."""
    assert model.status == "deleting", "only deleted models are drained"
    model.delete_at_ms = NEVER_MS
    step.decide(
        "model_draining",
        model.model,
        "No ingress routes to it any more; its partitions are worked off to their ends.",
        chosen={"version": model.version, "partitions": len(model.partitions)},
        do_nothing="Its replicas would keep their memory.",
    )
    step.touch("placements", model.model)
    step.look_at(model)
