"""What workers say about replicas and partitions, and replicas that never say anything."""

from __future__ import annotations

from scheduler.engine_back import back_again
from scheduler.evidence import memory_changes, went
from scheduler.life import life_words
from scheduler.limits import RETRIES_MAX, retry_backoff_ms
from scheduler.partitions import released, worked_off
from scheduler.replanning import waits_for_plan
from scheduler.seats import devices_of, shown
from scheduler.state import ModelState, ReplicaState, no_room
from scheduler.step import Step
from scheduler.worker_state import LostAt
from sie_stream.control import PartitionReleased, ReplicaAnswered, ReplicaFailed, ReplicaReady


def replica_ready(step: Step, record: ReplicaReady) -> None:
    found = _find(step, record)
    if found is None:
        return
    model, replica = found
    if replica.down is not None:
        back_again(step, model, replica, record)
        return
    if replica.state != "loading":
        step.ignore()
        return
    replica.state = "ready"
    took_ms = step.now_ms - replica.placed_ms
    # Behind other loads it waited only because many came at once, as when a fleet is set up.
    model.cold_start_ms = max(1, took_ms - max(0, record.waited_ms))
    if replica.generation == model.generation:
        if not waits_for_plan(step.state, model):
            model.message = no_room(model.unplaced)  # those that found no place still have none
        _note_times(step, model, record)
        if all(other.state == "ready" for other in model.present()):
            model.failures = 0
            model.failed_on = ()
    step.decide(
        "replica_ready",
        model.model,
        f"Ready {took_ms} ms after it was placed: {record.waited_ms} ms behind other loads, {record.engine_start_ms} "
        f"ms until the engine was up, {record.load_ms} ms to load, {record.warmup_ms} ms to warm up.",
        chosen={
            "worker": replica.worker,
            "device": replica.shown,
            "version": record.version,
            "placement_epoch": replica.placement_epoch,
            "memory_bytes_declared": replica.memory_bytes,
            "memory_bytes_measured": record.memory_bytes,
        },
        facts=(step.fact(replica.placement_epoch, "cause of its placement"),),
        took_ms=took_ms,
    )
    step.touch("instances", model.model)
    step.look_at(model)


def _note_times(step: Step, model: ModelState, record: ReplicaReady) -> None:
    """Steps inside the worker, counted back from its report; never before the replica was placed."""
    if "ready" in model.timings_ms:
        return
    placed_ms = model.timings_ms.get("placed", step.now_ms)
    at_ms = step.now_ms
    model.timings_ms["ready"] = at_ms
    for name, took_ms in (
        ("loaded", record.warmup_ms),
        ("load_started", record.load_ms),
        ("engine_asked", record.engine_start_ms),
    ):
        at_ms = max(placed_ms, at_ms - max(0, took_ms))
        model.timings_ms[name] = at_ms


def replica_answered(step: Step, record: ReplicaAnswered) -> None:
    """The first of a generation ends the story of its start."""
    model = step.state.models.get(record.model)
    replica = model and model.replica_at(record.worker, record.incarnation, record.placement_epoch)
    if model is None or replica is None or not step.state.live(record.worker, record.incarnation):
        step.ignore()
        return
    if replica.generation != model.generation or "first_answer" in model.timings_ms:
        return
    model.timings_ms["first_answer"] = step.now_ms
    took_ms = step.now_ms - model.timings_ms["applied"]
    step.decide(
        "first_answer",
        model.model,
        f"Version {record.version} gave its first answer {took_ms} ms after it was applied: "
        f"{life_words(model.timings_ms)}.",
        chosen={"worker": replica.worker, "device": replica.shown, "version": record.version},
        facts=(
            step.fact(model.applied_offset, "ApplyModel"),
            step.fact(replica.placement_epoch, "cause of its placement"),
        ),
        took_ms=took_ms,
    )
    step.touch("instances", model.model)


def replica_failed(step: Step, record: ReplicaFailed) -> None:
    found = _find(step, record)
    if found is None:
        return
    model, replica = found
    fail_replica(step, model, replica, record.code, record.message)


