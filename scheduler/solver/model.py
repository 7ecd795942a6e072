"""The records of the placement solver: devices and demands in, a plan out.

Memory is bytes, likelihoods and risks are permille, every cost is an integer without a unit. Nothing here names Kafka,
the state of the fold or the declaration: whoever calls the solver translates. All of it is frozen, so that a problem
can be kept beside the decision made of it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Priority = Literal["P0", "P1", "P2"]
Packing = Literal["binpack", "spread"]
Purpose = Literal["serve", "standby"]
Effect = Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"]
MoveKind = Literal["start", "move", "stop"]
MoveOrder = Literal["new-first", "old-first"]
Scope = Literal["fleet", "changed"]
Span = Literal["nvlink", "numa", "any"]
"""How near the devices of one replica have to be: in one NVLink island; in one NUMA node, over PCIe; on one worker. The
cpu devices of a worker are near enough for each."""
SPANS: tuple[Span, ...] = ("nvlink", "numa", "any")

TIER_OF_P0 = "tier-0"
PERMILLE = 1000
GIB = 1 << 30


class Taint(Struct, frozen=True):
    """What keeps models away from a device unless they tolerate it, as Kubernetes means it."""

    key: str
    value: str = ""
    effect: Effect = "NoSchedule"


class Toleration(Struct, frozen=True):
    """As in a declaration: an empty key with `Exists` tolerates everything, an empty effect means any."""

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    effect: Effect = ""


class Device(Struct, frozen=True, kw_only=True):
    """One device of a live worker. (worker, name) is unique."""

    server: str
    worker: str
    incarnation: str
    name: str
    kind: str
    """cuda, cpu."""
    product: str = ""
    """As the driver names it, e.g. NVIDIA A100-SXM4-80GB."""
    memory_bytes: int
    reserved_bytes: int = 0
    """Taken by anything that is not a demand of the problem."""
    island: str | None = None
    """Devices of one server with the same id reach each other over NVLink; None: over nothing faster than PCIe."""
    numa_node: int | None = None
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    tier: str | None = None
    spot: bool = False
    cordoned: bool = False
    """Takes nothing new; what runs there stays."""
    draining: bool = False
    """Takes nothing new, and what runs there has to leave."""
    backends: tuple[str, ...] = ()
    versions: dict[str, str] = {}
    """What the worker reports, by the names of a declaration's `requires`: cuda, pytorch, sglang, vllm."""
    precisions: tuple[str, ...] = ()
    price: int = 1
    """Relative: what keeping the device busy costs."""

    @property
    def key(self) -> tuple[str, str]:
        return self.worker, self.name

    @property
    def shown(self) -> str:
        return f"{self.worker}/{self.name}"


class PrecisionOption(Struct, frozen=True):
    """One way to load the model. `precision` None: the weights as they are stored, which any device can hold."""

    precision: str | None
    memory_bytes: int
    """Weights, KV for the context and workspace, on each device of the replica."""


class Place(Struct, frozen=True):
    """Where a replica is: `tensor_parallel_size` devices of one worker, in the order of the fleet."""

    worker: str
    devices: tuple[str, ...]
    precision: str | None = None

    @property
    def shown(self) -> str:
        return f"{self.worker}/{'+'.join(self.devices)}" + (f" ({self.precision})" if self.precision else "")


