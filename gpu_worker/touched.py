"""What happens to requests while they are here, for their results to tell (sie_stream/touches.py).

Which requests waited for a model is known when it arrives: those that stand in its queue then. No clocks are compared,
and requests of models that never move pay nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gpu_worker.engine_port import ModelSwitched
from gpu_worker.managed import Away, Coming, Managed
from gpu_worker.residency import Activate, Evict, Order
from gpu_worker.state import Batch, Item, Replica
from gpu_worker.worker_state import WorkerState
from sie_stream.touches import LEFT_MAX, TOUCHES_MAX, CameIn, KeptOut, Moved, Retried, Touch, came_in_of

REASON_CHARS_MAX = 120

# ---------------------------------------------------------------- models that come to their device


def note_orders(state: WorkerState, managed: Managed, orders: Sequence[Order]) -> None:
    """Who gives way to whom: models leave right before the one they leave for is brought."""
    leaving: list[int] = []
    for order in orders:
        match order:
            case Evict():
                leaving.append(order.slot)
            case Activate():
                gone = tuple(_name(state, slot) for slot in leaving)
                managed.coming[order.slot] = Coming(state.at_ms, order.waited_ms, gone)
                comer = _name(state, order.slot)
                managed.away |= {slot: Away(state.at_ms, comer) for slot in leaving}
                leaving = []
            case _:
                pass


def tell_waiting(state: WorkerState, managed: Managed, event: ModelSwitched) -> None:
    """Whatever waits for the model has waited for it to come in."""
    coming = managed.coming.pop(event.slot, None)
    away = managed.away.pop(event.slot, None)
    replica = state.slots.get(event.slot)
    if coming is None or replica is None or event.switch_class == "resident":
        return
    waiting = _waiting_for(state, replica)
    if not waiting:
        return
    came = CameIn(
        state.now_ms,
        state.identity.worker,
        replica.key.device,
        _name(state, event.slot),
        event.switch_class,
        event.size,
        round(state.at_ms - coming.ordered_at, 3),
        round(coming.waited_ms, 3),
    )
    came = came_in_of(
        came,
        coming.gave_way,
        "" if away is None else away.left_for,
        0.0 if away is None else round(state.at_ms - away.since, 3),
    )
    arrived = ((event.slot, came),)
    for item in waiting:
        item.arrivals = (*item.arrivals[1 - TOUCHES_MAX :], *arrived) if item.arrivals else arrived


def _waiting_for(state: WorkerState, replica: Replica) -> list[Item]:
    """Items that it may be given: of its version, and of others that it stands in for."""
    found: list[Item] = []
    for queue in state.queues.models.values():
        if replica in queue.replicas:
            found += [item for lane in queue.lanes for item in lane]
            found += [item for held in queue.by_key.values() for item in held if item.queue is queue]
    return found + [item for item in state.engines[replica.engine].suspects if replica in item.queue.replicas]


def _name(state: WorkerState, slot: int) -> str:
    replica = state.slots.get(slot)
    return "a model that is gone" if replica is None else f"{replica.key.model}@{replica.key.version}"


def take_arrivals(items: Sequence[Item], replica: Replica) -> None:
    """They are given to that replica: what came to other devices meanwhile was not for them."""
    for item in items:
        if item.arrivals:
            item.touches = (*item.touches, *(came for slot, came in item.arrivals if slot == replica.slot))
            item.arrivals = ()


def end_outside(state: WorkerState, item: Item) -> None:
    """It ends in the queue: what came in for it, or where its model is instead."""
    came = tuple(one for _, one in item.arrivals)
    ready = [one for one in item.queue.replicas if one.state == "ready" and one.key.device in state.managed]
    out = [one for one in ready if not _on_device(state, one)]
    kept = (_kept_out(state, out[0]),) if out and len(out) == len(ready) else ()
    item.touches = (*item.touches, *came, *kept)


def _on_device(state: WorkerState, replica: Replica) -> bool:
    slot = state.managed[replica.key.device].residency.memory.slots.get(replica.slot)
    return slot is None or slot.place == "in"


def _kept_out(state: WorkerState, replica: Replica) -> KeptOut:
    slots = state.managed[replica.key.device].residency.memory.slots
    own = slots[replica.slot]
    others = [_name(state, one.slot) for one in slots.values() if one.place != "out" and one is not own]
    return KeptOut(
        state.now_ms,
        state.identity.worker,
        replica.key.device,
        _name(state, replica.slot),
        "coming" if own.place == "coming" else own.below,
        tuple(others[:LEFT_MAX]),
    )


# ---------------------------------------------------------------- running requests that move


def moved_on(state: WorkerState, batch: Batch, size_bytes: int) -> tuple[Touch, ...]:
    """Of the one request of a batch that was stopped here."""
    me = state.identity
    left = Moved(me.worker, me.incarnation, batch.submitted_ms, batch.stopped_ms, size_bytes)
    return (*batch.items[0].touches, left)


def taken_up(item: Item, now_ms: int, refused: str) -> None:
    """The engine here goes on with it, or has refused its image."""
    item.touches = tuple(
        replace(one, at_ms=now_ms, refused=refused[:REASON_CHARS_MAX])
        if isinstance(one, Moved) and not one.at_ms
        else one
        for one in item.touches
    )


def retried(item: Item, worker: str, now_ms: int) -> Retried:
    """An engine failed while it held the item, whose attempts are counted already."""
    return Retried(now_ms, worker, item.code, item.attempts)
