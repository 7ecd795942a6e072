"""What happens to items whose engine failed while it held them.

When an engine dies, hangs or raises, every item it held is a suspect. Suspects are run alone, one at a time, with
nothing else in the engine (no other batch, no load), so the next failure has one culprit. An item that was there at
engine_attempts_max failures, and alone at the last, ends as `failed` and goes to the dead letters; its innocent
neighbours succeed alone.

A kill from outside (SIGKILL, and the kernel did not do it for want of memory) is nothing that a request does. Requests
of continuous models then go on side by side, each from what its engine kept of it outside. Once: a request that is
killed a second time is a suspect after all, and so are all where fewer than three attempts are allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpu_worker.engine_port import BatchFailed
from gpu_worker.state import Batch, Engine, Item, Partition
from gpu_worker.touched import retried
from gpu_worker.worker_state import WorkerState

POISON = "poison"
ENGINE_TIMEOUT = "engine_timeout"
KILLED = "SIGKILL"
"""The cause of a death that no request brings about (see engine_port.EngineDied)."""
RESTART_PAUSE_MS = (0.0, 0.0, 500.0, 1_000.0, 2_000.0, 5_000.0)
"""Pause before the process is started again, by deaths in a row without anything useful between them."""


class Failure(NamedTuple):
    """What an engine did to the items it held."""

    code: str
    message: str
    attempts_max: int
    """Failures at which an item is given up; out of reach while it has neighbours that may be the culprit."""


NEVER_MAX = 1 << 30


def engine_lost(state: WorkerState, engine: Engine, code: str, message: str, cause: str) -> list[str]:
    """All that the engine held are suspects, but for those that go on; the caller lets its models be loaded again.

    Returns the ids of the requests that are given up.
    """
    engine.running = False
    engine.deaths_in_a_row += 1
    pause = RESTART_PAUSE_MS[min(engine.deaths_in_a_row, len(RESTART_PAUSE_MS) - 1)]
    engine.down_until = state.at_ms + pause
    batches = list(engine.outstanding.values())
    for batch in batches:
        engine.let_go(batch.batch_id)
    alone = sum(len(batch.items) for batch in batches) == 1
    if cause == KILLED:
        going_on = [batch for batch in batches if goes_on(batch, state.settings.engine_attempts_max)]
        batches = [batch for batch in batches if batch not in going_on]
        for batch in reversed(going_on):
            _go_on(state, batch, code, message)
    attempts_max = state.settings.engine_attempts_max if alone else NEVER_MAX
    failure = Failure(code, message, attempts_max)
    return [request_id for batch in batches for request_id in _suspect(state, engine, batch, failure)]


def goes_on(batch: Batch, attempts_max: int) -> bool:
    """Whether what an engine held that was killed from outside runs beside others again, not as a suspect."""
    return bool(batch.replica.sequences_max) and attempts_max > 2 and not any(item.attempts for item in batch.items)


def _go_on(state: WorkerState, batch: Batch, code: str, message: str) -> None:
    """Its items wait ahead of the others, for the engine's next process."""
    for item in reversed(batch.items):
        if item.partition.state == "closed":
            continue
        item.partition.running -= 1
        item.attempts += 1
        item.code, item.message = code, message
        item.touches = (*item.touches, retried(item, state.identity.worker, state.now_ms))
        item.resume = True
        if item.partition.state == "open":
            state.queues.push_front(item)
        else:
            abandon(state, item)


def on_batch_failed(state: WorkerState, engine: Engine, event: BatchFailed) -> None:
    """The backend raised: the items of that batch are suspects, the engine lives. So are those that shared the step."""
    batch = engine.let_go(event.batch_id)
    if batch is not None:
        alone = len(batch.items) == 1 and event.shared == 1
        attempts_max = state.settings.engine_attempts_max if alone else NEVER_MAX
        _suspect(state, engine, batch, Failure(event.code, event.message, attempts_max))


def _suspect(state: WorkerState, engine: Engine, batch: Batch, failure: Failure) -> list[str]:
    """Each item of the batch is retried alone, given up, or (when its partition is being given back) left alone.

    Returns the ids of the requests that are given up.
    """
    given_up: list[str] = []
    for item in batch.items:
        partition = item.partition
        if partition.state == "closed":
            continue
        partition.running -= 1
        item.attempts += 1
        item.resume = False
        item.code = failure.code
        item.message = failure.message
        if item.attempts >= failure.attempts_max:
            state.outcomes.poisoned(item, batch.finisher, state.now_ms, state.output)
            finish(state, [item])
            given_up.append(item.work.request_id)
        elif partition.state == "open":
            item.touches = (*item.touches, retried(item, state.identity.worker, state.now_ms))
            engine.suspects.append(item)
        else:
            abandon(state, item)
    return given_up


def abandon(state: WorkerState, item: Item) -> None:
    """Leave an item to the next owner of its partition: its offset stays unfinished."""
    item.partition.open -= 1
    state.closed(item.partition.model, 1)


def finish(state: WorkerState, items: Sequence[Item]) -> None:
    """The ledger's part of an ending. The terminal record is in state.output, so the next commit has both."""
    for partition, run in runs_of(items):
        assert partition.ledger is not None
        partition.ledger.finish_many([item.offset for item in run])
        partition.open -= len(run)
        size = sum([item.size for item in run])
        partition.open_bytes -= size
        state.open_bytes -= size
        state.dirty[partition.partition] = partition
        state.closed(partition.model, len(run))
    for item in items:
        if item.key is not None:
            state.queues.release_key(item)
    if items:
        state.pacer.pending(state.at_ms)


def runs_of(items: Sequence[Item]) -> list[tuple[Partition, Sequence[Item]]]:
    """The items in runs of one partition each: the hot path works per run, not per item."""
    runs: list[tuple[Partition, Sequence[Item]]] = []
    start, count = 0, len(items)
    while start < count:
        partition = items[start].partition
        end = start + 1
        while end < count and items[end].partition is partition:
            end += 1
        runs.append((partition, items[start:end] if end - start < count else items))
        start = end
    return runs
