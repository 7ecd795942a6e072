"""Workers as the scheduler sees them: its newest snapshot, folded up to the end of sie.cluster by the same code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from scheduler.guard import GuardedMachine
from scheduler.snapshots import newest_snapshot
from scheduler.state import ClusterState
from schemas.codec import decode_cluster
from schemas.wire import CodecError
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.tables import read_to_end
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord


def cluster_state(connection: Connection) -> ClusterState:
    """The present state of the control plane, computed here and not asked for."""
    cluster = connection.settings.topics.cluster
    reader = connection.reader()
    try:
        machine = from_snapshot(connection, reader)
        fold(machine, read_to_end(reader, cluster, {TopicPartition(cluster, 0): machine.state.next_offset}))
        return machine.state
    finally:
        reader.close()


def from_snapshot(connection: Connection, reader: KafkaReader) -> GuardedMachine:
    """As of the newest snapshot; what came on sie.cluster since is to be folded."""
    snapshots = read_to_end(reader, connection.settings.topics.snapshots)
    return GuardedMachine(connection.settings, newest_snapshot(snapshots))


def fold(machine: GuardedMachine, records: Iterable[LogRecord]) -> None:
    for record in records:
        try:
            fact = decode_cluster(record.value or b"")
        except CodecError:
            continue  # the scheduler skips it too, and says so in its log
        machine.step(record.offset, record.timestamp_ms, fact)


def worker_rows(connection: Connection) -> list[dict[str, Any]]:
    """One row per worker that ever joined: present incarnation, state, devices, what it holds."""
    state = cluster_state(connection)
    models: Counter[str] = Counter()
    partitions: Counter[str] = Counter()
    for model in state.models.values():
        models.update(replica.worker for replica in model.replicas)
        partitions.update(partition.owner.worker for partition in model.partitions if partition.owner is not None)
    return [
        {
            "worker": worker.worker,
            "state": worker.status,
            "service": state.cordons[worker.worker].phase if worker.worker in state.cordons else "in service",
            "incarnation": worker.incarnation,
            "host": worker.host,
            "pid": worker.pid,
            "devices": [f"{device.device} {device.memory_bytes / 2**30:.1f} GiB" for device in worker.devices],
            "backends": list(worker.backends),
            "models": models[worker.worker],
            "partitions": partitions[worker.worker],
            "last_heard_ms": worker.last_heard_ms,
            "versions": worker.versions,
        }
        for worker in sorted(state.workers.values(), key=lambda found: found.worker)
    ]
