"""`ordering: key` across versions: while one version takes over, a partition holds work of both."""

from __future__ import annotations

from gpu_worker.engine_port import EngineKey
from gpu_worker.queues import Queues
from gpu_worker.state import Engine, Item, ModelQueue, Partition, Replica, ReplicaKey
from sie_stream.control import ModelLaunch
from sie_stream.ids import TopicPartition
from sie_stream.records import WorkItem

ENGINE = EngineKey("cpu:0", "sim")
PARTITION = Partition(TopicPartition("sie.work.m", 0), "m", 7)


def item(offset: int, key: bytes, queue: ModelQueue) -> Item:
    work = WorkItem(
        f"r{offset}", "mi", "m", queue.version, "stable", 1, 0, b"{}", key, "sie.requests", 0, offset, 0, 0, 0
    )
    return Item(work, PARTITION, offset, queue, 10, (0, PARTITION.placement_epoch, key))


def serving(queues: Queues, version: str) -> ModelQueue:
    queue = queues.queue("m", version)
    launch = ModelLaunch("m", version, "mi", "sim", "", "", {}, "scoring", 0, 1, 8, ordering="key")
    replica = Replica(ReplicaKey("m", version, "cpu:0", 7), ENGINE, 1, launch, state="ready")
    queue.replicas.append(replica)
    queue.ordered = True
    return queue


def taken(queues: Queues) -> list[int]:
    """Offsets of everything that may run now."""
    offsets = []
    while (batch := queues.take(Engine(ENGINE), lambda replica, lane: replica.launch.batch_max)) is not None:
        offsets += [one.offset for one in batch[1]]
    return offsets


def test_the_new_version_waits_for_the_old_one_of_the_same_key() -> None:
    queues = Queues()
    old, new = serving(queues, "1"), serving(queues, "2")
    first, second, third = item(1, b"k", old), item(2, b"k", new), item(3, b"k", old)
    queues.extend(old, [first])
    queues.extend(new, [second, item(4, b"other", new)])
    queues.extend(old, [third])
    assert taken(queues) == [1, 4]
    queues.release_key(first)
    assert taken(queues) == [2]
    queues.release_key(second)
    assert taken(queues) == [3]


def test_a_partition_given_back_forgets_what_was_held_in_every_version() -> None:
    queues = Queues()
    old, new = serving(queues, "1"), serving(queues, "2")
    queues.extend(old, [item(1, b"k", old)])
    queues.extend(new, [item(2, b"k", new), item(3, b"k", new)])
    assert queues.drop_partition(PARTITION) == 3
    assert taken(queues) == []
    queues.extend(new, [item(9, b"k", new)])
    assert taken(queues) == [9]
