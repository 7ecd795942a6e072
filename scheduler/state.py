"""What the scheduler knows: the fold of sie.cluster. Mutable, owned by one machine, changed only inside `step`.

Every dict is iterated in the order its keys were first written, which the log decides, or sorted; so the same log gives
the same state and the same bytes in every process. `to_bytes` and `from_bytes` carry it through sie.snapshots.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw, Struct, field

from scheduler.autoscale import ScalePolicy, ScaleState
from scheduler.busy import Busy
from scheduler.limits import ENGINE_AWAY_MS, LOAD_GRACE_MS, NEVER_MS, UNSTABLE_CALM_MS
from scheduler.partitions import PartitionState, ReplicaKey
from scheduler.plans import PlanUnderWay
from scheduler.rollout import RolloutState
from scheduler.rules import PlacementRules
from scheduler.seats import Seat
from scheduler.time_slices import Slices
from scheduler.traffic import TrafficState
from scheduler.worker_state import Cordon, Down, Hold, LostAt, WorkerState
from scheduler.yielding import YieldState
from sie_stream.control import FoldSettings, ModelLaunch, RouteRow
from sie_stream.ids import LANES

STATE_FORMAT = 4
"""Raised when an older snapshot could not be read as this one; the loader then folds from the beginning."""

ROLLOUTS_KEPT = 8
"""Of a model, after they ended."""

JOURNAL_MAX = 16
"""Changes of a model's placement that can be undone, the newest ones."""


class ReplicaState(Struct):
    """One replica of one generation of a model on one worker incarnation."""

    worker: str
    incarnation: str
    device: str
    generation: int
    placement_epoch: int
    memory_bytes: int
    """On each of its devices."""
    placed_ms: int
    devices: tuple[str, ...] = ()
    """All of a replica that spans several, `device` first; empty: `device` alone."""
    state: Literal["loading", "ready", "draining"] = "loading"
    leaving: bool = False
    """It serves until its replacement does."""
    leaving_for: str = ""
    """The decision, an undo or a plan, that wants it gone; empty: another reason."""
    planned: bool = False
    """That decision is a plan."""
    down: Down | None = None
    """Its engine ended, and it is not back yet. It keeps its partitions."""
    precision: str = ""
    """What its weights are loaded in; empty: what backend.config says."""
    back_ms: int = -ENGINE_AWAY_MS
    """When its engine came back last; the default: it never ended."""

    @property
    def awaited(self) -> bool:
        """Its worker is to say that it is ready, for the first time or again."""
        return self.state == "loading" or (self.state == "ready" and self.down is not None)

    @property
    def key(self) -> ReplicaKey:
        return ReplicaKey(self.worker, self.incarnation, self.placement_epoch)

    @property
    def spans(self) -> tuple[str, ...]:
        """All its devices."""
        return self.devices or (self.device,)

    @property
    def shown(self) -> str:
        """Its devices, for people: `cuda:0`, `cuda:0+cuda:1`."""
        return "+".join(self.spans)

    @property
    def seat(self) -> Seat:
        return (self.worker, *self.devices) if self.devices else (self.worker, self.device)


class IngressState(Struct):
    """An ingress process, as it last said itself."""

    heard_ms: int
    epochs: dict[str, int] = field(default_factory=dict)
    """{model: route_epoch} that it routes by."""


class RouteWait(Struct, frozen=True):
    """A route that was published, until every ingress holds it."""

    epoch: int
    since_ms: int
    told: bool = False
    """That it takes long was said."""


class LoadTally(Struct):
    """What workers reported of one model since `since_ms`. It grows with every report; the next round has a new one."""

    since_ms: int = 0
    arrivals: int = 0
    completions: int = 0
    busy_ms: int = 0
    p99_ms: dict[str, int] = {}
    """By worker, the largest it reported."""
    waiting: dict[str, int] = {}
    """By worker, as of its newest report."""
    running: dict[str, int] = {}


class PlacementChange(Struct, frozen=True):
    """One decision that changed where a model's replicas are."""

    decision: str
    before: tuple[Seat, ...]
    """Of the replicas of the then present generation, before it."""


