"""Engine processes that end while their worker lives on: killed for memory, crashed, or too slow.

The worker starts the process again and loads its models again, so their replicas stay placed and keep their partitions;
until each says ReplicaReady it is shown as loading. An engine that ends again and again, for no request or load that is
to blame, gives its replicas up to other devices, as far as those have room.
"""

from __future__ import annotations

from msgspec import structs

from scheduler.counts import counted, replicas_in_words
from scheduler.engine_back import engine_key, in_engine, words
from scheduler.evidence import stopped
from scheduler.limits import ENGINE_DEATHS_MAX, ENGINE_DEATHS_MS, UNSTABLE_CALM_MS
from scheduler.offers import placement_problem, wish_of
from scheduler.placement import ReplicaWish, place
from scheduler.replicas import fail_replica
from scheduler.seats import devices_of
from scheduler.state import ModelState, ReplicaState
from scheduler.step import TEXT_CHARS_MAX, VALUE_CHARS_MAX, Step, shortened
from scheduler.worker_state import Down, EngineDeath, EngineState, WorkerState
from sie_stream.control import TRIAL, EngineLost
from sie_stream.decisions import Fact

SUSPECTS_MAX = 128
"""Of one death that are kept; workers report fewer."""
SUSPECT_CHARS_MAX = 256
REQUESTS_MAX = 1_000_000_000

OnModel = tuple[ModelState, ReplicaState]


def engine_lost(step: Step, record: EngineLost) -> None:
    worker = _reporting(step, record)
    if worker is None:
        step.ignore()
        return
    worker.progress_ms = step.now_ms
    cause = shortened(record.cause or "no cause was given", VALUE_CHARS_MAX)
    name = words(record.backend, record.domain)
    requests = min(max(0, record.requests), REQUESTS_MAX)
    held = counted(requests, "request that it held is", "requests that it held are")
    engine = _note_death(step, worker, record)
    touched: list[OnModel] = []
    named = frozenset((one.model, one.placement_epoch) for one in record.models)
    for model, replica in _in_engine(step, record):
        if replica.state != "ready" or (model.model, replica.placement_epoch) not in named:
            continue
        since_ms = step.now_ms if replica.down is None else replica.down.since_ms
        replica.down = Down(since_ms, step.now_ms, step.offset, cause)
        touched.append((model, replica))
        step.touch("instances", model.model)
        step.look_at(model)
    step.decide(
        "engine_lost",
        f"{record.worker}/{record.device}",
        f"The {name} ended: {cause}. {record.worker} starts it again and loads its "
        f"{replicas_in_words(len(touched))} again; {held} run again.",
        chosen={
            "worker": record.worker,
            "incarnation": record.incarnation,
            "device": record.device,
            "backend": record.backend,
            "cause": cause,
            "replicas": len(touched),
            "requests": requests,
            "suspects": ", ".join(record.suspects[:SUSPECTS_MAX]),
            "given_up": ", ".join(record.given_up[:SUSPECTS_MAX]),
            "deaths": len(engine.deaths),
        },
        do_nothing="They would be shown as ready while nothing answers.",
        facts=(step.fact(worker.joined_offset, "WorkerJoined"), *_earlier(step, engine)),
        moves=tuple(stopped(model.model, replica) for model, replica in touched),
    )
    if _is_unstable(engine.deaths):
        _move_off(step, record, worker, engine)


def _reporting(step: Step, record: EngineLost) -> WorkerState | None:
    """The live incarnation that can have such an engine."""
    if not step.state.live(record.worker, record.incarnation):
        return None
    worker = step.state.workers[record.worker]
    known = any(device.device == record.device for device in worker.devices) and record.backend in worker.backends
    return worker if known and record.domain in ("", TRIAL) else None


def _in_engine(step: Step, record: EngineLost) -> list[OnModel]:
    """Replicas placed on that engine, in the order of the models."""
    at = (record.worker, record.incarnation, record.device)
    return [
        (model, replica)
        for model in step.state.models.values()
        for replica in model.replicas
        if (replica.worker, replica.incarnation, replica.device) == at
        and in_engine(model.launches[replica.generation], record.backend, record.domain)
    ]


