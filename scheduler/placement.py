"""Where replicas go: one pure function, `place(problem) -> plan`, over the integer program of `solver/`.

What runs stays where it is; what is missing is placed at the least cost (see solver/objective.py). A replica needs a
device of a live worker that satisfies its declaration (backend, versions, tier, labels, taints), has the memory free,
and does not hold another replica of the same version. (Partitions name workers: a second replica there adds nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

from scheduler.precision import precision_on
from scheduler.rules import PlacementRules
from scheduler.seats import devices_of
from scheduler.solver.classes import fold
from scheduler.solver.constraints import forbids
from scheduler.solver.explain import Explanation, explain, seats_of
from scheduler.solver.groupings import are_near
from scheduler.solver.ledger import Ledger
from scheduler.solver.model import Demand, Device, Objective, Place, Plan, PrecisionOption, Priority, Problem, Taint
from scheduler.solver.objective import sla_weight
from scheduler.solver.solve import place_missing, place_missing_in
from scheduler.solver.summary import why_not_elsewhere
from sie_stream.control import Taint as WorkerTaint
from sie_stream.decisions import SolverRun
from sie_stream.topology.records import NUMA_UNKNOWN

Packing = Literal["spread", "binpack"]
PRIORITIES: tuple[Priority, ...] = ("P0", "P1", "P2")
PRICES = {"cpu": 1, "cuda": 3}
"""By kind of device: what keeping one busy costs, relative to others."""
MISSED_PERMILLE = 500
"""Risk to the SLA on a kind of device on which it was missed."""
HEAVY_BACKENDS = ("torch", "sglang", "vllm")
UNTRIED_PERMILLE = 200
"""Risk of a heavy backend on a cpu, as long as nobody has seen it do well there."""
VERSION_NAMES = {"torch": "pytorch"}
"""What workers call a library, by what `requires` calls it."""


class DeviceOffer(Struct, frozen=True):
    """A device of a live worker."""

    worker: str
    incarnation: str
    device: str
    kind: str
    memory_bytes: int
    reserved_bytes: int
    """Of replicas that are no `Resident` of the problem: older ones, and those that leave."""
    backends: tuple[str, ...]
    host: str = ""
    labels: dict[str, str] = {}
    taints: tuple[WorkerTaint, ...] = ()
    tier: str = ""
    versions: dict[str, str] = {}
    service: Literal["in service", "cordoned", "draining"] = "in service"
    island: str = ""
    """NVLink island of its server; empty: none."""
    numa_node: int = NUMA_UNKNOWN
    product: str = ""


class ReplicaWish(Struct, frozen=True):
    """One replica that should exist and does not."""

    model: str
    generation: int
    priority: int
    backend: str
    memory_bytes: int
    """On each of its devices."""
    hosts: tuple[str, ...] = ()
    """Workers that hold a replica of this version already."""
    failed_on: tuple[tuple[str, str], ...] = ()
    """(worker, device) on which it failed: tried only when nothing else is left."""
    prefer: tuple[str, ...] = ()
    """Workers that held it before and came back."""
    missed_on: tuple[str, ...] = ()
    """Kinds of devices on which it was seen to miss its SLA."""
    met_on: tuple[str, ...] = ()
    """Kinds on which it was seen to be well below it."""
    rules: PlacementRules = PlacementRules()
    tensor_parallel: int = 1
    """Devices it spans."""
    kv_group: str = ""
    """Models of one group exchange KV; empty: with nobody."""
    load_percent: int = 0
    """Share of its device's time that it is expected to keep busy."""


class Resident(Struct, frozen=True):
    """A replica that loads or serves, and stays."""

    wish: ReplicaWish
    worker: str
    devices: tuple[str, ...]
    settled: bool = False
    """Not to be moved now."""


class PlacementProblem(Struct, frozen=True):
    devices: tuple[DeviceOffer, ...]
    wishes: tuple[ReplicaWish, ...]
    residents: tuple[Resident, ...] = ()
    packing: Packing = "spread"


class Chosen(Struct, frozen=True):
    wish: ReplicaWish
    worker: str
    incarnation: str
    devices: tuple[str, ...]
    free_bytes_before: int
    """On the fullest of them."""
    rejected: tuple[str, ...]
    """Devices that were not taken, and why: one sentence per reason."""
    precision: str = ""
    """What its weights are to be loaded in; empty: what backend.config says."""