class ModelState(Struct):
    """One declared model: what was asked for, and how far it got."""

    model: str
    instance: str
    spec: Raw
    """The accepted spec as canonical JSON."""
    version: str
    generation: int
    """Counts accepted changes of the spec that need new replicas (see redeclared.py)."""
    launches: dict[int, ModelLaunch]
    """By generation: the present one, and those that still have replicas."""
    route: RouteRow
    """Route of the present generation; epoch and width are filled in when it is published."""
    not_enforced: tuple[str, ...]
    replicas_wanted: int
    width: int
    """Buckets per lane; never below that of the topic as it exists."""
    applied_ms: int
    status: Literal["accepted", "deleting"] = "accepted"
    delete_at_ms: int = NEVER_MS
    """When the linger of a deleted model is over, so that it ends with what is in its topic."""
    give_up_at_ms: int = NEVER_MS
    """When a deleted model that is not worked off, and has no replica to do it, is dropped all the same."""
    topic_due_ms: int = NEVER_MS
    """When EnsureTopic is emitted (again), as long as no TopicEnsured answers it."""
    topic_failures: int = 0
    routed_generation: int = 0
    """Generation of the published route; 0: none is published."""
    published_route: RouteRow | None = None
    """The route as it was last published."""
    replicas: list[ReplicaState] = field(default_factory=list)
    """In the order they were placed."""
    partitions: list[PartitionState] = field(default_factory=list)
    """Index = partition number. Empty until the topic exists."""
    failures: int = 0
    """Replicas of this generation that failed since the last success or apply."""
    retry_at_ms: int = 0
    """Not placed again before this."""
    failed_on: tuple[tuple[str, str], ...] = ()
    """(worker, device) where this generation failed."""
    unplaced: tuple[str, ...] = ()
    """Why the last attempt to place a replica found no room; said once, and again when it changes."""
    lost_workers: tuple[str, ...] = ()
    """Workers that held a ready replica and were lost; preferred when they come back."""
    lost_at: LostAt | None = None
    """Why its newest missing replica is missing, when it failed or a worker or a device was lost with it."""
    wait_until_ms: int = 0
    """A model that still serves waits this long for a lost worker to come back, before a replica goes elsewhere."""
    try_at_ms: int = NEVER_MS
    """When a missing replica that waits (backoff, or a lost worker) is due; NEVER_MS when it waits for room."""
    message: str = ""
    """Why it is not ready, for people."""
    timings_ms: dict[str, int] = field(default_factory=dict)
    applied_offset: int = -1
    """Offset of the ApplyModel that was accepted last."""
    rules: PlacementRules = PlacementRules()
    pool: str = ""
    """Where it is kept, on top of its declaration, because it gave way or comes back from that; empty: nowhere."""
    scaling: ScalePolicy | None = None
    """None: the declaration fixes the number of replicas."""
    scale_state: ScaleState | None = None
    load: LoadTally = field(default_factory=LoadTally)
    busy: Busy = Busy()
    """How busy it keeps its devices."""
    sla_missed: tuple[str, ...] = ()
    """Kinds of devices on which it misses its SLA, as measured (see rebalance.py)."""
    sla_streak: dict[str, int] = {}
    """By kind: reports in a row above the SLA; below 0: well below it."""
    traffic: TrafficState | None = None
    """Which part of its keys each of its workers gets; None: it has one, or cannot be directed."""
    directed_ms: int = 0
    """When the shares of its route last changed."""
    needed: int = 0
    """Replicas that its load needs, whatever is allowed; 0: not known yet."""
    cramped_until_ms: int = 0
    """It needs more replicas than it may have, or did a while ago; 0: it does not."""
    cold_start_ms: int = 0
    """From placed to ready, of the replica that became ready last."""
    rollouts: dict[str, RolloutState] = field(default_factory=dict)
    """By variant: those under way."""
    rollout_history: tuple[RolloutState, ...] = ()
    """Those that ended, the newest last; at most ROLLOUTS_KEPT."""
    route_wait: RouteWait | None = None
    """The published route is not held by every ingress yet."""
    unstable_ms: int = -UNSTABLE_CALM_MS
    """When a replica of it left an unstable engine last."""
    journal: tuple[PlacementChange, ...] = ()
    """What `undo` can take back, the newest last; at most JOURNAL_MAX."""
    route_changed: bool = False
    """The declaration changed beneath its replicas, and the published route is that of before."""
    owes: bool = False
    """A variant whose topic may hold requests of a rollout that ended: also when it is rolled out anew."""
    rest_waits: bool = False
    """That these have nobody to work them off was said (see rollout_rests.py)."""

    @property
    def launch(self) -> ModelLaunch:
        return self.launches[self.generation]

    @property
    def topic_ready(self) -> bool:
        """The topic has all the partitions that the present generation wants."""
        return len(self.partitions) >= LANES * self.width

    @property
    def working_off(self) -> bool:
        """Deleted, and nothing is added to its topic any more: it serves to the end of that."""
        return self.status == "deleting" and self.delete_at_ms == NEVER_MS

    def replica_at(self, worker: str, incarnation: str, placement_epoch: int) -> ReplicaState | None:
        for replica in self.replicas:
            if replica.placement_epoch == placement_epoch and (replica.worker, replica.incarnation) == (
                worker,
                incarnation,
            ):
                return replica
        return None

    def present(self) -> list[ReplicaState]:
        """Replicas of the present generation that load or serve, and are to stay."""
        generation = self.generation  # said out, because every tick asks for all models
        return [r for r in self.replicas if r.generation == generation and r.state != "draining" and not r.leaving]

    def stays(self, replica: ReplicaState) -> bool:
        return replica.generation == self.generation and replica.state != "draining" and not replica.leaving

    def older(self) -> list[ReplicaState]:
        """Replicas of earlier generations that still serve or drain."""
        return [r for r in self.replicas if r.generation != self.generation]


