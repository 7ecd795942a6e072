"""Bring models towards what is wanted: place replicas, publish routes, hand partitions over, retire old replicas.

The handlers of facts only change the state and say which models to look at; this file alone decides what follows. It
runs at the end of every step over the models that were touched, and costs nothing for the others.
"""

from __future__ import annotations

from msgspec import structs

from scheduler.drops import drop_if_over
from scheduler.evidence import came, memory_changes, partition_moves, went
from scheduler.leaving import drain_leaving, leaves_because, let_surplus_go, stay_after_all
from scheduler.limits import RETRIES_MAX
from scheduler.offers import placement_problem, wish_of
from scheduler.partitions import PartitionState, ReplicaKey, ask_back, assign, share_out
from scheduler.placement import Chosen, ReplicaWish, Unplaceable, place
from scheduler.replanning import make_room, waits_for_plan
from scheduler.seats import several
from scheduler.state import NEVER_MS, ClusterState, ModelState, ReplicaState, no_room
from scheduler.step import Step
from scheduler.variants import is_unit, route_variants, shares_in_words, wait_for_ingress
from sie_stream.decisions import SolverRun


def converge(step: Step) -> None:
    """Repeat until nothing frees memory any more: what one model gives back, another may be waiting for.

    Ends, because each further round needs a replica that was retired, and rounds place none that they retire.
    """
    while step.dirty or step.capacity_freed:
        if step.capacity_freed:
            step.capacity_freed = False
            for model in step.state.models.values():
                if _missing(model) > 0:
                    step.look_at(model)
        names = sorted(step.dirty)
        step.dirty.clear()
        models = [step.state.models[name] for name in names if name in step.state.models]
        _place_missing(step, models)
        for model in models:
            _settle(step, model)
            due_ms = model_due_ms(step.state, model, step.settings.load_timeout_ms)
            step.state.models_due_ms = min(step.state.models_due_ms, due_ms)


def model_due_ms(state: ClusterState, model: ModelState, load_timeout_ms: int) -> int:
    """When a tick has to look at this model next; NEVER_MS when only a fact can change anything."""
    due = min(model.delete_at_ms, model.give_up_at_ms, model.topic_due_ms)
    for replica in model.replicas:
        if replica.awaited:
            due = min(due, state.load_deadline_ms(replica, load_timeout_ms))
    if _missing(model) > 0:
        due = min(due, model.try_at_ms)
    return due


# ---------------------------------------------------------------- placing


def _missing(model: ModelState) -> int:
    """Replicas of the present generation that should be placed, as soon as the waits are over."""
    if not model.topic_ready or model.failures > RETRIES_MAX:
        return 0
    return max(0, model.replicas_wanted - len(model.present()))


def _may_place(step: Step, model: ModelState) -> bool:
    """Whether the waits are over: the backoff after a failure; a serving model's wait for a lost worker."""
    waited_until, model.try_at_ms = model.try_at_ms, NEVER_MS
    if step.now_ms < model.retry_at_ms:
        model.try_at_ms = model.retry_at_ms
        return False
    returned = any(_is_live(step.state, worker) for worker in model.lost_workers)
    # One that is cordoned would come back to nothing new.
    awaited = [worker for worker in model.lost_workers if worker not in step.state.cordons]
    if returned or not awaited or step.now_ms >= model.wait_until_ms or not _serving(step.state, model):
        return True
    model.try_at_ms = model.wait_until_ms
    if waited_until != model.wait_until_ms:
        step.decide(
            "replacement_deferred",
            model.model,
            f"It still serves, so {', '.join(awaited)} may come back first.",
            chosen={"wait_ms": model.wait_until_ms - step.now_ms, "missing": _missing(model)},
            do_nothing="A replica would be loaded elsewhere, and the worker would come back to nothing.",
        )
    return False


def _is_live(state: ClusterState, worker: str) -> bool:
    found = state.workers.get(worker)
    return found is not None and found.status == "live" and not found.stopping


