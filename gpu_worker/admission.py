"""From polled records to waiting items: the worker's hot path into the engines."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.replicas import queue_of
from gpu_worker.state import Item, ModelQueue, Partition
from gpu_worker.worker_state import WorkerState
from schemas.codec import decode_work
from schemas.wire import CodecError
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord, WorkItem
from sie_stream.rollout_records import pinned_in


def admit(state: WorkerState, records: Sequence[LogRecord]) -> None:
    """Records of one poll. Records of partitions that are not ours any more are ignored."""
    start = 0
    count = len(records)
    while start < count:
        first = records[start]
        end = start + 1
        while end < count and records[end].partition == first.partition and records[end].topic == first.topic:
            end += 1
        partition = state.partitions.get(TopicPartition(first.topic, first.partition))
        if partition is not None and partition.state == "open":
            _admit_run(state, partition, records[start:end])
        start = end


def admit_backlogs(state: WorkerState) -> None:
    """Start what had to wait for room in the ledgers."""
    if not state.backlogged:
        return
    backlogged, state.backlogged = state.backlogged, {}
    for place, partition in backlogged.items():
        ledger = partition.ledger
        if partition.state != "open" or ledger is None:
            continue
        if not ledger.may_start:
            state.backlogged[place] = partition
            continue
        ledger.reread()
        records, partition.backlog = partition.backlog, []
        state.touched[partition.model] = None
        if records:
            _admit_run(state, partition, records)


def _admit_run(state: WorkerState, partition: Partition, records: Sequence[LogRecord]) -> None:
    """Records of one partition in order of offset: start what nobody has finished and the ledger takes."""
    ledger = partition.ledger
    assert ledger is not None
    if partition.backlog:
        partition.backlog.extend(records)
        return
    if records[0].offset < ledger.next_offset:  # delivered before
        records = [record for record in records if record.offset >= ledger.next_offset]
    started = ledger.start_many([record.offset for record in records])
    if len(started) != len(records):
        if ledger.refused:
            partition.backlog.extend(record for record in records if record.offset >= ledger.next_offset)
            state.touched[partition.model] = None
            state.backlogged[partition.partition] = partition
        ours = set(started)
        records = [record for record in records if record.offset in ours]
    _queue_run(state, partition, records)


def _queue_run(state: WorkerState, partition: Partition, records: Sequence[LogRecord]) -> None:
    """Decode started records and let them wait for an engine."""
    place, epoch = partition.partition.partition, partition.placement_epoch
    queue: ModelQueue | None = None
    work: WorkItem | None = None
    run: list[Item] = []
    opened = 0
    opened_bytes = 0
    for record in records:
        try:
            work = decode_work(record.value)
        except CodecError as refusal:
            _refuse(state, partition, record, refusal)
            continue
        # By the partition's model, not the item's: a variant of a model has a topic, and so a queue, of its own.
        if queue is None or work.version != queue.version:
            if queue is not None:
                state.queues.extend(queue, run)
            run = []
            queue = queue_of(state, partition.model, work.version)
        size = len(record.value or b"")
        opened_bytes += size
        item = Item(work, partition, record.offset, queue, size)
        if record.headers:
            item.passed = pinned_in(record.headers)
        if work.deadline_at_ms:
            queue.deadlines = True
        if queue.ordered and (work.key or work.session):
            item.key = (place, epoch, work.key or (work.session or "").encode())
        run.append(item)
        opened += 1
    if queue is not None and work is not None:
        state.queues.extend(queue, run)
        partition.lane = work.priority
        partition.open += opened
        partition.open_bytes += opened_bytes
        state.open_bytes += opened_bytes
        state.opened(partition.model, opened)
        state.meter.arrived(partition.model, opened)


def _refuse(state: WorkerState, partition: Partition, record: LogRecord, refusal: CodecError) -> None:
    """A record that is no work item has its terminal record at once."""
    launches = [replica.launch for replica in state.replicas.values() if replica.key.model == partition.model]
    state.outcomes.undecodable(record, launches, refusal, state.now_ms, state.output)
    assert partition.ledger is not None
    partition.ledger.finish(record.offset)
    state.dirty[partition.partition] = partition
    state.pacer.pending(state.at_ms)
