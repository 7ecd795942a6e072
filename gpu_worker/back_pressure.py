"""Pausing partitions, so that memory stays flat while engines (or transactions) are slower than the topics.

Caps: unfinished offsets of a partition, items of a model, items of the worker (less for lower lanes, so that P0 always
finds room), bytes of all those items, and results that wait for a transaction. A poll may overshoot a cap by what it
returned, at most worker_poll_max.

Pausing is dear: the client throws away what it has prefetched, several times what a cap holds, and fetches it again
after the fetch that is under way, which may wait 100 ms for other partitions. So the full partition of a quick engine
is waited for: nothing at all is polled until there is room, in a few batches' time, or for HOLD_MS. One of a slow
engine is paused at once, so as not to stand in the way of the others, and resumes well below the caps.
"""

from __future__ import annotations

from gpu_worker.batching import FAST_BATCH_MS, running_ms
from gpu_worker.facts import PausePartitions, ResumePartitions
from gpu_worker.state import Partition
from gpu_worker.worker_state import WorkerState
from sie_stream.ids import TopicPartition

LANE_SHARES = (1.0, 0.85, 0.7)
"""Share of worker_queue_max up to which each lane may fill the worker."""
RESUME_AT = 0.5
"""A paused partition resumes when the caps are used to this share."""
MODEL_FLOOR = 32
"""Every model may hold this many items, however full the worker is."""
MODEL_SHARE = 4
"""A model may hold 1/4 of worker_queue_max, or some of its batches if that is more."""
BATCHES_PER_MODEL = 4
HOLD_MS = 100.0
"""How long all may wait for the full partition of a quick engine."""
OPEN_BYTES_MAX = 64 * 1024 * 1024
"""Records a worker holds, in bytes: large requests must not add up to the memory of the host."""


def model_open_max(state: WorkerState, model: str) -> int:
    """Admitted and unfinished items one model may hold."""
    batch_max = max((one.launch.batch_max for one in state.replicas.values() if one.key.model == model), default=1)
    queue_max = state.settings.worker_queue_max
    return min(queue_max, max(queue_max // MODEL_SHARE, BATCHES_PER_MODEL * batch_max))


def apply_back_pressure(state: WorkerState) -> None:
    """Hold, then pause, partitions above a cap; resume paused ones that are well below all of them."""
    band = _band(state)
    if not state.touched and not state.full_since and band == state.pressure_band:
        return
    pause: list[TopicPartition] = []
    resume: list[TopicPartition] = []
    for partition in _affected(state, band):
        place = partition.partition
        full = partition.state == "open" and _is_full(state, partition)
        if partition.paused:
            if not full and partition.state == "open":
                partition.paused = False
                resume.append(place)
        elif not full:
            state.full_since.pop(place, None)
        elif _soon(state, partition.model) and state.at_ms - state.full_since.get(place, state.at_ms) < HOLD_MS:
            state.full_since.setdefault(place, state.at_ms)
        else:
            state.full_since.pop(place, None)
            partition.paused = True
            pause.append(place)
    state.touched.clear()
    if pause:
        state.commands.append(PausePartitions(tuple(pause)))
    if resume:
        state.commands.append(ResumePartitions(tuple(resume)))


def _affected(state: WorkerState, band: tuple[bool, ...]) -> list[Partition]:
    """Partitions whose answer may have changed since the last turn."""
    if band != state.pressure_band:
        state.pressure_band = band
        state.full_since = {place: at for place, at in state.full_since.items() if place in state.partitions}
        return list(state.partitions.values())
    models = dict.fromkeys(state.touched)
    for place in list(state.full_since):
        held = state.partitions.get(place)
        if held is None:
            del state.full_since[place]
        else:
            models[held.model] = None
    return [one for model in models for one in state.by_model.get(model, {}).values()]


def _soon(state: WorkerState, model: str) -> bool:
    """Whether room for this model is a matter of milliseconds; it never is for a continuous one."""
    for replica in state.replicas.values():
        if replica.key.model == model and replica.state == "ready" and not replica.sequences_max:
            engine = state.engines[replica.engine]
            if not engine.suspects and max(engine.batch_ms, running_ms(state, engine)) <= FAST_BATCH_MS:
                return True
    return False


def _is_full(state: WorkerState, partition: Partition) -> bool:
    """Whether the partition should not be read now. Caps are lower for one that is paused already."""
    share = RESUME_AT if partition.paused else 1.0
    model = partition.model
    model_open = state.open_by_model.get(model, 0)
    cap = state.model_caps.get(model)
    if cap is None:
        cap = state.model_caps[model] = model_open_max(state, model)
    worker_cap = state.settings.worker_queue_max * LANE_SHARES[partition.lane]
    assert partition.ledger is not None
    return (
        state.open_bytes >= OPEN_BYTES_MAX * share
        or len(state.output.writes) >= state.settings.worker_queue_max * share
        or not partition.ledger.may_start
        or bool(partition.backlog)
        or partition.open >= state.settings.partition_open_max * share
        or model_open >= cap * share
        or (state.open_total >= worker_cap * share and model_open >= MODEL_FLOOR * share)
    )


def _band(state: WorkerState) -> tuple[bool, ...]:
    """Which of the worker-wide thresholds are exceeded."""
    queue_max = state.settings.worker_queue_max
    used = (
        *(state.open_total / (queue_max * share) for share in LANE_SHARES),
        state.open_bytes / OPEN_BYTES_MAX,
        len(state.output.writes) / queue_max,
    )
    return tuple(part >= limit for part in used for limit in (RESUME_AT, 1.0))
