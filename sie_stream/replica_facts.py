"""Facts on sie.cluster about replicas and the partitions they hold; `control` lists them with all others."""

from __future__ import annotations

from msgspec import Struct


class ReplicaReady(Struct, frozen=True, tag=True):
    worker: str
    incarnation: str
    model: str
    version: str
    placement_epoch: int
    """Epoch of the ReplicaPlacement this answers."""
    memory_bytes: int
    load_ms: int
    warmup_ms: int
    waited_ms: int = 0
    """In the worker, before its engine was asked to load it: other loads came first, or the engine had died."""
    engine_start_ms: int = 0
    """From there to the beginning of the load: the engine process had to start, or was busy."""


class ReplicaAnswered(Struct, frozen=True, tag=True):
    """The first results of this replica are committed; sent after that commit succeeded."""

    worker: str
    incarnation: str
    model: str
    version: str
    placement_epoch: int


class ReplicaFailed(Struct, frozen=True, tag=True):
    worker: str
    incarnation: str
    model: str
    version: str
    placement_epoch: int
    code: str
    message: str


class PartitionReleased(Struct, frozen=True, tag=True):
    """The worker let the partition go and has committed `offset`; sent after that commit succeeded."""

    worker: str
    incarnation: str
    model: str
    partition: int
    placement_epoch: int
    """Epoch of the assignment that ended."""
    offset: int
    drained: bool = False
    """Asked by `draining`: everything that was in the partition is worked off, nothing is left behind."""
    images_at: str = ""
    """Where the next owner may fetch requests that ran (host:port#secret), to go on with them; empty: none."""