class Unplaceable(Struct, frozen=True):
    wish: ReplicaWish
    why_not: tuple[str, ...]
    """One sentence per reason; one sentence in all when there are no devices."""


class PlacementPlan(Struct, frozen=True):
    chosen: tuple[Chosen, ...]
    unplaceable: tuple[Unplaceable, ...]
    solver: SolverRun


def place(problem: PlacementProblem) -> PlacementPlan:
    """Place as many wishes as fit. Every wish is in exactly one list; no device is filled above its memory.

    No replica that serves is moved to make room for another.
    """
    fleet = fleet_of(problem)
    folded = fold(fleet)
    plan = place_missing_in(folded)
    found = {(a.model, a.generation, a.replica): a.place for a in plan.assignments}
    kept = [found.get(demand.key) == demand.current for demand in fleet.demands[: len(problem.residents)]]
    if not all(kept):
        return place(_pinned(problem, kept))
    why_not = {(u.model, u.generation, u.replica): u.why_not for u in plan.unplaceable}
    offers = {(offer.worker, offer.device): offer for offer in problem.devices}
    free = _free(problem)
    chosen: list[Chosen] = []
    unplaceable: list[Unplaceable] = []
    seats = seats_of(folded, plan)
    ledger = Ledger(folded, seats)
    first = len(problem.residents)
    for number, (demand, wish) in enumerate(zip(fleet.demands[first:], problem.wishes, strict=True), first):
        seat = found.get(demand.key)
        if seat is None:
            unplaceable.append(Unplaceable(wish, why_not[demand.key]))
            continue
        keys = devices_of((seat.worker, *seat.devices))
        taken = seats[number]
        assert taken is not None, "a demand with a place has a seat"
        rejected = why_not_elsewhere(folded, ledger, number, taken)
        before = min(free[key] for key in keys)
        offer = offers[keys[0]]
        precision = precision_on(wish.rules.precisions, offer.kind, offer.product)
        chosen.append(Chosen(wish, seat.worker, offer.incarnation, seat.devices, before, rejected, precision))
        for key in keys:
            free[key] -= wish.memory_bytes
    return PlacementPlan(tuple(chosen), tuple(unplaceable), solver_run(plan))


def refusal(wish: ReplicaWish, hosts: Sequence[str], offers: Sequence[DeviceOffer]) -> str | None:
    """Why these devices of one worker cannot hold the wish beside what is `reserved` there; None when they can.

    One device of several that it spans can be asked about alone.
    """
    demand = _demand(wish, 0, frozenset(offer.kind for offer in offers))
    devices = tuple(_device(offer) for offer in offers)
    for device in devices:
        found = forbids(demand, demand.options[0], device)
        if found is not None:
            return f"{device.shown}: {found.sentence}"
    worker = devices[0].worker
    if worker in hosts:
        return f"{devices[0].shown}: worker {worker} already holds a replica of this version."
    if len(devices) > 1 and not are_near(Problem(devices=devices, demands=(demand,)), demand):
        names = "+".join(device.name for device in devices)
        return f"{worker}/{names}: they are not near enough to each other (tensor_parallel_over {demand.span})."
    return None


def explanations(problem: PlacementProblem, model: str) -> tuple[Explanation, ...]:
    """Why each replica of the model is where it is, or would go, and why not elsewhere: one verdict per device."""
    fleet = fleet_of(problem)
    return explain(fleet, place_missing(fleet), model)


def solver_run(plan: Plan) -> SolverRun:
    return SolverRun(
        solver=plan.solver,
        status="optimal" if plan.optimal else "feasible",
        objective=plan.cost,
        terms={name: cost for name, cost in plan.terms.items() if cost},
        bound=plan.lower_bound,
        do_nothing=plan.do_nothing_cost,
    )


def fleet_of(problem: PlacementProblem) -> Problem:
    """The problem as the solver sees it: residents first, then wishes, in their order."""
    numbers: dict[tuple[str, int], int] = {}
    demands: list[Demand] = []
    kinds = frozenset(offer.kind for offer in problem.devices)
    like: dict[tuple[str, int], Demand] = {}
    """By wish: replicas of one model share theirs, and there are many of them."""
    for resident in problem.residents:
        of = resident.wish.model, resident.wish.memory_bytes
        demand = like.get(of) or like.setdefault(of, _demand(resident.wish, 0, kinds))
        at, number = Place(resident.worker, resident.devices), _next(numbers, resident.wish)
        demands.append(structs.replace(demand, replica=number, current=at, settled=resident.settled))
    demands += [_demand(wish, _next(numbers, wish), kinds) for wish in problem.wishes]
    cheapest = min((PRICES.get(offer.kind, 1) for offer in problem.devices), default=1)
    return Problem(
        devices=tuple(_device(offer, cheapest) for offer in problem.devices),
        demands=tuple(demands),
        objective=Objective(packing=problem.packing),
    )


