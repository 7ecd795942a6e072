"""The mutable things a worker machine keeps: partitions, items, replicas, engines. Only the machine changes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec import Struct

from gpu_worker.engine_port import EngineKey
from gpu_worker.sequence_images import Run, SequenceImage
from schemas.codec import ReplicaResults
from sie_stream.control import ModelLaunch, PartitionOrder
from sie_stream.ids import LANES, TopicPartition
from sie_stream.offsets import OffsetLedger
from sie_stream.postprocess import Stage2
from sie_stream.privacy.vault import Guard
from sie_stream.provenance import Placed
from sie_stream.records import Headers, LogRecord, WorkItem
from sie_stream.touches import CameIn, Touch

NEVER = float("-inf")


@dataclass(slots=True, eq=False)
class Partition:
    """One assignment of one partition. A later assignment of the same partition is another object."""

    partition: TopicPartition
    model: str
    placement_epoch: int
    ledger: OffsetLedger | None = None
    """There once the committed position is known."""
    state: Literal["positioning", "open", "releasing", "closed"] = "positioning"
    order: PartitionOrder = "assigned"
    """What the newest row says: releasing, to be given back as soon as possible; draining, once it is worked off."""
    lane: int = 0
    """Lane of its newest item."""
    open: int = 0
    """Admitted and unfinished."""
    open_bytes: int = 0
    """Size of their records; what waited when the partition was given back counts until it is forgotten."""
    running: int = 0
    """Part of a batch that an engine holds."""
    backlog: list[LogRecord] = field(default_factory=list)
    """Polled, but the ledger cannot start them yet; the partition is paused meanwhile."""
    paused: bool = False
    written_at: float = NEVER
    """Monotonic time of the newest commit that covered it."""


class Awaited(NamedTuple):
    """An assignment that has not started; `images_at` as its row says."""

    model: str
    placement_epoch: int
    order: PartitionOrder
    images_at: str


class Item(Struct, gc=False, eq=False):
    """A work item between admission and its terminal record."""

    work: WorkItem
    partition: Partition
    offset: int
    queue: ModelQueue
    size: int
    """Bytes of its record."""
    key: tuple[int, int, bytes] | None = None
    """(partition, placement epoch, key) of a model with `ordering: key`."""
    attempts: int = 0
    """How often an engine failed while it held this item."""
    resume: bool = False
    """Its engine was killed from outside while it held this item: the next one goes on from what was kept of it."""
    told: int = 0
    """Token deltas written since an engine began it the last time, here or at an earlier owner."""
    told_as: Run | None = None
    """Who numbers them, if an earlier owner of its partition began it."""
    code: str = ""
    """Error code and message of the newest failure."""
    message: str = ""
    arrivals: tuple[tuple[int, CameIn], ...] = ()
    """Models that came to a device while it waited for one, by slot. Those of the replica that it is given to count."""
    touches: tuple[Touch, ...] = ()
    """What its result tells of moves, retries and those arrivals."""
    passed: Headers = ()
    """Headers of its work record that its result has, too."""


class Finisher(Struct, frozen=True):
    """What is the same for every result of one replica under one placement."""

    launch: ModelLaunch
    placed: Placed
    stage2: Stage2
    results: ReplicaResults
    guard: Guard | None = None
    """There when fields of the model are hashed or encrypted."""


class ReplicaKey(NamedTuple):
    model: str
    version: str
    device: str
    placement_epoch: int


@dataclass(slots=True, eq=False)
class Replica:
    """One placement of one model version on one device."""

    key: ReplicaKey
    engine: EngineKey
    slot: int
    launch: ModelLaunch
    state: Literal["waiting", "loading", "ready", "failed", "gone"] = "waiting"
    """waiting: to be loaded when its engine has time; gone: no longer wanted."""
    load_attempts: int = 0
    loading_since: float = NEVER
    memory_bytes: int = 0
    weights_digest: str = ""
    listed_at: float = NEVER
    """When the row that placed it was read, or its engine died."""
    waited_ms: int = 0
    """From there to the order to load it."""
    engine_start_ms: int = 0
    """From that order to the beginning of the load."""
    load_ms: int = 0
    warmup_ms: int = 0
    answered: bool = False
    """Whether any of its results were ready to be committed."""
    finisher: Finisher | None = None
    """There while the replica is ready."""
    sequences_max: int = 0
    """Continuous models: how many requests the engine runs at once; each is a batch of its own. 0: takes batches."""
    in_flight: int = 0
    """Continuous models: requests the engine holds."""
    movable: bool = False
    """Whether its running requests can go on elsewhere."""
    reported: bool = False
    """Whether ReplicaReady or ReplicaFailed went out."""


@dataclass(slots=True, eq=False)
class ModelQueue:
    """What waits for one version of one model."""

    model: str
    version: str
    lanes: tuple[deque[Item], ...] = field(default_factory=lambda: tuple(deque() for _ in range(LANES)))
    replicas: list[Replica] = field(default_factory=list)
    """Those that may serve it, best first; each may be in any state."""
    deadlines: bool = False
    """Whether any of its items ever had a deadline."""
    ordered: bool = False
    """Its model declares `ordering: key`."""
    by_key: dict[tuple[int, int, bytes], deque[Item]] = field(default_factory=dict)
    """`ordering: key`: keys with an item waiting or running, and the items held back behind it. Shared by all
    versions of the model: an item may be held back behind one of another version."""


class Batch(Struct, gc=False, eq=False):
    """Items an engine holds."""

    batch_id: int
    replica: Replica
    finisher: Finisher
    items: list[Item]
    submitted_at: float
    submitted_ms: int
    export: Literal["", "wanted", "asked", "stays"] = ""
    """wanted: it is to be stopped and moved; asked: its engine was told; stays: its engine keeps it to its end."""
    stopped_ms: int = 0
    """When it was stopped to be moved, here or at the owner before (wall clock)."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine process as the machine sees it."""

    key: EngineKey
    running: bool = False
    """Whether there is (or is about to be) a process."""
    replicas: int = 0
    """Models placed on it, in any state."""
    outstanding: dict[int, Batch] = field(default_factory=dict)
    """By batch id, oldest first. Changed by hold() and let_go() only."""
    batches: int = 0
    """Those of outstanding that run one after the other: all but the requests of continuous models."""
    continuous: bool = False
    """Whether it ever held a continuous model."""
    suspects: deque[Item] = field(default_factory=deque)
    """Items that were there when the engine failed; each is run alone."""
    to_load: deque[Replica] = field(default_factory=deque)
    loading: Replica | None = None
    versions: dict[str, str] = field(default_factory=dict)
    batch_ms: float = 1.0
    """Smoothed duration of a batch."""
    finished_at: float = NEVER
    """When the newest batch finished."""
    deaths_in_a_row: int = 0
    """Deaths since the engine last did something useful."""
    down_until: float = NEVER
    """No process is started before (monotonic)."""

    def hold(self, batch: Batch) -> None:
        """The engine has it from now on."""
        self.outstanding[batch.batch_id] = batch
        if batch.replica.sequences_max:
            batch.replica.in_flight += 1
        else:
            self.batches += 1

    def let_go(self, batch_id: int) -> Batch | None:
        """It ended; None for one of an engine that was given up since."""
        batch = self.outstanding.pop(batch_id, None)
        if batch is None:
            return None
        if batch.replica.sequences_max:
            batch.replica.in_flight -= 1
        else:
            self.batches -= 1
        return batch


@dataclass(slots=True)
class Kept:
    """Images for the next owner of a partition."""

    placement_epoch: int
    at_ms: float
    size: int = 0


@dataclass(slots=True)
class Fetched:
    """Images for requests of a partition that is about to start, or has started; by offset."""

    placement_epoch: int
    at_ms: float
    images: dict[int, SequenceImage]

    @property
    def size(self) -> int:
        return sum(len(image.content) for image in self.images.values())


@dataclass(slots=True)
class Handover:
    wanted: bool = False
    """Whether any batch may be waiting to be exported."""
    kept: dict[TopicPartition, Kept] = field(default_factory=dict)
    fetching: dict[TopicPartition, tuple[int, float]] = field(default_factory=dict)
    """(placement epoch, monotonic time since when its images are waited for)"""
    ordered: tuple[TopicPartition, int] | None = None
    """The one of them, and its epoch, that is being fetched."""
    fetched: dict[TopicPartition, Fetched] = field(default_factory=dict)