class ClusterState(Struct):
    """Everything, after folding the records below `next_offset`."""

    format: int = STATE_FORMAT
    next_offset: int = 0
    now_ms: int = 0
    """Timestamp of the last record; never steps back."""
    leader: str = ""
    plan: PlanUnderWay | None = None
    """Moves under way, one plan at a time (see replanning.py)."""
    plan_after_ms: int = 0
    """No plan that makes room is looked for before this."""
    rebalance_due_ms: int = NEVER_MS
    rebalanced_ms: int = 0
    """When a rebalance was looked for last."""
    plan_failures: int = 0
    """Plans given up since the last that ended."""
    settings: FoldSettings | None = None
    """Of the leader that was elected last; they hold for whoever folds. None: it did not say."""
    leader_is_new: bool = False
    """The leader has not ticked yet: on its first tick, side effects without an outcome are asked for again."""
    last_tick_ms: int = 0
    workers: dict[str, WorkerState] = field(default_factory=dict)
    cordons: dict[str, Cordon] = field(default_factory=dict)
    """By worker, of any incarnation."""
    holds: dict[str, Hold] = field(default_factory=dict)
    """By topic."""
    models: dict[str, ModelState] = field(default_factory=dict)
    topic_widths: dict[str, int] = field(default_factory=dict)
    """{model: width} of every work topic that was ever ensured. A topic never shrinks, and outlives its model."""
    ingresses: dict[str, IngressState] = field(default_factory=dict)
    rolling: dict[str, None] = field(default_factory=dict)
    """Models with a rollout under way, or with variants that are being worked off."""
    workers_due_ms: int = NEVER_MS
    """No worker can need attention before this; a lower bound, so that a tick usually looks at nobody."""
    models_due_ms: int = NEVER_MS
    """The same for models."""
    scale_due_ms: int = 0
    """When loads are looked at again."""
    slices: Slices = Slices({}, {}, ())
    """Which of the models that decode on a device does, and which rests."""
    yielded: YieldState = YieldState()
    """Which models gave way to others."""
    relief_unmet: bool = False
    """A pool is too full and nobody can give way; said once."""
    facts_ignored: int = 0
    """Facts of incarnations that are unknown, replaced, fenced or lost, or that answer something of the past."""
    gone_rollouts: dict[str, tuple[RolloutState, ...]] = field(default_factory=dict)
    """Rollouts of models that were deleted, without their declarations; the model deleted last stands last."""

    def live(self, worker: str, incarnation: str) -> bool:
        found = self.workers.get(worker)
        return found is not None and found.incarnation == incarnation and found.status == "live"

    def load_deadline_ms(self, replica: ReplicaState, load_timeout_ms: int) -> int:
        """When a replica that is awaited counts as failed, as far as is known now.

        Later, if its worker gets on with others.
        """
        worker = self.workers.get(replica.worker)
        since_ms = replica.placed_ms if replica.down is None else replica.down.newest_ms
        since_ms = since_ms if worker is None else max(since_ms, worker.progress_ms)
        return since_ms + load_timeout_ms + LOAD_GRACE_MS

    def empties(self, worker: str) -> bool:
        """Whether it is drained or being drained. From a worker that is only cordoned nothing has to go."""
        cordon = self.cordons.get(worker)
        return cordon is not None and cordon.phase != "cordoned"

    def takes_work(self, worker: str, incarnation: str) -> bool:
        return self.live(worker, incarnation) and not self.workers[worker].stopping


def no_room(why_not: tuple[str, ...]) -> str:
    """The message of a model that lacks a replica for these reasons; empty when there are none."""
    return "no device can hold it: " + " ".join(why_not) if why_not else ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ClusterState)


class _Head(Struct):
    """The part of a snapshot that every format has."""

    format: int = 0


_head_decoder = msgspec.json.Decoder(_Head)


def to_bytes(state: ClusterState) -> bytes:
    """JSON of the state (specs and schemas pass through as they are); the same state gives the same bytes."""
    return _encoder.encode(state)


def from_bytes(data: bytes) -> ClusterState | None:
    """The state back; None when it was written in another format (fold from the beginning instead).

    Raises msgspec.MsgspecError for bytes that are no snapshot.
    """
    if _head_decoder.decode(data).format != STATE_FORMAT:
        return None
    return _decoder.decode(data)
