"""Plans carried out by the fold: neighbours move so that what waits for room gets it, and moves of a rebalance.

    no room --plan_room--> PLAN --wave over--> next wave --no more--> over: what waited is placed
                            |
                            +--a worker, a declaration, a target is not what it was--> given up

A move is two things that the fold does anyway: a replica is placed at the target, and the one at the source leaves, for
the plan. It serves until the new one does (leaving.py), hands its partitions over, and is retired. A plan that is given
up stops starting moves: one whose target is there ends as it would have, one whose target is gone stays
(`stay_after_all`). So no instant has fewer serving replicas than before.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.counts import counted, replicas_in_words
from scheduler.evidence import memory_changes, seat
from scheduler.limits import PLAN_MS_MAX, plan_calm_ms
from scheduler.move_plans import MovePlan, plan_room
from scheduler.offers import device_offers, placement_problem, wish_of
from scheduler.placement import Unplaceable, refusal
from scheduler.plans import PlannedMove, PlanUnderWay, Purpose
from scheduler.precision import precision_on
from scheduler.seats import Seat, devices_of, several, shown
from scheduler.state import ClusterState, ModelState, ReplicaState
from scheduler.step import Step
from sie_stream.decisions import Move

MOVE_REASONS: dict[Purpose, str] = {
    "room": "it makes room for another replica",
    "rebalance": "it costs less there",
}


def make_room(step: Step, refused: Sequence[Unplaceable]) -> bool:
    """Look for moves that let some of the refused be placed, and begin them. Rarely: solving takes its time."""
    state = step.state
    if state.plan is not None:
        return False
    if step.now_ms < state.plan_after_ms:
        for wish in refused:
            model = state.models[wish.wish.model]
            model.try_at_ms = min(model.try_at_ms, state.plan_after_ms)
        return False
    state.plan_after_ms = step.now_ms + plan_calm_ms(state.plan_failures)
    wishes = [wish_of(state.models[item.wish.model]) for item in refused]
    problem = placement_problem(state, wishes, step.settings.placement_packing)
    if not any(not resident.settled for resident in problem.residents):
        return False
    found = plan_room(problem)
    if not found.moves:
        return False
    begin_plan(step, found, "room")
    return True


def waits_for_plan(state: ClusterState, model: ModelState) -> bool:
    """Whether room is being made for it, so that it is not tried elsewhere meanwhile."""
    return state.plan is not None and state.plan.waits(model.model)


def begin_plan(step: Step, found: MovePlan, purpose: Purpose) -> None:
    """Record the plan; `advance_plan` starts its moves before the step ends."""
    state = step.state
    assert found.solver is not None, found
    named = [start.target[0] for start in found.starts]
    named += [name for move in found.moves for name in (move.source[0], move.target[0])]
    state.plan = PlanUnderWay(
        decision=step.next_decision,
        offset=step.offset,
        kind=type(step.record).__name__,
        purpose=purpose,
        moves=found.moves,
        starts=found.starts,
        workers={name: state.workers[name].incarnation for name in sorted(set(named))},
        solver=found.solver,
        started_ms=step.now_ms,
    )
    subject = found.starts[0].model if found.starts else found.moves[0].model
    wanted = ", ".join(dict.fromkeys(start.model for start in found.starts))
    step.decide(
        "plan_started",
        subject,
        f"No device has room for {wanted}, and moving {replicas_in_words(len(found.moves))} makes some."
        if purpose == "room"
        else f"Moving {replicas_in_words(len(found.moves))} costs less than leaving the fleet as it is.",
        chosen={
            "purpose": purpose,
            "moves": len(found.moves),
            "waves": 1 + max(move.wave for move in found.moves),
            "starts": len(found.starts),
        },
        do_nothing=f"{wanted} would wait for room." if purpose == "room" else "The fleet would stay as it is.",
        moves=tuple(Move(m.model, "replica, planned", shown(m.source), shown(m.target)) for m in found.moves),
        solver=found.solver,
    )
    for start in found.starts:
        state.models[start.model].message = f"room is being made for it by {state.plan.decision}"
        step.touch("instances", start.model)


def advance_plan(step: Step) -> None:
    """Part of every step that changed something, and of a tick: the next wave, or the end."""
    plan = step.state.plan
    if plan is None:
        return
    why = _why_not(step, plan)
    if why:
        _give_up(step, plan, why)
        return
    if any(_is_under_way(step, plan, move) for move in plan.moves if move.wave == plan.wave):
        return
    plan.wave += 1
    wave = [move for move in plan.moves if move.wave == plan.wave]
    if not wave:
        _end(step, plan)
        return
    for move in wave:
        no_room = _start_move(step, plan, move)
        if no_room:
            _give_up(step, plan, no_room)
            return


def _why_not(step: Step, plan: PlanUnderWay) -> str:
    """What has changed so that the plan cannot go on; empty: nothing."""
    state = step.state
    if step.now_ms >= plan.started_ms + PLAN_MS_MAX:
        return f"it takes longer than {PLAN_MS_MAX} ms."
    for worker, incarnation in plan.workers.items():
        if not state.takes_work(worker, incarnation):
            return f"{worker} is not the live worker any more that it counted on."
        if worker in state.cordons:
            return f"{worker} is taken out of service."
    for item in (*plan.moves, *plan.starts):
        model = state.models.get(item.model)
        if model is None or model.status == "deleting" or model.generation != item.generation:
            return f"the declaration of {item.model} has changed."
        lost = [device for device in item.target[1:] if device in state.workers[item.target[0]].lost_devices]
        if lost:
            return f"the device {item.target[0]}/{lost[0]} is lost."
    for name in dict.fromkeys(start.model for start in plan.starts):
        model = state.models[name]
        starts = sum(start.model == name for start in plan.starts)
        if model.replicas_wanted - len(model.present()) < starts:
            return f"{name} does not need the room any more."
    return _failed_move(step, plan)


def _failed_move(step: Step, plan: PlanUnderWay) -> str:
    for move in plan.moves:
        if move.wave != plan.wave:
            continue
        model = step.state.models[move.model]
        if _at(model, move, move.target) is None and not _is_moot(model, move):
            return f"the replica of {move.model} at {shown(move.target)} is gone."
    return ""


def _is_under_way(step: Step, plan: PlanUnderWay, move: PlannedMove) -> bool:
    model = step.state.models[move.model]
    target = _at(model, move, move.target)
    leaving = any(replica.leaving_for == plan.decision for replica in model.replicas)
    return leaving or (not _is_moot(model, move) if target is None else target.state != "ready")


def _is_moot(model: ModelState, move: PlannedMove) -> bool:
    """It has all that it wants without the replica that was to move: it shrank meanwhile. The others move all the same.

    After a failure the replica at the source stays.
    """
    return len(model.present()) >= model.replicas_wanted and _at(model, move, move.source) is None


def _at(model: ModelState, move: PlannedMove, place: Seat) -> ReplicaState | None:
    """The staying replica of the plan's generation there."""
    for replica in model.present():
        if replica.generation == move.generation and replica.seat == place:
            return replica
    return None


