"""Everything one worker knows, and the commands of the turn that is being decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_worker.engine_port import EngineKey
from gpu_worker.facts import Identity, Note, WorkerCommand
from gpu_worker.load_meter import LoadMeter
from gpu_worker.managed import Managed
from gpu_worker.outcomes import Outcomes, Output
from gpu_worker.pacing import CommitPacer
from gpu_worker.queues import Queues
from gpu_worker.state import Awaited, Engine, Handover, Partition, Replica, ReplicaKey
from sie_stream.control import ClusterRecord, PartitionReleased
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.records import LogWrite
from sie_stream.settings import Settings


@dataclass(slots=True)
class WorkerState:
    identity: Identity
    settings: Settings
    outcomes: Outcomes
    pacer: CommitPacer
    queues: Queues = field(default_factory=Queues)
    now_ms: int = 0
    at_ms: float = 0.0

    replicas: dict[ReplicaKey, Replica] = field(default_factory=dict)
    slots: dict[int, Replica] = field(default_factory=dict)
    engines: dict[EngineKey, Engine] = field(default_factory=dict)
    next_slot: int = 1
    next_batch: int = 1

    partitions: dict[TopicPartition, Partition] = field(default_factory=dict)
    by_model: dict[str, dict[TopicPartition, Partition]] = field(default_factory=dict)
    """The same partitions, by model."""
    releasing: dict[TopicPartition, Partition] = field(default_factory=dict)
    """Those of them that are to be given back: nothing more is started."""
    read_out: dict[TopicPartition, Partition] = field(default_factory=dict)
    """Those of them that are draining and read to their end: given back once nothing of them is in work."""
    drained: dict[TopicPartition, PartitionReleased] = field(default_factory=dict)
    """What was reported of partitions that were worked off: that assignment is over, whatever rows still say."""
    awaiting: dict[TopicPartition, Awaited] = field(default_factory=dict)
    """Assignments that start once the results of an earlier one are committed and their images are here."""
    dirty: dict[TopicPartition, Partition] = field(default_factory=dict)
    """Partitions with finished offsets that are in no commit yet."""
    backlogged: dict[TopicPartition, Partition] = field(default_factory=dict)
    """Partitions with a backlog that may have room again."""
    committing: dict[TopicPartition, Partition] = field(default_factory=dict)
    """Partitions of the commit under way."""
    open_by_model: dict[str, int] = field(default_factory=dict)
    """Admitted and unfinished, all lanes."""
    open_total: int = 0
    open_bytes: int = 0
    """Size of the records of all admitted and unfinished items."""
    touched: dict[str, None] = field(default_factory=dict)
    """Models whose count changed since back pressure was last looked at."""
    model_caps: dict[str, int] = field(default_factory=dict)
    """Computed when needed, forgotten when the replicas of the model change."""
    pressure_band: tuple[bool, ...] = ()
    """Which of the worker-wide thresholds were exceeded when back pressure was last looked at."""
    full_since: dict[TopicPartition, float] = field(default_factory=dict)
    """Partitions above a cap that are not paused yet; while there is one, nothing is polled."""
    output: Output = field(default_factory=lambda: Output([], []))
    """Results that are in no commit yet."""

    deltas: list[LogWrite] = field(default_factory=list)
    """Of this turn, for sie.tokens."""

    first_answers: list[Replica] = field(default_factory=list)
    """Replicas whose first results are in no commit yet."""

    handover: Handover = field(default_factory=Handover)
    """Running requests that come and go with their partitions."""
    managed: dict[str, Managed] = field(default_factory=dict)
    """Devices with a budget, where models come and go."""
    meter: LoadMeter = field(default_factory=LoadMeter)
    stopping: bool = False
    commands: list[WorkerCommand] = field(default_factory=list)
    reports: list[ClusterRecord] = field(default_factory=list)

    @property
    def names(self) -> TopicNames:
        return self.settings.topics

    def note(self, event: str, **fields: str | int | float) -> None:
        self.commands.append(Note(event, fields))

    def opened(self, model: str, count: int) -> None:
        self.open_by_model[model] = self.open_by_model.get(model, 0) + count
        self.open_total += count
        self.touched[model] = None

    def closed(self, model: str, count: int) -> None:
        left = self.open_by_model.get(model, 0) - count
        assert left >= 0, (model, left)
        self.open_by_model[model] = left
        self.open_total -= count
        self.touched[model] = None
