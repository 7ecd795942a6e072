"""Pausing partitions, so that memory stays flat while engines (or transactions) are slower than the topics.

Caps: unfinished offsets of a partition, items of a model, items of the worker (less for lower lanes, so that P0 always
finds room), bytes of all those items, and results that wait for a transaction. A paused partition resumes well below
the caps, because the client throws its prefetched records away. A poll may overshoot a cap by what it returned, at most
worker_poll_max.
"""

from __future__ import annotations

from collections.abc import Iterable

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
MODEL_SHARE = 8
"""A model may hold 1/8 of worker_queue_max, or some of its batches if that is more."""
BATCHES_PER_MODEL = 4
OPEN_BYTES_MAX = 64 * 1024 * 1024
"""Records a worker holds, in bytes: large requests must not add up to the memory of the host."""


def model_open_max(state: WorkerState, model: str) -> int:
    """Admitted and unfinished items one model may hold."""
    batch_max = max((one.launch.batch_max for one in state.replicas.values() if one.key.model == model), default=1)
    queue_max = state.settings.worker_queue_max
    return min(queue_max, max(queue_max // MODEL_SHARE, BATCHES_PER_MODEL * batch_max))


def apply_back_pressure(state: WorkerState) -> None:
    """Pause partitions above a cap, resume paused ones that are well below all of them."""
    band = _band(state)
    if not state.touched and band == state.pressure_band:
        return
    if band != state.pressure_band:
        state.pressure_band = band
        looked_at: Iterable[Partition] = list(state.partitions.values())
    else:
        looked_at = [one for model in state.touched for one in state.by_model.get(model, {}).values()]
    state.touched.clear()
    pause: list[TopicPartition] = []
    resume: list[TopicPartition] = []
    for partition in looked_at:
        if partition.state != "open":
            continue
        full = _is_full(state, partition)
        if full != partition.paused:
            partition.paused = full
            (pause if full else resume).append(partition.partition)
    if pause:
        state.commands.append(PausePartitions(tuple(pause)))
    if resume:
        state.commands.append(ResumePartitions(tuple(resume)))


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