def _place_missing(step: Step, models: list[ModelState]) -> None:
    """One placement problem for all these models."""
    for model in models:
        stay_after_all(step, model)
    wishes: list[ReplicaWish] = []
    for model in models:
        if _missing(model) > 0 and not waits_for_plan(step.state, model) and _may_place(step, model):
            wishes.extend([wish_of(model)] * _missing(model))
    if not wishes:
        return
    plan = place(placement_problem(step.state, wishes, step.settings.placement_packing))
    for chosen in plan.chosen:
        _list_replica(step, step.state.models[chosen.wish.model], chosen, plan.solver)
    if plan.unplaceable:
        make_room(step, plan.unplaceable)
    for refused in plan.unplaceable:
        if waits_for_plan(step.state, step.state.models[refused.wish.model]):
            continue
        _say_unplaceable(step, step.state.models[refused.wish.model], refused)


def _list_replica(step: Step, model: ModelState, chosen: Chosen, solver: SolverRun) -> None:
    replica = ReplicaState(
        worker=chosen.worker,
        incarnation=chosen.incarnation,
        device=chosen.devices[0],
        generation=model.generation,
        placement_epoch=step.offset,
        memory_bytes=chosen.wish.memory_bytes,
        placed_ms=step.now_ms,
        devices=several(chosen.devices),
        precision=chosen.precision,
    )
    assert model.replica_at(replica.worker, replica.incarnation, replica.placement_epoch) is None, replica
    step.remember(model)
    model.replicas.append(replica)
    if model.unplaced:
        model.unplaced = ()
        model.message = ""
    model.timings_ms.setdefault("placed", step.now_ms)
    lost_at = model.lost_at
    if _missing(model) == 0:
        model.lost_workers = ()
        model.lost_at = None
    step.decide(
        "replica_placed",
        model.model,
        f"{model.replicas_wanted} wanted; no device that can hold it costs less"
        f"{' (it held the model before)' if chosen.worker in chosen.wish.prefer else ''}.",
        chosen={
            "worker": chosen.worker,
            "incarnation": chosen.incarnation,
            "device": "+".join(chosen.devices),
            "version": model.version,
            "placement_epoch": step.offset,
            "memory_bytes": chosen.wish.memory_bytes,
            **({"precision": chosen.precision} if chosen.precision else {}),
            "free_bytes_before": chosen.free_bytes_before,
            "free_bytes_after": chosen.free_bytes_before - chosen.wish.memory_bytes,
        },
        rejected=chosen.rejected,
        do_nothing="Its requests would wait." if len(model.replicas) == 1 else "It would lack a replica.",
        facts=(
            step.fact(model.applied_offset, "ApplyModel"),
            step.fact(step.state.workers[replica.worker].joined_offset, "WorkerJoined"),
            step.fact(lost_at.offset, lost_at.kind) if lost_at else None,
        ),
        moves=(came(model.model, replica),),
        memory=memory_changes(step.state, added=(replica,)),
        solver=solver,
    )
    step.touch("placements", model.model)
    step.touch("instances", model.model)


def _say_unplaceable(step: Step, model: ModelState, refused: Unplaceable) -> None:
    """No room. An old version may have to make some; otherwise say why, once per reason."""
    if _make_room(step, model, refused):
        return
    if model.unplaced == refused.why_not:
        return
    model.unplaced = refused.why_not
    model.message = no_room(refused.why_not)
    step.decide(
        "replica_unplaceable",
        model.model,
        "No device can hold it; it is tried again whenever memory is freed or a worker joins.",
        chosen={
            "version": model.version,
            "memory_bytes": refused.wish.memory_bytes,
            "backend": refused.wish.backend,
            "missing": _missing(model),
        },
        rejected=refused.why_not,
        do_nothing="There is nothing else to do.",
        facts=(step.fact(model.applied_offset, "ApplyModel"),),
    )
    step.touch("instances", model.model)


