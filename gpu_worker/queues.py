"""Admitted items that wait for an engine: by priority lane, then by model in turn, then in order of arrival.

`ordering: key` models run one item of a key at a time: later items of the key are held behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_worker.state import Engine, Item, ModelQueue, Partition, Replica
from sie_stream.ids import LANES

Room = Callable[[Replica, int], int]
"""(replica, lane) -> how many items it may be given now."""
BATCH_BYTES_MAX = 8 * 1024 * 1024
"""Inputs of one batch: bounds the message to the engine."""


@dataclass(slots=True)
class Queues:
    """All waiting items of a worker."""

    models: dict[tuple[str, str], ModelQueue] = field(default_factory=dict)
    waiting: tuple[dict[tuple[str, str], ModelQueue], ...] = field(
        default_factory=lambda: tuple({} for _ in range(LANES))
    )
    """Per lane the queues that are not empty, the one whose turn it is first."""
    keys: dict[str, dict[tuple[int, int, bytes], deque[Item]]] = field(default_factory=dict)
    """Per model the by_key that its queues share."""

    def queue(self, model: str, version: str) -> ModelQueue:
        key = (model, version)
        queue = self.models.get(key)
        if queue is None:
            queue = self.models[key] = ModelQueue(model, version)
            # A key keeps its order across versions: while one takes over from another, a partition holds work of both.
            queue.by_key = self.keys.setdefault(model, queue.by_key)
        return queue

    def extend(self, queue: ModelQueue, items: list[Item]) -> None:
        """Items of one queue wait for an engine; of a key only the first, until it has ended."""
        if queue.ordered:
            items = [item for item in items if item.key is None or self._may_wait(queue, item.key, item)]
        start, count = 0, len(items)
        while start < count:
            lane = items[start].work.priority
            end = start + 1
            while end < count and items[end].work.priority == lane:
                end += 1
            waiting = queue.lanes[lane]
            if not waiting:
                self.waiting[lane][queue.model, queue.version] = queue
            waiting.extend(items[start:end])
            start = end

    def _may_wait(self, queue: ModelQueue, key: tuple[int, int, bytes], item: Item) -> bool:
        """False: an earlier item of the key is open, and this one is held behind it."""
        held = queue.by_key.get(key)
        if held is None:
            queue.by_key[key] = deque()
            return True
        held.append(item)
        return False

    def push(self, item: Item) -> None:
        lane = item.work.priority
        queue = item.queue
        items = queue.lanes[lane]
        if not items:
            self.waiting[lane][queue.model, queue.version] = queue
        items.append(item)

    def push_front(self, item: Item) -> None:
        """Wait again, ahead of the others: it was taken before."""
        lane = item.work.priority
        queue = item.queue
        items = queue.lanes[lane]
        if not items:
            self.waiting[lane][queue.model, queue.version] = queue
        items.appendleft(item)

    def release_key(self, item: Item) -> None:
        """An item of an ordered model ended: the next one of its key may run."""
        assert item.key is not None
        held = item.queue.by_key.get(item.key)
        if held:
            self.push(held.popleft())
        elif held is not None:
            del item.queue.by_key[item.key]

    def take(self, engine: Engine, room: Room) -> tuple[Replica, list[Item]] | None:
        """The next items for this engine: highest lane first, models in turn, as many as there is room for.

        Nothing when nothing waits that a ready replica of this engine has room for.
        """
        for lane in range(LANES):
            waiting = self.waiting[lane]
            for key, queue in waiting.items():
                replica = ready_on(queue, engine)
                count = 0 if replica is None else room(replica, lane)
                if replica is None or count <= 0:
                    continue
                items = queue.lanes[lane]
                taken = _front(items, count)
                del waiting[key]
                if items:
                    waiting[key] = queue
                return replica, taken
        return None

    def drop_partition(self, partition: Partition) -> int:
        """Forget what waits of this assignment; the count of forgotten items."""
        dropped = 0
        for queue in self.models.values():
            if queue.model != partition.model:
                continue
            for lane, items in enumerate(queue.lanes):
                kept = [item for item in items if item.partition is not partition]
                if len(kept) == len(items):
                    continue
                dropped += len(items) - len(kept)
                items.clear()
                items.extend(kept)
                if not items:
                    del self.waiting[lane][queue.model, queue.version]
            owner = (partition.partition.partition, partition.placement_epoch)
            for key in [key for key in queue.by_key if key[:2] == owner]:
                dropped += len(queue.by_key.pop(key))
        return dropped

    def take_expired(self, now_ms: int) -> list[Item]:
        """Remove and return every waiting item whose deadline has passed, in queue order."""
        expired: list[Item] = []
        for lane in range(LANES):
            for key in list(self.waiting[lane]):
                queue = self.waiting[lane][key]
                if not queue.deadlines:
                    continue
                items = queue.lanes[lane]
                late = [item for item in items if is_expired(item, now_ms)]
                if not late:
                    continue
                expired.extend(late)
                kept = [item for item in items if not is_expired(item, now_ms)]
                items.clear()
                items.extend(kept)
                if not items:
                    del self.waiting[lane][key]
        return expired


def is_expired(item: Item, now_ms: int) -> bool:
    return 0 < item.work.deadline_at_ms <= now_ms


def ready_on(queue: ModelQueue, engine: Engine) -> Replica | None:
    """The best ready replica of this queue that lives in `engine`."""
    for replica in queue.replicas:
        if replica.engine == engine.key and replica.state == "ready":
            return replica
    return None


def _front(items: deque[Item], count: int) -> list[Item]:
    """Take up to `count` items, and no more than BATCH_BYTES_MAX of inputs."""
    taken = [items.popleft() for _ in range(min(count, len(items)))]
    while len(taken) > 1 and sum(len(item.work.inputs) for item in taken) > BATCH_BYTES_MAX:
        half = len(taken) // 2
        items.extendleft(reversed(taken[half:]))
        del taken[half:]
    return taken
