"""Small fleets and demands, by short words; and random ones for the comparison with the slow twin."""

from __future__ import annotations

from hypothesis import strategies as st
from msgspec import structs

from scheduler.solver.model import (
    Assignment,
    Demand,
    Device,
    Objective,
    Place,
    Plan,
    PrecisionOption,
    Problem,
    Taint,
    Toleration,
)

NVLINK = "nvlink-0"
PLACE_ALL = Objective(unplaced=10**7, standby=10**8)
"""Leaving a replica out costs more than everything else together can."""


def device(name: str, memory: int = 100, **fields: object) -> Device:
    """`name` is server:device, as in s0:g1; the worker is called like the server."""
    server, _, number = name.partition(":")
    values: dict[str, object] = {
        "server": server,
        "worker": server,
        "incarnation": f"{server}-1",
        "name": number,
        "kind": "cuda",
        "memory_bytes": memory,
        "backends": ("torch",),
        "precisions": ("bf16", "int8"),
        **fields,
    }
    return Device(**values)  # type: ignore[arg-type]  # a test's shorthand


def demand(model: str, *sizes: int, **fields: object) -> Demand:
    """Options bf16, int8 with these sizes; one size is bf16 alone."""
    options = tuple(PrecisionOption(name, size) for name, size in zip(("bf16", "int8"), sizes, strict=False))
    return Demand(model=model, options=options, **{"backend": "torch", **fields})


def place(name: str, precision: str = "bf16") -> Place:
    """`name` is worker:device, or worker:device+device."""
    worker, _, devices = name.partition(":")
    return Place(worker, tuple(devices.split("+")), precision)


def where(plan: Plan) -> dict[str, str]:
    """model#replica -> worker/device."""
    return {f"{found.model}#{found.replica}": found.place.shown.partition(" ")[0] for found in plan.assignments}


def assignment(plan: Plan, model: str, replica: int = 0) -> Assignment:
    return next(found for found in plan.assignments if (found.model, found.replica) == (model, replica))


def carried_out(problem: Problem, plan: Plan) -> Problem:
    places = {(found.model, found.generation, found.replica): found.place for found in plan.assignments}
    demands = tuple(structs.replace(one, current=places.get(one.key)) for one in problem.demands)
    return structs.replace(problem, demands=demands)


# ---------------------------------------------------------------- at random


@st.composite
def devices(draw: st.DrawFn) -> tuple[Device, ...]:
    """One to four devices on one or two servers; workers, islands, tiers, taints and flags vary."""
    count = draw(st.integers(1, 4))
    split = draw(st.integers(0, count))
    linked = draw(st.sampled_from([(None,), (NVLINK,), ("bridge-0", "bridge-1"), (NVLINK, None)]))
    kind = draw(st.sampled_from(["cuda", "cuda", "cuda", "cpu"]))
    return tuple(
        device(
            f"s{int(number >= split)}:g{number}",
            draw(st.sampled_from([60, 100])),
            worker=f"s{int(number >= split)}-w{draw(st.sampled_from([0, 0, 0, 1]))}",
            reserved_bytes=draw(st.sampled_from([0, 0, 10])),
            kind=kind,
            island=linked[number % len(linked)] if kind == "cuda" else None,
            numa_node=draw(st.sampled_from([0, 0, 1, None])),
            tier=draw(st.sampled_from([None] * 7 + ["tier-0"])),
            spot=draw(st.sampled_from([False] * 5 + [True])),
            cordoned=draw(st.sampled_from([False] * 7 + [True])),
            draining=draw(st.sampled_from([False] * 7 + [True])),
            taints=draw(st.sampled_from([(), (), (Taint("slow", "", "PreferNoSchedule"),)])),
            price=draw(st.sampled_from([1, 1, 2])),
        )
        for number in range(count)
    )


@st.composite
def models(draw: st.DrawFn, name: str, fleet: tuple[Device, ...]) -> list[Demand]:
    """One or two replicas of one model, some of them running somewhere."""
    size = draw(st.sampled_from([1, 1, 2, 2, 3]))
    span = draw(st.sampled_from(["nvlink", "nvlink", "numa", "any"]))
    sizes = draw(st.sampled_from([(10,), (30,), (30, 20), (55,), (55, 30), (90, 45)]))
    base = demand(
        name,
        *sizes,
        tensor_parallel_size=size,
        span=span,
        exclusive=draw(st.sampled_from([False] * 5 + [True])),
        priority=draw(st.sampled_from(["P0", "P1"])),
        tier=draw(st.sampled_from([None] * 7 + ["tier-0"])),
        tags=draw(st.sampled_from([(), ("cost-sensitive",)])),
        tolerations=draw(st.sampled_from([(), (Toleration(operator="Exists"),)])),
        spot_tolerant=draw(st.booleans()),
        max_per_worker=draw(st.sampled_from([1, 1, 2])) if span == "nvlink" else 1,
        max_per_server=draw(st.sampled_from([None, 1])),
        kv_group=draw(st.sampled_from([None, None, "pair"])),
        warm_on=draw(st.sampled_from([(), (fleet[0].worker,)])),
        failed_on=draw(st.sampled_from([(), (fleet[-1].key,)])),
        purpose=draw(st.sampled_from(["serve", "serve", "standby"])),
        likelihood_permille=draw(st.sampled_from([1000, 200])),
        sla_weight=draw(st.sampled_from([1, 4])),
        load_percent=draw(st.sampled_from([0, 0, 30, 60, 90])),
    )
    return [
        structs.replace(base, replica=replica, current=draw(currents(fleet, size, len(sizes))))
        for replica in range(draw(st.sampled_from([1, 1, 2])))
    ]


@st.composite
def currents(draw: st.DrawFn, fleet: tuple[Device, ...], size: int, options: int) -> Place | None:
    if draw(st.booleans()):
        return None
    worker = draw(st.sampled_from(sorted({one.worker for one in fleet})))
    names = [one.name for one in fleet if one.worker == worker]
    if len(names) < size:
        return None
    chosen = draw(st.lists(st.sampled_from(names), min_size=size, max_size=size, unique=True))
    return Place(worker, tuple(chosen), ("bf16", "int8")[draw(st.integers(0, options - 1))])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """At most four replicas, so that trying everything takes a moment."""
    fleet = draw(devices())
    demands: list[Demand] = []
    for number in range(draw(st.integers(1, 3))):
        demands += draw(models(f"m{number}", fleet))
    objective = draw(st.sampled_from([Objective(packing="binpack"), Objective(packing="spread"), PLACE_ALL]))
    return Problem(devices=fleet, demands=tuple(demands[:4]), objective=objective)
