"""Events the worker machine takes in and commands it gives out: closed unions, frozen values."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw, Struct

from gpu_worker.backends.base import EngineInput
from gpu_worker.engine_port import EngineEvent, EngineKey
from gpu_worker.memory.slots import Below
from gpu_worker.sequence_images import ImagesFetched, ImagesTaken, SequenceImage
from sie_stream.control import ClusterRecord, Device, ModelLaunch, PlacementRow, Taint
from sie_stream.ids import TopicPartition
from sie_stream.records import CommittedOffset, LogRecord, LogWrite

# ---------------------------------------------------------------- events


class TimePassed(Struct, frozen=True, gc=False):
    """First event of every turn: what time it is."""

    now_ms: int
    """Milliseconds since the epoch; may step."""
    at_ms: float
    """Monotonic milliseconds; only differences mean anything."""


class RecordsPolled(Struct, frozen=True):
    """Records of work partitions, in the order of the log within each partition."""

    records: Sequence[LogRecord]


class PlacementChanged(Struct, frozen=True):
    """The desired state of one model; `row` None: the model is gone."""

    model: str
    row: PlacementRow | None


class PlacementUnreadable(Struct, frozen=True):
    """Somebody wrote something else to the placements table: what is placed stays as it is."""

    model: str
    message: str


class DataKeyChanged(Struct, frozen=True):
    """A record of sie.keys, in order; `value` None: a data key was shredded."""

    key: bytes | None
    value: bytes | None


class TopicMissing(Struct, frozen=True):
    """A topic that placements are not read without does not exist; told again while that is so."""

    topic: str
    advice: str


class PartitionPositioned(Struct, frozen=True):
    """Answer to PositionPartitions: where the group stands. The reader is already reading there."""

    partition: TopicPartition
    placement_epoch: int
    committed: CommittedOffset
    """Without a committed offset this is the beginning of the partition."""


class PartitionReadOut(Struct, frozen=True):
    """Answer to DrainPartitions: all that was in the partition then has come as RecordsPolled of earlier turns."""

    partition: TopicPartition
    placement_epoch: int


class PositionLost(Struct, frozen=True):
    """Retention removed what was to be read next; reading went on at `continued_at`."""

    partition: TopicPartition
    wanted: int
    continued_at: int


class CommitSucceeded(Struct, frozen=True):
    commit_id: int
    took_ms: float


class CommitAborted(Struct, frozen=True):
    """Nothing of that commit will ever be seen; the same results are to be committed again."""

    commit_id: int
    reason: str


class DeviceFailed(Struct, frozen=True):
    """One of our devices is gone; `cause` as the driver says it."""

    device: str
    cause: str


class DeviceMended(Struct, frozen=True):
    """It is in order again."""

    device: str


class StopRequested(Struct, frozen=True):
    """Start nothing more; finish what runs, commit it, and leave."""


WorkerEvent = (
    TimePassed
    | RecordsPolled
    | PlacementChanged
    | PlacementUnreadable
    | DataKeyChanged
    | TopicMissing
    | PartitionPositioned
    | PartitionReadOut
    | PositionLost
    | CommitSucceeded
    | CommitAborted
    | DeviceFailed
    | DeviceMended
    | StopRequested
    | ImagesFetched
    | ImagesTaken
    | EngineEvent
)

# ---------------------------------------------------------------- commands


class LoadModel(Struct, frozen=True):
    engine: EngineKey
    slot: int
    launch: ModelLaunch


class UnloadModel(Struct, frozen=True):
    engine: EngineKey
    slot: int


class ActivateModel(Struct, frozen=True):
    """Bring its weights to these pages of its device."""

    engine: EngineKey
    slot: int
    pages: tuple[int, ...]


class DeactivateModel(Struct, frozen=True):
    """It leaves the device: its pages are given to others."""

    engine: EngineKey
    slot: int


class MoveModelImage(Struct, frozen=True):
    """Keep its weights in this tier, for when it comes to the device again."""

    engine: EngineKey
    slot: int
    to: Below


class SubmitBatch(Struct, frozen=True):
    engine: EngineKey
    batch_id: int
    slot: int
    items: Sequence[EngineInput]
    image: bytes = b""
    """What its one request goes on from."""


class ExportSequences(Struct, frozen=True):
    """Stop these requests and bring their images here; the answers are SequenceExported."""

    engine: EngineKey
    batch_ids: tuple[int, ...]
    bytes_max: int


class KeepImage(Struct, frozen=True):
    """For the next owner of the partition."""

    partition: TopicPartition
    image: SequenceImage


class DropImages(Struct, frozen=True):
    """Nobody came for the images of this partition, or they are those of an earlier assignment."""

    partition: TopicPartition


class FetchImages(Struct, frozen=True):
    """Ask the owner before for images of the partition; the answer is ImagesFetched."""

    partition: TopicPartition
    placement_epoch: int
    images_at: str
    bytes_max: int


class CancelBatch(Struct, frozen=True):
    """Its partition is another worker's now: the engine need not finish it."""

    engine: EngineKey
    batch_id: int


class StopEngine(Struct, frozen=True):
    """Kill the engine process; the next LoadModel starts a new one."""

    engine: EngineKey
    reason: str


class PositionPartitions(Struct, frozen=True):
    """Look up the committed offsets and start reading there; the answers are PartitionPositioned."""

    partitions: tuple[tuple[TopicPartition, int], ...]
    """(partition, placement epoch)"""


class DrainPartitions(Struct, frozen=True):
    """Look up where these partitions end now, and say PartitionReadOut once they are read to there."""

    partitions: tuple[tuple[TopicPartition, int], ...]
    """(partition, placement epoch)"""


class UnassignPartitions(Struct, frozen=True):
    partitions: tuple[TopicPartition, ...]


class PausePartitions(Struct, frozen=True):
    partitions: tuple[TopicPartition, ...]


class ResumePartitions(Struct, frozen=True):
    partitions: tuple[TopicPartition, ...]


class Commit(Struct, frozen=True):
    """One transaction: terminal records, raw outputs and dead letters, with the offsets they answer."""

    commit_id: int
    writes: Sequence[LogWrite]
    copies: Sequence[LogWrite]
    """The same results for bound output topics and reply topics, which may not exist."""
    offsets: dict[TopicPartition, CommittedOffset]


class SendReports(Struct, frozen=True):
    """Facts for sie.cluster, outside any transaction."""

    reports: tuple[ClusterRecord, ...]


class StreamTokens(Struct, frozen=True):
    """Provisional records for sie.tokens, outside any transaction; they may be lost."""

    writes: Sequence[LogWrite]


class Note(Struct, frozen=True):
    """Something a person may want to read in the log of the worker."""

    event: str
    fields: dict[str, str | int | float]


WorkerCommand = (
    LoadModel
    | UnloadModel
    | ActivateModel
    | DeactivateModel
    | MoveModelImage
    | SubmitBatch
    | ExportSequences
    | KeepImage
    | DropImages
    | FetchImages
    | CancelBatch
    | StopEngine
    | PositionPartitions
    | DrainPartitions
    | UnassignPartitions
    | PausePartitions
    | ResumePartitions
    | Commit
    | SendReports
    | StreamTokens
    | Note
)


class Identity(Struct, frozen=True):
    """Who this worker is, for the whole life of the process."""

    worker: str
    incarnation: str
    host: str
    pid: int
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    versions: dict[str, str]
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    tier: str = ""
    topology: Raw = Raw(b"{}")
    """GpuTopology as JSON, for the scheduler."""
    images_at: str = ""
    """Where others may fetch requests that ran here; empty: running requests are not moved."""
