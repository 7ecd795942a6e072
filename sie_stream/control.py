"""Records of the control plane: the facts and commands on sie.cluster, and the state tables the scheduler keeps.

sie.cluster has one partition, so there is one total order. Whoever folds the same records gets the same state.
Time is the timestamp Kafka put on each record (LogAppendTime), never a clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw, Struct

from sie_stream.commands import (
    ApplyModel,
    CordonWorker,
    DeleteModel,
    DrainWorker,
    HoldTopic,
    ReleaseTopic,
    RolloutOrder,
    StartRollout,
    UncordonWorker,
    UndoDecision,
)
from sie_stream.decisions import Decision
from sie_stream.device_facts import DeviceBack, DeviceLost
from sie_stream.engine_facts import EngineLost
from sie_stream.loads import WorkerLoad, WorkWaiting
from sie_stream.replica_facts import PartitionReleased, ReplicaAnswered, ReplicaFailed, ReplicaReady
from sie_stream.rollout_records import GoldenRequest, RoutesHeld, VariantRow, VariantRule, VariantWindow

# ---------------------------------------------------------------- sie.cluster: facts reported by processes


class Device(Struct, frozen=True):
    """A place that holds models. `memory_bytes` is the declared (cpu) or measured (cuda) size."""

    device: str
    kind: str
    memory_bytes: int


class Taint(Struct, frozen=True):
    """Keeps models away from a worker unless they tolerate it, as Kubernetes means it."""

    key: str
    value: str = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class WorkerJoined(Struct, frozen=True, tag=True):
    """A worker incarnation is up, has fenced its predecessor (init_transactions succeeded) and owns nothing yet."""

    worker: str
    incarnation: str
    host: str
    pid: int
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    versions: dict[str, str]
    labels: dict[str, str] = {}
    """What node_selector of a declaration asks for."""
    taints: tuple[Taint, ...] = ()
    tier: str = ""
    """The group of workers kept apart that it belongs to; empty: none."""
    topology: Raw = Raw(b"{}")
    """Its server: a GpuTopology (sie_stream/topology/records.py) as JSON. Workers of one server say the same."""


class WorkerHeartbeat(Struct, frozen=True, tag=True):
    worker: str
    incarnation: str


class WorkerExited(Struct, frozen=True, tag=True):
    """The supervisor saw the process end. Not a fence: the scheduler still fences before it reassigns."""

    worker: str
    incarnation: str
    exit_code: int
    reporter: str


class WorkerLeft(Struct, frozen=True, tag=True):
    """Clean stop: everything finished is committed, nothing will be committed any more by this incarnation."""

    worker: str
    incarnation: str


class WorkerFenced(Struct, frozen=True, tag=True):
    """Outcome of FenceWorker: from now on no transaction of this incarnation can commit."""

    worker: str
    incarnation: str
    took_ms: int


class TopicEnsured(Struct, frozen=True, tag=True):
    """Outcome of EnsureTopic: the work topic exists with at least this many partitions."""

    model: str
    topic: str
    partitions: int


class TopicFailed(Struct, frozen=True, tag=True):
    model: str
    topic: str
    message: str


class FoldSettings(Struct, frozen=True):
    """Those settings of a leader that its decisions depend on, so that anybody can fold the log to the same end."""

    topic_prefix: str
    record_bytes_max: int
    worker_lost_after_ms: int
    tick_ms: int
    fence_timeout_ms: int
    load_timeout_ms: int
    placement_packing: Literal["spread", "binpack"] = "spread"
    rebalance_policy: Literal["never", "idle", "always"] = "never"
    trial_engines: str = ""
    """Of releases before it: no version had an engine apart."""


class SchedulerElected(Struct, frozen=True, tag=True):
    """Written in the first transaction of a new leader, so a fenced one cannot write it."""

    scheduler: str
    settings: FoldSettings | None = None
    """In force from the next record on, for every process that folds the log. None: of a release before this field."""
    release: str = ""
    """Of the software: another release may decide otherwise."""


class Tick(Struct, frozen=True, tag=True):
    """The passing of time, every settings.tick_ms, by the leader. Ticks of an earlier leader are ignored."""

    scheduler: str


ClusterRecord = (
    ApplyModel
    | DeleteModel
    | CordonWorker
    | DrainWorker
    | UncordonWorker
    | UndoDecision
    | StartRollout
    | RolloutOrder
    | VariantWindow
    | RoutesHeld
    | HoldTopic
    | ReleaseTopic
    | WorkerJoined
    | WorkerHeartbeat
    | WorkerLoad
    | WorkWaiting
    | WorkerExited
    | WorkerLeft
    | WorkerFenced
    | DeviceLost
    | DeviceBack
    | EngineLost
    | ReplicaReady
    | ReplicaAnswered
    | ReplicaFailed
    | PartitionReleased
    | TopicEnsured
    | TopicFailed
    | SchedulerElected
    | Tick
)

# ---------------------------------------------------------------- commands the fold gives to the scheduler's edge


class FenceWorker(Struct, frozen=True, tag=True):
    """init_transactions on the worker's transactional id; the outcome returns as WorkerFenced."""

    worker: str
    incarnation: str