def _start_move(step: Step, plan: PlanUnderWay, move: PlannedMove) -> str:
    """New before old. Gives why not, when the state is not what the plan took it for."""
    state = step.state
    model = state.models[move.model]
    source = _at(model, move, move.source)
    if source is None and _is_moot(model, move):
        return ""
    if source is None or source.state != "ready":
        return f"{move.model} does not serve at {shown(move.source)} any more."
    if any(replica.leaving and replica.leaving_for != plan.decision for replica in model.replicas):
        return f"another replica of {move.model} is moving."
    offers = {(offer.worker, offer.device): offer for offer in device_offers(state)}
    found = [offers[device] for device in devices_of(move.target) if device in offers]
    if len(found) < len(move.target) - 1:
        return f"{shown(move.target)} is not offered."
    # Others of this plan still serve where they leave; the waves see to it that no target is there.
    same = [replica for replica in model.replicas if replica.generation == move.generation and replica is not source]
    hosts = [replica.worker for replica in same]
    why = refusal(wish_of(model), hosts, found)
    if why:
        return why
    step.remember(model)
    replica = ReplicaState(
        worker=found[0].worker,
        incarnation=found[0].incarnation,
        device=found[0].device,
        generation=model.generation,
        placement_epoch=step.offset,
        memory_bytes=model.launch.memory_bytes,
        placed_ms=step.now_ms,
        devices=several(move.target[1:]),
        precision=precision_on(model.rules.precisions, found[0].kind, found[0].product),
    )
    model.replicas.append(replica)
    source.leaving, source.leaving_for, source.planned = True, plan.decision, True
    step.decide(
        "replica_moving",
        model.model,
        f"{plan.decision} moves it, because {MOVE_REASONS[plan.purpose]}. The one at {seat(source)} serves until this "
        f"one is ready.",
        chosen={
            "plan": plan.decision,
            "wave": move.wave,
            "worker": replica.worker,
            "device": replica.shown,
            "placement_epoch": replica.placement_epoch,
            "memory_bytes": replica.memory_bytes,
        },
        do_nothing="The plan would stand still.",
        facts=(step.fact(plan.offset, plan.kind),),
        moves=(Move(model.model, "replica", seat(source), seat(replica)),),
        memory=memory_changes(state, added=(replica,)),
        solver=plan.solver,
    )
    step.touch("placements", model.model)
    step.touch("instances", model.model)
    step.look_at(model)
    return ""


def _end(step: Step, plan: PlanUnderWay) -> None:
    step.state.plan_failures = 0
    _drop(step, plan)
    step.decide(
        "plan_ended",
        plan.decision,
        f"Its {counted(len(plan.moves), 'move is', 'moves are')} over."
        + (" What waited for the room is placed now." if plan.starts else ""),
        chosen={"purpose": plan.purpose, "moves": len(plan.moves)},
        facts=(step.fact(plan.offset, plan.kind),),
        took_ms=step.now_ms - plan.started_ms,
        solver=plan.solver,
    )


def _give_up(step: Step, plan: PlanUnderWay, why: str) -> None:
    step.state.plan_failures += 1
    _drop(step, plan)
    step.decide(
        "plan_given_up",
        plan.decision,
        f"The plan cannot go on: {why} Moves whose target is there end; nothing more is moved.",
        chosen={"purpose": plan.purpose, "begun": sum(m.wave <= plan.wave for m in plan.moves)},
        do_nothing="Moves would start that were planned for another fleet.",
        facts=(step.fact(plan.offset, plan.kind),),
        took_ms=step.now_ms - plan.started_ms,
    )


def _drop(step: Step, plan: PlanUnderWay) -> None:
    """What was kept for the plan is free for everybody."""
    step.state.plan = None
    step.state.plan_after_ms = step.now_ms + plan_calm_ms(step.state.plan_failures)
    step.capacity_freed = True
    for name in plan.models():
        model = step.state.models.get(name)
        if model is not None:
            if plan.waits(name):
                model.message = ""
            step.look_at(model)