def _make_room(step: Step, model: ModelState, refused: Unplaceable) -> bool:
    """Old released first: only when nothing of the new version could be placed, and only what makes it fit."""
    if model.present() or any(replica.state == "draining" for replica in model.older()):
        return bool(model.older()) and not model.present()
    for old in model.older():
        plan = place(placement_problem(step.state, [refused.wish], step.settings.placement_packing, without=old))
        if not plan.chosen:
            continue
        old.state = "draining"
        step.decide(
            "replica_draining",
            model.model,
            f"Version {model.version} does not fit beside version {model.launches[old.generation].version}, so the old "
            f"replica is released first.",
            chosen={"worker": old.worker, "device": old.shown, "memory_bytes": old.memory_bytes},
            rejected=refused.why_not,
            do_nothing=f"Version {model.version} would not start.",
        )
        step.touch("instances", model.model)
        return True
    return False


# ---------------------------------------------------------------- serving


def _serving(state: ClusterState, model: ModelState) -> list[ReplicaState]:
    """The replicas that should hold the partitions now. Leaving ones do until those that stay are enough."""
    ready = [r for r in model.replicas if r.state == "ready" and state.takes_work(r.worker, r.incarnation)]
    new = [replica for replica in ready if replica.generation == model.generation]
    staying = [replica for replica in new if not replica.leaving]
    if len(staying) >= model.replicas_wanted or (staying and model.unplaced and not model.pool):
        new = staying
    old = [replica for replica in ready if replica.generation != model.generation]
    if not old or not new:
        return new or old
    return new if len(new) >= min(len(model.present()), len(old)) else old


