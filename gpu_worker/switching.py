"""Models come to their device before engines get requests of them, and leave it again: residency.py, wired to the
worker's replicas, queues and engines. Nothing of this happens on devices without a budget (setting device_memory_mb).
"""

from __future__ import annotations

from collections.abc import Mapping

from gpu_worker.engine_port import EngineKey, ImageMoved, ModelLoaded, ModelSwitched
from gpu_worker.facts import ActivateModel, DeactivateModel, MoveModelImage
from gpu_worker.managed import Managed
from gpu_worker.memory.slots import Slot
from gpu_worker.queues import ready_on
from gpu_worker.residency import Activate, Demand, Evict, Order
from gpu_worker.state import Engine, Replica
from gpu_worker.touched import note_orders, tell_waiting
from gpu_worker.worker_state import WorkerState
from sie_stream.ids import LANES
from sie_stream.telemetry import DeviceMemorySample, ModelMemory

FIRST = -1
"""The lane of a suspect: its engine does nothing else."""


# ---------------------------------------------------------------- models come and go


def register(state: WorkerState, replica: Replica, event: ModelLoaded) -> None:
    """A model was loaded. Raises TooLarge when its device can never hold it."""
    managed = state.managed.get(replica.key.device)
    if managed is None:
        return
    fixed = 0 if event.image_bytes else event.memory_bytes
    group = replica.engine.name
    managed.residency.memory.add(replica.slot, group, event.image_bytes, fixed, event.pools, state.at_ms)
    managed.engines[replica.slot] = replica.engine


def unregister(state: WorkerState, replica: Replica) -> None:
    """It is being unloaded: its pages are free once nothing of it is under way."""
    managed = state.managed.get(replica.key.device)
    if managed is not None and replica.slot in managed.engines:
        managed.going[replica.slot] = None


def engine_gone(state: WorkerState, key: EngineKey) -> None:
    """The process ended, and is known to have ended: nobody writes to its pages any more."""
    managed = state.managed.get(key.device)
    if managed is None:
        return
    for slot in [slot for slot, engine in managed.engines.items() if engine == key]:
        managed.forget(slot)
    managed.residency.memory.drop_group(key.name)


# ---------------------------------------------------------------- turns


def runnable(state: WorkerState, replica: Replica) -> bool:
    managed = state.managed.get(replica.key.device)
    return managed is None or managed.residency.runnable(replica.slot)


def note_used(state: WorkerState, replica: Replica) -> None:
    managed = state.managed.get(replica.key.device)
    if managed is not None:
        managed.residency.used(replica.slot, state.at_ms)
        managed.counts.ran(replica.slot)


def switch_models(state: WorkerState) -> None:
    """Order what should come to each device now, and what gives way."""
    for device, managed in state.managed.items():
        engines = [engine for engine in state.engines.values() if engine.key.device == device]
        leased = {batch.replica.slot for engine in engines for batch in engine.outstanding.values()}
        memory = managed.residency.memory
        for slot in [slot for slot in managed.going if slot not in leased and memory.slots[slot].place != "coming"]:
            managed.forget(slot)
            memory.remove(slot)
        demand = [] if state.stopping else _demand(state, engines)
        orders = managed.residency.decide(demand, leased, state.at_ms)
        note_orders(state, managed, orders)
        for order in orders:
            _give(state, managed.engines[order.slot], order)
        slots = memory.slots
        managed.on_the_way = {
            slot: managed.on_the_way.get(slot, state.at_ms) for slot, one in slots.items() if one.place == "coming"
        }


def _demand(state: WorkerState, engines: list[Engine]) -> list[Demand]:
    found: list[Demand] = []
    for engine in engines:
        replica = ready_on(engine.suspects[0].queue, engine) if engine.suspects else None
        if replica is not None:
            found.append(Demand(replica.slot, FIRST))
    for lane in range(LANES):
        for queue in state.queues.waiting[lane].values():
            ready = (ready_on(queue, engine) for engine in engines)
            found += [Demand(replica.slot, lane) for replica in ready if replica is not None]
    return found