class EnsureTopic(Struct, frozen=True, tag=True):
    model: str
    topic: str
    partitions: int


class PublishState(Struct, frozen=True, tag=True):
    """Upsert one row of a state table (models, instances, routes, placements); body None deletes it."""

    table: Literal["models", "instances", "routes", "placements"]
    name: str
    body: msgspec.Raw | None


class RecordDecision(Struct, frozen=True, tag=True):
    decision: Decision


SchedulerCommand = FenceWorker | EnsureTopic | PublishState | RecordDecision

# ---------------------------------------------------------------- rows of the state tables


TRIAL = "trial"
"""The domain (see ModelLaunch) of versions on trial."""


class ModelLaunch(Struct, frozen=True):
    """What a worker needs to run one version of a model."""

    model: str
    version: str
    instance: str
    backend: str
    source: str
    """Folder or file with the weights, as the worker sees it."""
    weights_digest: str
    config: dict[str, str | int | float | bool | list[str] | None]
    """Backend options."""
    service_type: str
    priority: int
    memory_bytes: int
    """Declared device memory: what placement reserves, on each of its devices."""
    batch_max: int
    ordering: Literal["none", "key"] = "none"
    fusion: Literal["fused", "pooled"] = "fused"
    input_schema: Raw = Raw(b"{}")
    output_schema: Raw = Raw(b"{}")
    tokenizer: str = ""
    """Path of tokenizer.json, empty for models without text."""
    pre_warmup: tuple[str, ...] = ()
    """Inputs objects (JSON texts) run before the replica is ready."""
    golden: tuple[GoldenRequest, ...] = ()
    """Checked before the replica is ready."""
    output_serializer: Literal["avro", "json"] = "avro"
    """Form of the copies on the bound output topic."""
    tensor_parallel: int = 1
    """Devices that one replica spans."""
    privacy_subject: str = ""
    """The input that names the data subject; empty: the session, record key or id of the request."""
    precision: str = ""
    """What the scheduler chose of `preferred_precision` for this replica; empty: `config` alone decides."""
    domain: str = ""
    """Which engine process of its backend on the device: models of one domain die together. `TRIAL` for versions on
    trial whose backend permits it (setting trial_engines)."""


class ModelRow(Struct, frozen=True):
    """sie.models, key = model name."""

    model: str
    version: str
    generation: int
    spec: Raw
    status: Literal["accepted", "deleting"]
    applied_at_ms: int
    not_enforced: tuple[str, ...] = ()