def _settle(step: Step, model: ModelState) -> None:
    """Hand over to the present generation when it can serve, share out the partitions, retire who has none."""
    let_surplus_go(model)
    if model.unplaced and len(model.present()) >= model.replicas_wanted:
        model.unplaced, model.message = (), ""  # fewer are wanted since: nothing lacks a place any more
        step.touch("instances", model.model)
    serving = _serving(step.state, model)
    if serving and serving[0].generation == model.generation:
        _drain_older(step, model)
        drain_leaving(step, model, serving)
    elif not model.replicas_wanted:
        drain_leaving(step, model, ())
    _publish_route(step, model)
    if model.partitions:
        moves = share_out(model.partitions, len(model.partitions) // model.route.lanes, [r.key for r in serving])
        # A lost worker cannot answer: its partitions wait for the fence.
        asked = tuple(p for p in moves.ask_back if p.owner is not None and step.state.live(*p.owner[:2]))
        for partition in asked:
            ask_back(partition, step.offset)
        freed_by = tuple(dict.fromkeys(partition.freed_by for partition, _ in moves.assign))
        for partition, owner in moves.assign:
            assign(partition, owner, step.offset)
        if moves.assign and serving[0].generation == model.generation:
            model.timings_ms.setdefault("assigned", step.now_ms)
        if moves.assign or asked:
            step.touch("placements", model.model)
            _say_moves(step, model, moves.assign, asked, freed_by)
    _retire(step, model)
    if model.working_off:
        drop_if_over(step, model)


def _drain_older(step: Step, model: ModelState) -> None:
    """New before old: the new replicas are ready, so the old ones drain."""
    for old in model.older():
        if old.state == "ready":
            old.state = "draining"
            step.decide(
                "replica_draining",
                model.model,
                f"Version {model.version} is ready, so the replica of {model.launches[old.generation].version} hands "
                f"its partitions over.",
                chosen={"worker": old.worker, "device": old.shown, "version": model.launches[old.generation].version},
                do_nothing="Both versions would keep their memory, and the old one would keep answering.",
            )
            step.touch("instances", model.model)


def _retire(step: Step, model: ModelState) -> None:
    """Unlist older and leaving replicas that hold no partition any more, and those that never got to serve."""
    holders = {partition.owner for partition in model.partitions}
    for old in [r for r in model.replicas if r.leaving or r.generation != model.generation]:
        if old.state == "ready" or old.key in holders:
            continue
        model.replicas.remove(old)
        step.capacity_freed = True
        step.decide(
            "replica_retired",
            model.model,
            f"{leaves_because(step.state, model, old)}, and it holds no partition."
            if old.leaving
            else "It belongs to an older version and holds no partition.",
            chosen={
                "worker": old.worker,
                "device": old.shown,
                "version": model.launches[old.generation].version,
                "memory_bytes": old.memory_bytes,
            },
            do_nothing="It would keep its memory.",
            moves=(went(model.model, old),),
            memory=memory_changes(step.state, removed=(old,)),
        )
        step.touch("placements", model.model)
        step.touch("instances", model.model)
    listed = {replica.generation for replica in model.replicas}
    for generation in [g for g in model.launches if g != model.generation and g not in listed]:
        del model.launches[generation]


def _publish_route(step: Step, model: ModelState) -> None:
    """The route of the present generation, once its topic exists and no older one is in charge."""
    if model.status == "deleting" or not model.topic_ready or is_unit(model):
        return
    older_in_charge = any(replica.state != "draining" for replica in model.older())
    width = len(model.partitions) // model.route.lanes
    route = model.published_route
    variants, rules = route_variants(step.state, model)
    same = as_wide = False
    if route is not None:
        as_wide = model.routed_generation == model.generation and route.width == width
        same = as_wide and not model.route_changed
        if same and (route.variants, route.rules) == (variants, rules):
            return
        # A split that ended before the model had taken the version over ends now: the older generation gets all keys.
        if older_in_charge and not same and not model.rollouts and len(route.variants) == 1:
            return
        if (route.variants, route.rules) == (variants, rules) and older_in_charge:
            return
        wait_for_ingress(step, model)
    # Shares may change while an older generation is still in charge; the rest of the route may not.
    base, generation = model.route, model.generation
    if route is not None and (older_in_charge or same):
        base, generation = route, model.routed_generation
    else:
        model.route_changed = False
    model.published_route = structs.replace(
        base,
        route_epoch=step.offset,
        width=width,
        variants=variants,
        rules=rules,
        shares=route.shares if route is not None and as_wide else base.shares,
        asleep=not model.replicas_wanted,
    )
    model.routed_generation = generation
    step.decide(
        "route_published",
        model.model,
        "Its topic exists; requests are taken from now on and wait there until a replica serves them."
        if route is None
        else shares_in_words(variants),
        chosen={"version": model.version, "topic": model.route.topic, "width": width, "route_epoch": step.offset},
        do_nothing="Requests would be answered unknown_model." if route is None else "The old route would stay.",
    )
    step.touch("routes", model.model)
    step.touch("instances", model.model)


def _say_moves(
    step: Step,
    model: ModelState,
    given: tuple[tuple[PartitionState, ReplicaKey], ...],
    asked_back: tuple[PartitionState, ...],
    freed_by: tuple[int, ...],
) -> None:
    """One decision for all assignments of this step, one for all requests to release.

    freed_by: offsets of the records by which those that are given had been asked back, or had lost their owner.
    """
    if given:
        by_owner: dict[str, list[str]] = {}
        for partition, owner in given:
            by_owner.setdefault(owner.worker, []).append(str(partition.partition))
        step.decide(
            "partitions_assigned",
            model.model,
            "They were free (new, released, or their owner is fenced), and these replicas are ready.",
            chosen={worker: ", ".join(numbers) for worker, numbers in by_owner.items()},
            do_nothing="Their requests would wait.",
            facts=tuple(step.fact(offset, "cause of their being free") for offset in freed_by),
            moves=partition_moves(model.model, by_owner, "given"),
        )
    if asked_back:
        by_holder: dict[str, list[str]] = {}
        for partition in asked_back:
            assert partition.owner is not None, partition
            by_holder.setdefault(partition.owner.worker, []).append(str(partition.partition))
        step.decide(
            "partitions_asked_back",
            model.model,
            "Another replica should hold them, or none: the owner ends what runs, commits, and reports their release.",
            chosen={worker: ", ".join(numbers) for worker, numbers in by_holder.items()},
            do_nothing="The shares would stay uneven, or an old version would go on answering.",
            moves=partition_moves(model.model, by_holder, "taken"),
        )
