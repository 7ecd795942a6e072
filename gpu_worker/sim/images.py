"""Images of running requests between workers of one process, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from gpu_worker.sequence_images import ImagesFetched, ImagesTaken, SequenceImage
from sie_stream.ids import TopicPartition

Standing = Literal["there", "silent", "gone"]
"""silent: what it is asked for never comes."""


class SimImages:
    """Implements ImagesPort. `workers`: all that ever were, by their address. `standing`: how its process is now."""

    def __init__(
        self, address: str, workers: dict[str, SimImages], standing: Callable[[], Standing] = lambda: "there"
    ) -> None:
        self.kept: dict[TopicPartition, list[SequenceImage]] = {}
        self.standing = standing
        self._workers = workers
        self._events: list[ImagesFetched | ImagesTaken] = []
        workers[address] = self

    def keep(self, partition: TopicPartition, image: SequenceImage) -> None:
        self.kept.setdefault(partition, []).append(image)

    def drop(self, partition: TopicPartition) -> None:
        del self.kept[partition]

    def fetch(self, partition: TopicPartition, placement_epoch: int, images_at: str, bytes_max: int) -> None:
        other = self._workers.get(images_at)
        standing = "gone" if other is None else other.standing()
        if other is None or standing == "gone":
            self._events.append(ImagesFetched(partition, placement_epoch, (), "nobody is there"))
        elif standing == "there":
            self._events.append(ImagesFetched(partition, placement_epoch, other.give(partition)))

    def give(self, partition: TopicPartition) -> list[SequenceImage]:
        images = self.kept.pop(partition, [])
        if images:
            self._events.append(ImagesTaken(partition))
        return images

    def come(self, event: ImagesFetched) -> None:
        """Fault: an answer, whatever was asked."""
        self._events.append(event)

    def poll(self) -> Sequence[ImagesFetched | ImagesTaken]:
        events, self._events = self._events, []
        return events