def _give(state: WorkerState, engine: EngineKey, order: Order) -> None:
    match order:
        case Activate():
            # Without weights that can leave there is nothing to bring; the model is there from now on.
            if order.pages:
                state.commands.append(ActivateModel(engine, order.slot, order.pages))
        case Evict():
            state.commands.append(DeactivateModel(engine, order.slot))
        case _:
            state.commands.append(MoveModelImage(engine, order.slot, order.to))


def on_switched(state: WorkerState, event: ModelSwitched) -> None:
    managed = state.managed.get(event.engine.device)
    if managed is not None:
        managed.residency.memory.arrived(event.slot)
        managed.counts.arrived(event.slot, event.switch_class, event.size, event.ms)
        tell_waiting(state, managed, event)


def overdue(state: WorkerState, engine: EngineKey) -> str:
    """The model that this engine takes too long to bring to the device; empty: none."""
    managed = state.managed.get(engine.device)
    if managed is None:
        return ""
    late = state.at_ms - state.settings.load_timeout_ms
    slots = [
        slot for slot, since in managed.on_the_way.items() if since <= late and managed.engines.get(slot) == engine
    ]
    return state.slots[slots[0]].key.model if slots and slots[0] in state.slots else "a model" if slots else ""


def take_back(state: WorkerState, engine: EngineKey, slot: int) -> None:
    """It could not be brought to its pages: they are free again."""
    managed = state.managed.get(engine.device)
    if managed is not None and slot in managed.engines:
        managed.residency.memory.evict(slot)
        managed.coming.pop(slot, None)


def on_image_moved(state: WorkerState, event: ImageMoved) -> None:
    managed = state.managed.get(event.engine.device)
    if managed is not None and event.message:
        managed.residency.memory.not_moved(event.slot, state.at_ms)
    elif managed is not None:
        managed.residency.memory.moved(event.slot, event.tier)
    if event.message:
        state.note("image_not_moved", slot=event.slot, tier=event.tier, message=event.message)


# ---------------------------------------------------------------- what the loop asks


def under_way(state: WorkerState) -> bool:
    """Whether an engine will soon say that a model arrived."""
    return any(
        one.place == "coming" for managed in state.managed.values() for one in managed.residency.memory.slots.values()
    )


def turn_due_in_ms(state: WorkerState) -> float | None:
    """When a turn ends that somebody waits for."""
    due = [managed.residency.due_in_ms(state.at_ms) for managed in state.managed.values()]
    return min((one for one in due if one is not None), default=None)


def memory_samples(state: WorkerState) -> Mapping[str, DeviceMemorySample]:
    """What telemetry tells of devices with a budget."""
    return {device: _sample(state, managed) for device, managed in state.managed.items()}


def _sample(state: WorkerState, managed: Managed) -> DeviceMemorySample:
    memory = managed.residency.memory
    balance = memory.ledger.balance()
    slots = list(memory.slots.values())
    return DeviceMemorySample(
        total_bytes=balance.total,
        page_bytes=memory.page_bytes,
        weights_bytes=balance.weights,
        kv_bytes=balance.kv,
        workspace_bytes=balance.workspace,
        free_bytes=balance.free,
        host_bytes=memory.host_bytes,
        host_used_bytes=memory.host_used,
        disk_used_bytes=sum(one.image_bytes for one in slots if one.below == "disk"),
        models=tuple(_model(state.slots[one.slot], one) for one in slots if one.slot in state.slots),
        switches=managed.counts.told(),
    )


def _model(replica: Replica, one: Slot) -> ModelMemory:
    return ModelMemory(
        model=replica.key.model,
        version=replica.key.version,
        place={"in": "device", "coming": "coming"}.get(one.place, one.below),
        size_bytes=one.image_bytes or one.fixed_bytes,
        pages=len(one.pages),
        below=one.below if one.image_bytes else "",
    )
