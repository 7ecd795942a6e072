"""How fast and how well placement is solved: `python -m tests.bench.solver [--json FILE] [--changes N] [--only-wired]`.

Three questions on made-up fleets (always the same ones: a seed is a fleet): placing everything at 117 models x 256
devices; the decision after one model is added, one device is lost, one server is lost; a valid plan at 400 models x
1,000 devices. Times are of a whole call, problem to plan, after one call that warms the process up.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs
from rich.console import Console
from rich.table import Table

from scheduler.solver import plan_fleet, replan, sla_weight
from scheduler.solver.model import GIB, Demand, Device, Plan, PrecisionOption, Priority, Problem
from tests.bench.solver_wired import measure_wired

SEED = 11
DEVICES_EACH = 8
FAMILIES: tuple[tuple[int, int, int, tuple[Priority, ...], tuple[str, ...]], ...] = (
    # share of the models, MiB from, MiB to, priorities, tags
    (25, 300, 2_000, ("P0", "P1"), ("high-sla",)),  # scoring, classification
    (30, 1_200, 6_000, ("P0", "P1", "P1"), ()),  # embedding, reranking
    (30, 9_000, 26_000, ("P1", "P1", "P2"), ()),  # 3B to 8B generation
    (15, 30_000, 70_000, ("P1", "P2"), ("batch-job",)),  # 13B to 34B generation
)


class Measured(Struct, frozen=True):
    """One question. Costs and bounds are of the last plan; times are of all."""

    name: str
    runs: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    gap_percent: float
    devices_used: int
    moved_needlessly: int
    unplaced: int
    goal: str
    met: bool


def fleet(servers: int) -> tuple[Device, ...]:
    """Servers of 8 A100 with 80 GB on one NVSwitch, one worker each."""
    return tuple(
        Device(
            server=f"s{server:03}",
            worker=f"w{server:03}",
            incarnation=f"w{server:03}-1",
            name=f"cuda:{number}",
            kind="cuda",
            product="NVIDIA A100-SXM4-80GB",
            memory_bytes=80 * GIB,
            reserved_bytes=GIB,
            island="nvlink-0",
            numa_node=number // 4,
            backends=("torch", "sglang", "onnx"),
            versions={"cuda": "12.4", "pytorch": "2.13.0"},
            precisions=("fp32", "bf16", "fp16", "int8"),
        )
        for server in range(servers)
        for number in range(DEVICES_EACH)
    )


def models(count: int, replicas: int, seed: int = SEED) -> tuple[Demand, ...]:
    """`count` models with `replicas` replicas in all, one to six each; every 20th spans two devices."""
    chance = random.Random(seed)
    copies = [1] * count
    while sum(copies) < replicas:
        chosen = chance.randrange(count)
        copies[chosen] += copies[chosen] < 6
    return tuple(demand for number in range(count) for demand in model(f"m{number:03}", copies[number], chance, number))


def model(name: str, copies: int, chance: random.Random, number: int) -> list[Demand]:
    _, low, high, priorities, tags = chance.choices(FAMILIES, [family[0] for family in FAMILIES])[0]
    memory, priority = chance.randint(low, high) << 20, chance.choice(priorities)
    options = [PrecisionOption("bf16", memory)]
    if low > 9_000:
        options.append(PrecisionOption("int8", memory * 6 // 10))
    return [
        Demand(
            model=name,
            replica=replica,
            backend="torch",
            options=tuple(options),
            tensor_parallel_size=2 if number % 20 == 19 else 1,
            priority=priority,
            tags=tags,
            max_per_server=1,
            requires={"cuda": ">=12.1,<13"},
            sla_weight=sla_weight(priority, tags),
        )
        for replica in range(copies)
    ]


def running(demands: Sequence[Demand], plan: Plan) -> tuple[Demand, ...]:
    """The demands as they are once the plan has been carried out."""
    places = {(found.model, found.generation, found.replica): found.place for found in plan.assignments}
    return tuple(structs.replace(demand, current=places.get(demand.key)) for demand in demands)


# ---------------------------------------------------------------- questions


def measure_full(servers: int, count: int, replicas: int, limit_s: float, gap: float, runs: int) -> Measured:
    problems = [Problem(devices=fleet(servers), demands=models(count, replicas, SEED + n)) for n in range(runs)]
    plans, times = _timed(plan_fleet, problems)
    worst_gap = max((plan.cost - plan.lower_bound) / plan.lower_bound * 100 for plan in plans)
    met = max(times) <= limit_s and worst_gap <= gap and all(not plan.unplaceable for plan in plans)
    goal = f"<= {limit_s:g} s" + (f", gap <= {gap:g} %" if gap < 100 else "")
    name = f"full, {count} models ({replicas}) x {servers * DEVICES_EACH}"
    return _measured(name, times, plans, 0, worst_gap, goal, met)


def measure_changes(name: str, changed: Sequence[Problem]) -> Measured:
    plans, times = _timed(replan, changed)
    needless = sum(_moved_needlessly(problem, plan) for problem, plan in zip(changed, plans, strict=True))
    worst_gap = max((plan.cost - plan.lower_bound) / plan.lower_bound * 100 for plan in plans)
    met = _percentile(times, 99) <= 0.2 and not needless and all(not plan.unplaceable for plan in plans)
    return _measured(name, times, plans, needless, worst_gap, "p99 <= 200 ms", met)


def added(base: Problem, runs: int) -> list[Problem]:
    """One more model of one to four replicas, another each time."""
    found: list[Problem] = []
    for run in range(runs):
        chance = random.Random(f"{SEED} added {run}")
        more = tuple(model(f"new{run}", chance.randint(1, 4), chance, 19 if run % 10 == 0 else 0))
        found.append(structs.replace(base, demands=base.demands + more))
    return found


def without_device(base: Problem, runs: int) -> list[Problem]:
    """One device that holds something is gone, another each time as far as there are."""
    places = [demand.current for demand in base.demands if demand.current]
    held = sorted({(place.worker, name) for place in places for name in place.devices})
    gone = [held[run * 7 % len(held)] for run in range(runs)]
    return [structs.replace(base, devices=tuple(d for d in base.devices if d.key != key)) for key in gone]


def without_server(base: Problem, runs: int) -> list[Problem]:
    held = sorted({demand.current.worker for demand in base.demands if demand.current})
    gone = [held[run % len(held)] for run in range(runs)]
    return [structs.replace(base, devices=tuple(d for d in base.devices if d.worker != name)) for name in gone]


def _moved_needlessly(problem: Problem, plan: Plan) -> int:
    """Running replicas on devices that are still there and were moved all the same."""
    there = {device.key for device in problem.devices}
    places = {demand.key: demand.current for demand in problem.demands}
    moved = 0
    for move in plan.moves:
        place = places[move.model, move.generation, move.replica]
        moved += place is not None and all((place.worker, name) in there for name in place.devices)
    return moved


def _timed(solve: Callable[[Problem], Plan], problems: Sequence[Problem]) -> tuple[list[Plan], list[float]]:
    plans, times = list[Plan](), list[float]()
    for problem in problems:
        started = time.perf_counter()
        plans.append(solve(problem))
        times.append(time.perf_counter() - started)
    return plans, times


def _percentile(times: Sequence[float], percent: int) -> float:
    """Nearest rank."""
    return sorted(times)[max(0, -(-len(times) * percent // 100) - 1)]


def _measured(
    name: str, times: Sequence[float], plans: Sequence[Plan], needless: int, gap: float, goal: str, met: bool
) -> Measured:
    used = {(found.place.worker, device) for found in plans[-1].assignments for device in found.place.devices}
    return Measured(
        name=name,
        runs=len(times),
        p50_ms=round(_percentile(times, 50) * 1000, 1),
        p99_ms=round(_percentile(times, 99) * 1000, 1),
        worst_ms=round(max(times) * 1000, 1),
        gap_percent=round(gap, 2),
        devices_used=len(used),
        moved_needlessly=needless,
        unplaced=sum(len(plan.unplaceable) for plan in plans),
        goal=goal,
        met=met,
    )


def measure(changes: int) -> list[Measured]:
    demands = models(117, 267)
    start = Problem(devices=fleet(32), demands=demands)
    base = structs.replace(start, demands=running(demands, plan_fleet(start)))  # warms up, too
    return [
        measure_full(32, 117, 267, 3.0, 2.0, runs=5),
        measure_changes("one model added", added(base, changes)),
        measure_changes("one GPU lost", without_device(base, changes)),
        measure_changes("one server lost", without_server(base, changes)),
        measure_full(125, 400, 912, 10.0, 100.0, runs=2),
    ]


def wired(changes: int) -> list[Measured]:
    """The same questions to the scheduler's fold: solved, explained and recorded."""
    by_model: dict[str, list[Demand]] = {}
    for demand in models(117, 267):
        by_model.setdefault(demand.model, []).append(demand)
    declared = [(name, found[0].options[0].memory_bytes, len(found)) for name, found in by_model.items()]
    return [
        Measured(
            name=f"wired, {one.name}",
            runs=len(one.times),
            p50_ms=round(_percentile(one.times, 50) * 1000, 1),
            p99_ms=round(_percentile(one.times, 99) * 1000, 1),
            worst_ms=round(max(one.times) * 1000, 1),
            gap_percent=0.0,
            devices_used=0,
            moved_needlessly=one.moved,
            unplaced=0,
            goal=f"p99 <= 200 ms (cpu {_percentile(one.cpu, 99) * 1000:.0f}), {one.sentences} of 20 sentences",
            met=_percentile(one.times, 99) <= 0.2 and one.sentences <= 20 and not one.moved,
        )
        for one in measure_wired(declared, changes)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast and how well placement is solved.")
    parser.add_argument("--changes", type=int, default=100, help="decisions per kind of change")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only-wired", action="store_true", help="only the questions to the scheduler's fold")
    arguments = parser.parse_args()
    results = ([] if arguments.only_wired else measure(arguments.changes)) + wired(arguments.changes)
    table = Table(*Measured.__struct_fields__)
    for result in results:
        table.add_row(*(str(value) for value in structs.astuple(result)))
    Console(width=200).print(table)
    encoded = msgspec.json.format(msgspec.json.encode(results))
    print(encoded.decode())
    if arguments.json is not None:
        arguments.json.write_bytes(encoded + b"\n")


if __name__ == "__main__":
    main()