def give_up_waiting(step: Step, model: ModelState) -> None:
    """Part of a tick: a replica has failed when its worker says nothing about it, or about any other, for too long."""
    limit_ms = step.settings.load_timeout_ms
    for replica in [r for r in model.replicas if r.awaited]:
        if step.now_ms >= step.state.load_deadline_ms(replica, limit_ms):
            since_ms, since = replica.placed_ms, "was placed"
            if replica.down is not None:
                since_ms, since = replica.down.newest_ms, "lost its engine"
            waited_ms = step.now_ms - since_ms
            message = f"no word about it {waited_ms} ms after it {since} (setting load_timeout_ms: {limit_ms})."
            fail_replica(step, model, replica, "load_timeout", message)


def partition_released(step: Step, record: PartitionReleased) -> None:
    """The worker committed and let go. Counts from a lost incarnation as well: the commit came before the report."""
    model = step.state.models.get(record.model)
    if model is None or not 0 <= record.partition < len(model.partitions):
        step.ignore()
        return
    partition = model.partitions[record.partition]
    # A drained one was asked for, also when the deletion has been taken back since. Then more may have come.
    unasked = partition.state == "assigned" and not record.drained
    if not released(partition, record.worker, record.incarnation, record.placement_epoch, record.images_at):
        step.ignore()
        return
    if record.drained and model.working_off:
        worked_off(partition)
    if unasked:
        _notice_stopping(step, record)
    step.touch("placements", model.model)
    step.look_at(model)


def _notice_stopping(step: Step, record: PartitionReleased) -> None:
    """A worker that gives back what nobody asked for is stopping; WorkerLeft will follow."""
    worker = step.state.workers.get(record.worker)
    if worker is None or worker.incarnation != record.incarnation or worker.stopping:
        return
    worker.stopping = True
    step.decide(
        "worker_stopping",
        record.worker,
        f"It released partition {record.partition} of {record.model} unasked, as a worker does that stops.",
        chosen={"incarnation": record.incarnation},
        do_nothing="The partition would be given back to it.",
    )


def _find(step: Step, record: ReplicaReady | ReplicaFailed) -> tuple[ModelState, ReplicaState] | None:
    """The replica a report is about; None for reports of the past and of workers that are not live."""
    model = step.state.models.get(record.model)
    if model is None or not step.state.live(record.worker, record.incarnation):
        step.ignore()
        return None
    step.state.workers[record.worker].progress_ms = step.now_ms
    replica = model.replica_at(record.worker, record.incarnation, record.placement_epoch)
    if replica is None:
        step.ignore()
        return None
    return model, replica


def fail_replica(step: Step, model: ModelState, replica: ReplicaState, code: str, message: str) -> None:
    """Unlist the replica; plan a retry, elsewhere if possible, or give up."""
    if replica in model.present():
        step.remember(model)
    model.replicas.remove(replica)
    step.capacity_freed = True
    where = shown(replica.seat)
    model.message = f"{where}: {code}: {message}"
    if replica.generation != model.generation:
        plan = "It belonged to an older version and is not replaced."
    else:
        model.failures += 1
        model.lost_at = LostAt(step.offset, type(step.record).__name__)
        model.failed_on = tuple(dict.fromkeys((*model.failed_on, *devices_of(replica.seat))))
        plan = _retry_plan(step, model)
    step.decide(
        "replica_failed",
        model.model,
        f"{where} reported {code}: {message} {plan}",
        chosen={
            "worker": replica.worker,
            "device": replica.shown,
            "code": code,
            "failures": model.failures,
            "placement_epoch": replica.placement_epoch,
        },
        do_nothing="The model would lack this replica.",
        facts=(step.fact(replica.placement_epoch, "cause of its placement"),),
        moves=(went(model.model, replica),),
        memory=memory_changes(step.state, removed=(replica,)),
        took_ms=step.now_ms - replica.placed_ms,
    )
    step.touch("placements", model.model)
    step.touch("instances", model.model)
    step.look_at(model)


def _retry_plan(step: Step, model: ModelState) -> str:
    if model.failures > RETRIES_MAX:
        return f"Given up after {RETRIES_MAX} retries; apply the model again to try once more."
    wait_ms = retry_backoff_ms(model.failures)
    model.retry_at_ms = step.now_ms + wait_ms
    return f"Retry {model.failures} of {RETRIES_MAX} in {wait_ms} ms, on another device if one is free."