class ReplicaRow(Struct, frozen=True):
    worker: str
    incarnation: str
    device: str
    version: str
    state: Literal["loading", "ready", "draining", "failed"]
    placement_epoch: int
    memory_bytes: int
    """Reserved on each of its devices."""
    message: str = ""
    devices: tuple[str, ...] = ()
    """All of them, `device` first; empty in rows of before this field: `device` alone."""
    variant: str = "stable"
    """Which part of the route's traffic it answers."""
    generation: int = 0
    """Of its declaration; that of the row for replicas of what was applied last."""


class InstanceRow(Struct, frozen=True):
    """sie.instances, key = instance id."""

    instance: str
    model: str
    version: str
    status: Literal["pending", "loading", "ready", "degraded", "asleep", "deleting"]
    replicas: tuple[ReplicaRow, ...]
    message: str
    timings_ms: dict[str, int]
    """Step of its life (scheduler/life.py) -> when it was reached first, milliseconds since the epoch."""
    generation: int = 0
    """Counts accepted changes of the declaration; 0 in rows of before this field."""
    applied_offset: int = -1
    """Of the ApplyModel on sie.cluster that this row has seen last; -1 in rows of before this field."""
    given_up: bool = False
    """Replicas of this generation failed too often; they are tried again when the model is applied again."""
    replicas_wanted: int = -1
    """Of the model itself, without its variants; -1 in rows of before this field."""


class RouteRow(Struct, frozen=True):
    """sie.routes, key = model name: everything ingress needs to admit and route a request."""

    instance: str
    model: str
    route_epoch: int
    topic: str
    lanes: int
    width: int
    variants: tuple[VariantRow, ...]
    service_type: str
    priority: int
    """Default lane of requests that name none."""
    input_schema: Raw
    tokenizer: str
    tokenizer_digest: str
    context_tokens_max: int
    quota_per_s: float = 0.0
    """0: unlimited."""
    quota_burst: float = 0.0
    deadline_ms: int = 0
    """Default deadline; 0: none."""
    input_topic: str = ""
    input_bootstrap: str = ""
    """Empty: this cluster."""
    input_group: str = ""
    input_offset_reset: str = "earliest"
    input_deserializer: str = "json"
    output_topic: str = ""
    output_bootstrap: str = ""
    output_serializer: str = "avro"
    output_schema: Raw = Raw(b"{}")
    fusion: Literal["fused", "pooled"] = "fused"
    shares: tuple[int, ...] = ()
    """By bucket, its part of the keys out of 10,000; empty: all the same."""
    asleep: bool = False
    """No replica reads its topic; whoever finds work there says WorkWaiting."""
    rules: tuple[VariantRule, ...] = ()
    """The first that fits decides."""


class ReplicaPlacement(Struct, frozen=True):
    """One replica on one worker. The worker (that incarnation) loads it and answers ReplicaReady or ReplicaFailed."""

    worker: str
    incarnation: str
    device: str
    placement_epoch: int
    launch: ModelLaunch
    devices: tuple[str, ...] = ()
    """All devices that it spans, `device` first; empty in rows of before this field: `device` alone."""


PartitionOrder = Literal["assigned", "draining", "releasing"]


class PartitionPlacement(Struct, frozen=True):
    """Who works off one partition, and until when.

    `assigned`: for good. `draining`: as assigned, but only to the end it has now, then PartitionReleased (`drained`).
    `releasing`: start nothing more, finish what runs, commit it, and report PartitionReleased.
    """

    partition: int
    worker: str
    incarnation: str
    placement_epoch: int
    state: PartitionOrder
    images_at: str = ""
    """Of the owner before, as it said in PartitionReleased; only to save work: it may be gone by now."""


class PlacementRow(Struct, frozen=True):
    """sie.placements, key = model name: the desired state that workers follow. A replica not listed is unloaded."""

    model: str
    topic: str
    replicas: tuple[ReplicaPlacement, ...]
    partitions: tuple[PartitionPlacement, ...]
