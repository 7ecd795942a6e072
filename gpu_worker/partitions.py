"""Partitions of this worker: taken, worked off, and given back.

A draining partition is worked off like any other. Once it is read to the end that it had when that was asked, and
nothing of it waits, runs or is uncommitted, it is reported as drained, and that assignment never starts again.

A partition is released by forgetting what waits, finishing or moving (handover.py) what an engine already holds, and
committing; only after the commit that covers it does PartitionReleased go out. An assignment never starts before
everything that an earlier assignment of the same partition finished is committed, or its work would be done twice.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from gpu_worker.facts import (
    CancelBatch,
    DrainPartitions,
    PartitionPositioned,
    PartitionReadOut,
    PositionLost,
    PositionPartitions,
    UnassignPartitions,
)
from gpu_worker.handover import images_at, may_start
from gpu_worker.state import Awaited, Partition
from gpu_worker.worker_state import WorkerState
from sie_stream.control import PartitionPlacement, PartitionReleased, PlacementRow
from sie_stream.ids import TopicPartition
from sie_stream.offsets import OffsetLedger


def follow_partitions(state: WorkerState, model: str, row: PlacementRow | None) -> None:
    """Take and give back partitions of `model` as the row says."""
    wanted: dict[TopicPartition, PartitionPlacement] = {}
    for placed in row.partitions if row is not None else ():
        if placed.worker == state.identity.worker and placed.incarnation == state.identity.incarnation:
            assert row is not None
            wanted[TopicPartition(row.topic, placed.partition)] = placed
    for place in [place for place, held in state.partitions.items() if held.model == model and place not in wanted]:
        close_partition(state, state.partitions[place])
    for place in [place for place, one in state.awaiting.items() if one.model == model and place not in wanted]:
        del state.awaiting[place]
    for place in [place for place, report in state.drained.items() if report.model == model and place not in wanted]:
        del state.drained[place]
    for place, placed in wanted.items():
        _follow_one(state, model, place, placed)


def _follow_one(state: WorkerState, model: str, place: TopicPartition, placed: PartitionPlacement) -> None:
    held = state.partitions.get(place)
    over = state.drained.get(place)
    if over is not None and over.placement_epoch == placed.placement_epoch:
        # The row is older than our report, or the report was lost. To start again would give it two owners.
        state.reports.append(over)
        return
    state.drained.pop(place, None)
    if held is not None and held.placement_epoch != placed.placement_epoch:
        # The scheduler has that assignment released. What we report must carry the epoch of the one in the row.
        close_partition(state, held)
        held = None
    if held is None:
        # Releasing what we do not hold: our report may be lost. Looking up the offset and reporting it again is safe.
        state.awaiting[place] = Awaited(model, placed.placement_epoch, placed.state, placed.images_at)
    elif held.state in ("open", "positioning"):
        held.order = placed.state
        _obey(state, held)


def _obey(state: WorkerState, partition: Partition) -> None:
    """Do with an open partition what its newest row says; before that there is nothing to do."""
    state.read_out.pop(partition.partition, None)
    if partition.state != "open":
        return
    match partition.order:
        case "assigned":
            pass
        case "draining":
            # Asked anew with every row: the end may have moved while the deletion was taken back for a while.
            state.commands.append(DrainPartitions(((partition.partition, partition.placement_epoch),)))
        case "releasing":
            release(state, partition)
        case _:
            assert_never(partition.order)


def position_awaiting(state: WorkerState) -> None:
    """Start the assignments that wait for nothing any more."""
    if not state.awaiting or state.stopping:
        return
    ready: list[tuple[TopicPartition, int]] = []
    for place, (model, epoch, order, address) in list(state.awaiting.items()):
        if place in state.dirty or place in state.committing or not may_start(state, place, epoch, address):
            continue
        del state.awaiting[place]
        partition = Partition(place, model, epoch)
        partition.order = order
        state.partitions[place] = partition
        state.by_model.setdefault(model, {})[place] = partition
        ready.append((place, epoch))
    if ready:
        state.commands.append(PositionPartitions(tuple(ready)))


def on_positioned(state: WorkerState, event: PartitionPositioned) -> None:
    partition = state.partitions.get(event.partition)
    if partition is None or partition.placement_epoch != event.placement_epoch or partition.ledger is not None:
        return  # given back while the offset was looked up; UnassignPartitions has been sent
    partition.ledger = OffsetLedger.resume(event.committed, state.settings.partition_open_max, event.placement_epoch)
    if not partition.ledger.metadata_understood:
        state.note("offset_metadata_not_understood", **_fields(partition), metadata=event.committed.metadata[:80])
    partition.state = "open"
    partition.written_at = state.at_ms
    state.note("partition_assigned", **_fields(partition), offset=event.committed.offset)
    _obey(state, partition)


def on_read_out(state: WorkerState, event: PartitionReadOut) -> None:
    partition = state.partitions.get(event.partition)
    if partition is None or partition.placement_epoch != event.placement_epoch or partition.state != "open":
        return
    if partition.order == "draining":
        state.read_out[event.partition] = partition


def on_position_lost(state: WorkerState, event: PositionLost) -> None:
    """Retention took records before anyone worked on them: progress goes on behind the hole."""
    partition = state.partitions.get(event.partition)
    if partition is None or partition.ledger is None:
        return
    state.note("position_lost", **_fields(partition), wanted=event.wanted, continued_at=event.continued_at)


def release(state: WorkerState, partition: Partition) -> None:
    """Start nothing more of an open partition, and give it back when what runs is committed."""
    assert partition.state == "open", partition.state
    partition.state = "releasing"
    state.read_out.pop(partition.partition, None)
    state.releasing[partition.partition] = partition
    _stop_reading(state, partition)


def close_partition(state: WorkerState, partition: Partition) -> None:
    """No longer ours, without a handover: what still runs for it will be ignored when it finishes."""
    if partition.state == "open" or partition.ledger is None:
        _stop_reading(state, partition)
    state.closed(partition.model, partition.running)
    partition.open -= partition.running
    partition.state = "closed"
    _cancel_running(state, partition)
    _forget(state, partition)
    state.note("partition_closed", **_fields(partition))


def _cancel_running(state: WorkerState, partition: Partition) -> None:
    """Continuous models may stop working for it."""
    for engine in state.engines.values():
        for batch in engine.outstanding.values():
            if batch.replica.sequences_max and batch.items[0].partition is partition:
                state.commands.append(CancelBatch(engine.key, batch.batch_id))


def _stop_reading(state: WorkerState, partition: Partition) -> None:
    state.commands.append(UnassignPartitions((partition.partition,)))
    partition.backlog.clear()
    dropped = state.queues.drop_partition(partition)
    for engine in state.engines.values():
        kept = [item for item in engine.suspects if item.partition is not partition]
        dropped += len(engine.suspects) - len(kept)
        engine.suspects.clear()
        engine.suspects.extend(kept)
    partition.open -= dropped
    state.closed(partition.model, dropped)


def _forget(state: WorkerState, partition: Partition) -> None:
    state.open_bytes -= partition.open_bytes
    state.releasing.pop(partition.partition, None)
    state.read_out.pop(partition.partition, None)
    del state.partitions[partition.partition]
    del state.by_model[partition.model][partition.partition]


def report_released(state: WorkerState) -> None:
    """PartitionReleased for every partition that has nothing in work and whose every finished offset is committed."""
    for place, partition in list(state.read_out.items()):
        if partition.open or partition.backlog or place in state.dirty or place in state.committing:
            continue
        _stop_reading(state, partition)
        state.drained[place] = report = msgspec.structs.replace(_report(state, partition), drained=True)
        state.reports.append(report)
    for place, partition in list(state.releasing.items()):
        if partition.running:
            continue
        if place in state.dirty or place in state.committing:
            continue
        assert partition.open == 0, partition.open
        state.reports.append(_report(state, partition))


def _report(state: WorkerState, partition: Partition) -> PartitionReleased:
    """Let go of it, and say so."""
    assert partition.ledger is not None
    partition.state = "closed"
    _forget(state, partition)
    return PartitionReleased(
        state.identity.worker,
        state.identity.incarnation,
        partition.model,
        partition.partition.partition,
        partition.placement_epoch,
        partition.ledger.committable,
        images_at=images_at(state, partition),
    )


def drain_all(state: WorkerState) -> None:
    """Clean stop: give up everything that has not started."""
    state.awaiting.clear()
    for partition in list(state.partitions.values()):
        if partition.state == "open":
            release(state, partition)
        elif partition.ledger is None:
            close_partition(state, partition)


def _fields(partition: Partition) -> dict[str, str | int]:
    return {
        "topic": partition.partition.topic,
        "partition": partition.partition.partition,
        "placement_epoch": partition.placement_epoch,
    }