def _next(numbers: dict[tuple[str, int], int], wish: ReplicaWish) -> int:
    """Replicas of one version are numbered in the order of the problem."""
    number = numbers.get((wish.model, wish.generation), 0)
    numbers[wish.model, wish.generation] = number + 1
    return number


def _device(offer: DeviceOffer, cheapest: int = 1) -> Device:
    """`cheapest` price of the fleet counts as 1, so that devices of one kind cost nothing to tell apart."""
    return Device(
        server=offer.host or offer.worker,
        worker=offer.worker,
        incarnation=offer.incarnation,
        name=offer.device,
        kind=offer.kind,
        memory_bytes=offer.memory_bytes,
        reserved_bytes=offer.reserved_bytes,
        labels=offer.labels,
        taints=tuple(Taint(taint.key, taint.value, taint.effect) for taint in offer.taints),
        tier=offer.tier or None,
        backends=offer.backends,
        cordoned=offer.service == "cordoned",
        draining=offer.service == "draining",
        price=max(1, PRICES.get(offer.kind, 1) - cheapest + 1),
        island=offer.island or None,
        numa_node=None if offer.numa_node == NUMA_UNKNOWN else offer.numa_node,
        product=offer.product,
        versions={VERSION_NAMES.get(name, name): version for name, version in offer.versions.items()},
    )


def _demand(wish: ReplicaWish, number: int, kinds: frozenset[str]) -> Demand:
    """`kinds` of devices that there are."""
    priority, rules = PRIORITIES[wish.priority], wish.rules
    return Demand(
        model=wish.model,
        generation=wish.generation,
        replica=number,
        backend=wish.backend,
        options=(PrecisionOption(None, wish.memory_bytes),),
        priority=priority,
        tier=rules.tier or None,
        tags=rules.tags,
        node_selector=rules.node_selector,
        tolerations=rules.tolerations,
        requires=rules.requires,
        tensor_parallel_size=wish.tensor_parallel,
        span=rules.span,
        kv_group=wish.kv_group or None,
        warm_on=wish.prefer,
        failed_on=wish.failed_on,
        sla_weight=sla_weight(priority, rules.tags),
        load_percent=wish.load_percent,
        risk_permille=_risks(wish, kinds),
    )


def _risks(wish: ReplicaWish, kinds: frozenset[str]) -> dict[str, int]:
    """By kind of device: how likely the SLA is missed there, from what was measured.

    Where it is missed on every kind there is, no place is better for that: a cost that is the same everywhere would
    only make all gains look small beside it.
    """
    risks = {} if kinds <= set(wish.missed_on) else dict.fromkeys(sorted(wish.missed_on), MISSED_PERMILLE)
    if wish.backend in HEAVY_BACKENDS and "cpu" not in risks and "cpu" not in wish.met_on:
        risks["cpu"] = UNTRIED_PERMILLE
    return risks


def _pinned(problem: PlacementProblem, kept: Sequence[bool]) -> PlacementProblem:
    """Residents that the solver would rather have elsewhere stay all the same: as memory that is taken."""
    residents = tuple(resident for resident, keep in zip(problem.residents, kept, strict=True) if keep)
    taken: dict[tuple[str, str], int] = {}
    for resident, keep in zip(problem.residents, kept, strict=True):
        if not keep:
            for at in devices_of((resident.worker, *resident.devices)):
                taken[at] = taken.get(at, 0) + resident.wish.memory_bytes
    devices = tuple(
        structs.replace(offer, reserved_bytes=offer.reserved_bytes + taken.get((offer.worker, offer.device), 0))
        for offer in problem.devices
    )
    return structs.replace(problem, devices=devices, residents=residents)


def _free(problem: PlacementProblem) -> dict[tuple[str, str], int]:
    free = {(offer.worker, offer.device): offer.memory_bytes - offer.reserved_bytes for offer in problem.devices}
    for resident in problem.residents:
        for device in resident.devices:
            free[resident.worker, device] -= resident.wish.memory_bytes
    return free