class Demand(Struct, frozen=True, kw_only=True):
    """One replica that should exist, running or not. (model, generation, replica) is unique."""

    model: str
    generation: int = 1
    replica: int = 0
    backend: str
    options: tuple[PrecisionOption, ...]
    """In order of preference, the best first."""
    exclusive: bool = False
    """Needs the whole device, as a context that fills the card does."""
    tensor_parallel_size: int = 1
    span: Span = "nvlink"
    """Nearer is cheaper in any case (`Objective.spanning`)."""
    priority: Priority = "P1"
    tier: str | None = None
    tags: tuple[str, ...] = ()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    product: str = ""
    """Empty: any."""
    requires: dict[str, str] = {}
    """Version ranges by the name of what is versioned: {"cuda": ">=12.1,<13"}."""
    spot_tolerant: bool = False
    max_per_worker: int = 1
    """Replicas of this version on one worker; partitions name workers, so more than one adds nothing."""
    max_per_server: int | None = None
    """Anti-affinity by server; None: no limit of its own."""
    kv_group: str | None = None
    """The n-th replicas of all models of a group exchange KV, so they belong on one NVLink island (without NVLink, one
    NUMA node). Apart they cost `Objective.kv_apart`."""
    current: Place | None = None
    warm_on: tuple[str, ...] = ()
    """Workers that have the weights in host memory or on disk."""
    failed_on: tuple[tuple[str, str], ...] = ()
    """(worker, device) on which it failed: taken only when nothing else is left."""
    likelihood_permille: int = PERMILLE
    """How likely the replica is needed soon."""
    settled: bool = False
    """It runs and is not to be moved now: it loads, or a move of its version is under way."""
    purpose: Purpose = "serve"
    """A standby replica belongs to the warm pool: it is worth only its likelihood."""
    sla_weight: int = 1
    """What a breach costs, relative to other models; see `objective.sla_weight`."""
    load_percent: int = 0
    """Share of each of its devices' time that it is expected to keep busy."""
    risk_permille: dict[str, int] = {}
    """By device product, or else by device kind: how likely the SLA is missed there."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.model, self.generation, self.replica

    @property
    def version(self) -> tuple[str, int]:
        return self.model, self.generation

    @property
    def shown(self) -> str:
        return f"{self.model}#{self.replica} (generation {self.generation})"


class Objective(Struct, frozen=True, kw_only=True):
    """What each thing costs. Placing a replica is worth more than any tidiness; moving must earn its price."""

    packing: Packing = "binpack"
    unplaced: int = 10_000
    """A replica without a place, times its SLA weight."""
    first_replica: int = 30_000
    """In addition, when a version has no replica at all."""
    sla_risk: int = 5
    """A permille of risk, times the SLA weight."""
    spot_risk_permille: int = 20
    failed_risk_permille: int = 900
    taint_risk_permille: int = 10
    """An untolerated PreferNoSchedule."""
    precision: int = 300
    """Each step down the list of options, times the SLA weight."""
    price: int = 100
    """A unit of device price, for models tagged cost-sensitive."""
    dearer: int = 400
    """A unit of device price above 1, for every model: where the SLA is met, the cheaper device does."""
    device_used: int = 1000
    """binpack: a unit of price of a device that holds anything."""
    fragment: int = 100
    """binpack: a free device of an NVLink island that is partly taken."""
    fragment_spread: int = 20
    """The same for spread: of free devices those of a broken island come first, but an island of ten is broken rather
    than a device shared."""
    spanning: int = 400
    """Each NVLink island, and each NUMA node not linked to it, that a replica touches beyond the first; times its
    weight."""
    kv_apart: int = 1500
    """Each island beyond the first on which replicas are that exchange KV."""
    pair: int = 200
    """spread: two replicas on one device."""
    load: int = 100
    """A percent of a device's time above `load_free` that its replicas are expected to keep it busy, all together."""
    load_free: int = 70
    same_server: int = 800
    """A replica on a server that has another one of its version, times the SLA weight."""
    settled: int = 1_000_000_000
    """Moving a settled replica: more than anything gains."""
    move: int = 50
    """Taking a running replica from where it is."""
    move_gib: int = 2
    """In addition, per GiB that is loaded again."""
    stop: int = 10_000
    """Stopping a serving replica without a new place for it: more than its device costs, or draining would stop it."""
    cold: int = 100
    """A load on a worker without the weights when another has them, times weight and likelihood."""
    standby: int = 3000
    """A standby replica without a place, times its likelihood."""


class Problem(Struct, frozen=True, kw_only=True):
    devices: tuple[Device, ...]
    demands: tuple[Demand, ...]
    objective: Objective = Objective()


class Assignment(Struct, frozen=True):
    """One replica's place. `held`: it runs where it may not stay, because nothing better was found."""

    model: str
    generation: int
    replica: int
    place: Place
    server: str
    held: bool = False


class Move(Struct, frozen=True):
    """Moves of a lower wave are finished before those of a higher wave begin.

    `new-first`: the replica is ready at the target before the old one stops. `old-first` only where memory leaves no
    other order.
    """

    kind: MoveKind
    model: str
    generation: int
    replica: int
    source: Place | None
    target: Place | None
    wave: int
    order: MoveOrder = "new-first"


class Unplaceable(Struct, frozen=True):
    model: str
    generation: int
    replica: int
    conflict: str | None
    """409: the declaration contradicts itself or the fleet's tiers, whatever the load."""
    why_not: tuple[str, ...]
    """One sentence per reason, naming the devices it holds for."""


class Plan(Struct, frozen=True, kw_only=True):
    """Every demand is in `assignments` or in `unplaceable` (a held one in both)."""

    taken: bool
    """False: keeping what is there is at least as good, and the rest of the plan describes that."""
    scope: Scope
    """What was free to move, and what the bound speaks of: the fleet, or only what had to change."""
    assignments: tuple[Assignment, ...]
    moves: tuple[Move, ...]
    unplaceable: tuple[Unplaceable, ...]
    terms: dict[str, int]
    """The objective, term by term; they add up to `cost`."""
    cost: int
    lower_bound: int
    """No plan within `scope` costs less."""
    do_nothing_cost: int | None
    """Cost of keeping what runs and starting nothing; None when that breaks a limit, so that it is no choice."""
    solver: str
    """Name and version of what found it."""
    statistics: dict[str, int]

    @property
    def optimal(self) -> bool:
        return self.cost == self.lower_bound

    @property
    def gap_permille(self) -> int:
        """How far above the bound, rounded up."""
        if self.cost == self.lower_bound:
            return 0
        return -((self.lower_bound - self.cost) * PERMILLE // max(1, self.lower_bound))