def _note_death(step: Step, worker: WorkerState, record: EngineLost) -> EngineState:
    """Deaths of the last while that nothing explains yet; what is given up now explains those that it was at."""
    key = engine_key(record.device, record.backend, record.domain)
    before = worker.engines.get(key, EngineState())
    given_up = frozenset(_cut(record.given_up))
    death = EngineDeath(step.now_ms, step.offset, _cut(record.suspects))
    deaths = [
        one
        for one in (*before.deaths, death)
        if step.now_ms - one.at_ms < ENGINE_DEATHS_MS and given_up.isdisjoint(one.suspects)
    ]
    still_down = any(replica.down is not None for _, replica in _in_engine(step, record))
    since_ms = before.down_since_ms if still_down else step.now_ms
    engine = EngineState(
        tuple(deaths[-ENGINE_DEATHS_MAX:]), since_ms, before.down_offset if still_down else step.offset
    )
    worker.engines = {**worker.engines, key: engine}
    return engine


def _cut(suspects: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(shortened(one, SUSPECT_CHARS_MAX) for one in suspects[:SUSPECTS_MAX])


def _earlier(step: Step, engine: EngineState) -> list[Fact | None]:
    return [step.fact(death.offset, "EngineLost") for death in engine.deaths]


def _is_unstable(deaths: tuple[EngineDeath, ...]) -> bool:
    """Too many deaths, and no request or load was at all of them: that one the worker finds and ends by itself."""
    if len(deaths) < ENGINE_DEATHS_MAX:
        return False
    common = frozenset(deaths[0].suspects).intersection(*(death.suspects for death in deaths[1:]))
    return not common


# ---------------------------------------------------------------- elsewhere


def _move_off(step: Step, record: EngineLost, worker: WorkerState, engine: EngineState) -> None:
    """Replicas that fit elsewhere fail here, so that they are placed there; the others stay, for lack of better."""
    key = engine_key(record.device, record.backend, record.domain)
    worker.engines = {**worker.engines, key: structs.replace(engine, deaths=())}
    stay = [(model, replica) for model, replica in _in_engine(step, record) if model.stays(replica)]
    movable = [one for one in stay if step.now_ms - one[0].unstable_ms >= UNSTABLE_CALM_MS]
    moving = _with_room_elsewhere(step, record, movable)
    seconds = ENGINE_DEATHS_MS // 1_000
    name = words(record.backend, record.domain)
    why = f"the {name} ended {ENGINE_DEATHS_MAX} times within {seconds} s, last: {record.cause}"
    step.decide(
        "engine_unstable",
        f"{record.worker}/{record.device}",
        f"{why[0].upper()}{shortened(why[1:], TEXT_CHARS_MAX // 4)}. No single request or load was there each time. "
        f"Of its {replicas_in_words(len(stay))} {counted(len(moving), 'fits', 'fit')} elsewhere and "
        f"{'moves' if len(moving) == 1 else 'move'} there.",
        chosen={
            "worker": record.worker,
            "device": record.device,
            "backend": record.backend,
            "replicas": len(stay),
            "moving": len(moving),
        },
        do_nothing="They would be interrupted again and again.",
        facts=tuple(_earlier(step, engine)),
    )
    for model, replica in moving:
        model.unstable_ms = step.now_ms
        fail_replica(step, model, replica, "engine_unstable", shortened(why, VALUE_CHARS_MAX) + ".")


def _with_room_elsewhere(step: Step, record: EngineLost, movable: list[OnModel]) -> list[OnModel]:
    """Those that one plan finds room for on other devices, beside all that runs there."""
    here = (record.worker, record.device)
    wishes = [_wish(model, replica) for model, replica in movable]
    if not wishes:
        return []
    problem = placement_problem(step.state, wishes, step.settings.placement_packing)
    problem = structs.replace(
        problem,
        devices=tuple(offer for offer in problem.devices if (offer.worker, offer.device) != here),
        residents=tuple(one for one in problem.residents if here not in devices_of((one.worker, *one.devices))),
    )
    if not problem.devices:
        return []
    found = {
        chosen.wish.model
        for chosen in place(problem).chosen
        if not set(devices_of((chosen.worker, *chosen.devices))) & set(chosen.wish.failed_on)
    }
    return [(model, replica) for model, replica in movable if model.model in found]


def _wish(model: ModelState, replica: ReplicaState) -> ReplicaWish:
    """As if the replica were gone from where it is."""
    hosts = tuple(other.worker for other in model.present() if other is not replica)
    failed_on = (*model.failed_on, *devices_of(replica.seat))
    return structs.replace(wish_of(model, replica.memory_bytes), hosts=hosts, failed_on=failed_on)
