"""What the topics say about one request, before it is put in order. Read by the command line, judged by `story`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from sie_stream.control import ClusterRecord, PartitionPlacement
from sie_stream.decisions import Decision
from sie_stream.ids import TopicPartition
from sie_stream.origin import Origin
from sie_stream.records import CommittedOffset, DeadLetter, InferenceRequest, Result, WorkItem
from sie_stream.rollout_records import answering_unit
from sie_stream.touches import Touch


class Found(Struct, frozen=True):
    """Where a record is, and the time on it (of whoever wrote it; on sie.cluster of the broker)."""

    place: TopicPartition
    offset: int
    timestamp_ms: int

    def __str__(self) -> str:
        return f"{self.place.topic}/{self.place.partition}@{self.offset}"


class Source(Struct, frozen=True):
    """A request record."""

    at: Found
    size: int
    """Bytes of the value."""
    traceparent: str | None = None
    request: InferenceRequest | None = None
    """None: it cannot be read as a request."""
    origin: Origin | None = None
    """A bridge brought it from there."""
    bound: bool = False
    """It is on a topic that is bound to a model, not on the common one."""


class ClusterFact(Struct, frozen=True):
    """A record of sie.cluster."""

    offset: int
    at_ms: int
    record: ClusterRecord


class Neighbour(Struct, frozen=True):
    """Another request of the same engine batch."""

    request_id: str
    status: str
    total_ms: float


class Evidence(Struct, frozen=True, kw_only=True):
    """Everything found. What is None was looked for and is not there; `notes` says what is gone, or was not read."""

    request_id: str
    now_ms: int
    sources: tuple[Source, ...] = ()
    """Records that carry the id, oldest first."""
    work: WorkItem | None = None
    work_at: Found | None = None
    result: Result | None = None
    result_at: Found | None = None
    other_results: tuple[Found, ...] = ()
    """More terminal records of the same id: it was sent again after the window of ingress."""
    touches: tuple[Touch, ...] = ()
    """What its worker told beside the result: models that came in for it, moves, retries. Of an open request: where its
    model is, if it is on no device, by the worker's telemetry."""
    letter: DeadLetter | None = None
    letter_at: Found | None = None
    neighbours: tuple[Neighbour, ...] = ()
    placed: Decision | None = None
    """The decision that put the replica, which answered, where it was."""
    decisions: tuple[Decision, ...] = ()
    """Made between the request and its end."""
    facts: tuple[ClusterFact, ...] = ()
    """The same, on sie.cluster."""
    ingress_committed: int | None = None
    """Of the first source's partition."""
    work_committed: CommittedOffset | None = None
    work_finished: bool = False
    """The workers' ledger says so."""
    owner: PartitionPlacement | None = None
    """Who works the partition off now."""
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        """Empty: neither a result nor a work item says."""
        said = self.result or self.work
        return "" if said is None else said.model

    @property
    def unit(self) -> str:
        """The model, or the variant of it, that answers: what the control plane names."""
        said = self.result or self.work
        return "" if said is None else answering_unit(said.model, said.variant)


Stage = Literal[
    "bridge",
    "client",
    "repeat",
    "ingress",
    "placement",
    "queue",
    "control",
    "device",
    "moved",
    "retried",
    "worker",
    "engine",
    "egress",
    "result",
    "deadletter",
    "open",
]


class Step(Struct, frozen=True):
    """One line of a trace."""

    stage: Stage
    at_ms: int
    what: str
    lasted_ms: float | None = None
    where: str = ""
    """topic/partition@offset."""


class Trace(Struct, frozen=True, kw_only=True):
    """A request from beginning to end, in causal order."""

    request_id: str
    state: str
    """ok, rejected, expired, shed, failed; or open, repeat, unknown."""
    verdict: str
    """One sentence: how it ended and what took longest."""
    model: str = ""
    version: str = ""
    worker: str = ""
    incarnation: str = ""
    device: str = ""
    traceparent: str | None = None
    attempts: int = 0
    """How often workers may have begun it; 0: no worker had it."""
    steps: tuple[Step, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    batch_size: int = 0
    durations_ms: dict[str, float] = {}
    deadline_left_ms: int | None = None
    """Time left at the end; negative: too late. None: no deadline."""
    notes: tuple[str, ...] = ()
    touches: tuple[Touch, ...] = ()
    """What its worker told: models that came to a device while it waited, moves between workers, retries. The steps
    `device`, `moved` and `retried` say the same in words."""
    origin: Origin | None = None
    """The record of another cluster that a bridge made the request of."""
