"""One simulation: a policy lives through a scenario, and what became of it.

The same scenario and seed give every policy the same models, arrivals and faults, and give one policy the same report,
byte for byte, apart from what is measured on this machine (`Measured`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, process_time

import msgspec
import numpy as np
from msgspec import Struct

from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.settings import settings_from
from sie_stream.sim.fleet.baselines import PIPELINE_MS, Baseline, FirstFit, RoundRobin, Static
from sie_stream.sim.fleet.board import Board
from sie_stream.sim.fleet.fold import FoldPolicy
from sie_stream.sim.fleet.lru import Lru, LruUnbounded
from sie_stream.sim.fleet.policy import EPOCH_MS, Hit, Policy, device_count, worker_count
from sie_stream.sim.fleet.population import Population, build
from sie_stream.sim.fleet.scenario import Fault, Scenario, parse_scenario, unknown_scenario
from sie_stream.sim.fleet.traces import read_fits
from sie_stream.sim.fleet.workload import Workload

SCENARIOS = Path(__file__).parent / "scenarios"
BASELINES: Mapping[str, type[Baseline]] = {
    kind.name: kind for kind in (Static, RoundRobin, FirstFit, Lru, LruUnbounded)
}
OURS = FoldPolicy.name
LOG_MS = 80.0
"""From a producer over ingress and worker to a reader of results, with next to no engine time: p50 that `make bench`
measures on two cores."""
DECISIONS_99 = 0.99

Progress = Callable[[str, float], None]
"""(what is done, share of it)."""


class TagReport(Struct, frozen=True):
    tag: str
    requests: int
    attainment: float
    """Completed within the SLA, of those that ended."""


class Measured(Struct, frozen=True):
    """On this machine; not part of the digest. Decisions: CPU time of whole calls of `SchedulerMachine.step`."""

    wall_s: float
    cpu_s: float
    """Of this process: what a machine that does nothing else would take."""
    speed: float
    """Virtual time by real time, from the first record, with which setting up begins, to the last step."""
    cpu_speed: float
    """The same by CPU time."""
    traffic_speed: float
    """The same after the fleet was set up."""
    decisions: int
    placements: int
    """Calls that ran the solver."""
    decision_p50_ms: float
    decision_p99_ms: float
    placement_p50_ms: float
    placement_p99_ms: float
    placement_max_ms: float


class Report(Struct, frozen=True):
    policy: str
    seed: int
    hours: float
    models: int
    devices: int
    requests: int
    completed: int
    failed: int
    """In an engine that died, with no log to do them again; or lost, which must not be."""
    redelivered: int
    """In an engine that ended, and done again."""
    waiting: int
    """Not answered when the time was over."""
    lost: int
    """Arrived and nowhere to be found. 0, or the simulator is wrong."""
    attainment: float
    """Of the requests that ended, the share within the SLA of their model."""
    tags: tuple[TagReport, ...]
    memory_of_held: float
    """Memory that replicas use, of the GPUs that hold any, averaged over time."""
    memory_of_fleet: float
    devices_held: float
    devices_held_max: int
    replicas: float
    switches: int
    """Replicas loaded after traffic began."""
    migrations: int
    """Replicas moved, new before old (ours); replaced after a loss (baselines)."""
    decisions: dict[str, int]
    """By kind."""
    digest: str
    measured: Measured


def shipped() -> list[str]:
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def load(name: str) -> Scenario:
    """A file, or a scenario that is shipped. Raises ConfigError for one that is neither, or wrong."""
    path = Path(name)
    if path.suffix != ".toml":
        path = SCENARIOS / f"{name}.toml"
    if not path.is_file():
        if Path(name).is_file():
            raise ConfigError(f"scenario {name!r} is a file, but no TOML file: allowed is a name that ends in .toml.")
        raise unknown_scenario(name, shipped())
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"scenario {name!r} cannot be read: {error}") from error
    return parse_scenario(text, path.stem)


def simulate(
    scenario: Scenario, policy: str, seed: int, data: Path | None = None, progress: Progress = lambda what, share: None
) -> Report:
    """Raises ConfigError for an unknown policy, wrong settings of the scenario, or a trace that cannot be read."""
    if policy != OURS and policy not in BASELINES:
        known = [OURS, *BASELINES]
        raise ConfigError(f"unknown policy {policy!r}. Allowed: {', '.join(known)}.{did_you_mean(policy, known)}")
    started, started_cpu = perf_counter(), process_time()
    population = _population(scenario, data, seed)
    chosen = _policy(scenario, policy, population, seed, lambda: progress("setting up", 0.0))
    chosen.start()
    set_up_s, begin_ms = perf_counter() - started, chosen.events.now_ms
    before = {**chosen.counts()}
    workload = Workload(scenario, population, seed)
    step_ms = scenario.step_ms
    unseen = round(scenario.settle_minutes * 60_000 / step_ms)
    steps = unseen + max(1, round(scenario.hours * 3_600_000 / step_ms))
    for fault in faults(scenario, seed):
        chosen.events.at(begin_ms + unseen * step_ms + fault.at_ms, lambda fault=fault: chosen.hit(fault))
    for number in range(steps):
        now_ms = begin_ms + number * step_ms
        chosen.events.run_until(now_ms)
        if number == unseen:
            chosen.board.count_from_here()
            before = {**chosen.counts()}
        chosen.settle()
        chosen.board.step(now_ms, workload.arrivals(number * step_ms / 1000, step_ms / 1000))
        if number % 60 == 0:
            progress("traffic", number / steps)
    chosen.events.run_until(begin_ms + steps * step_ms)
    wall_s, cpu_s = perf_counter() - started, process_time() - started_cpu
    traffic_s, all_s = steps * step_ms / 1000, (chosen.events.now_ms - EPOCH_MS) / 1000
    return _report(scenario, chosen, seed, before, _measured(chosen, (wall_s, cpu_s, set_up_s), traffic_s, all_s))


def faults(scenario: Scenario, seed: int) -> list[Hit]:
    """Who is hit is drawn from the seed, no target twice in one series as long as there are others."""
    chance = random.Random(f"{seed} faults")
    hits: list[Hit] = []
    for fault in scenario.faults:
        count = _targets(scenario, fault)
        order: list[int] = []
        for number in range(fault.times):
            if not order:
                order = chance.sample(range(count), count)
            at_ms = round(1000 * (fault.at_s + number * fault.every_s))
            hits.append(Hit(at_ms, fault.kind, order.pop(), round(1000 * fault.for_s), fault.at_once))
    return hits


def _targets(scenario: Scenario, fault: Fault) -> int:
    if fault.kind == "server-lost":
        return scenario.fleet.servers
    return device_count(scenario.fleet) if fault.kind == "gpu-lost" else worker_count(scenario)


def _population(scenario: Scenario, data: Path | None, seed: int) -> Population:
    try:
        return build(scenario, read_fits(data), seed)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"a trace in {data} cannot be read: {type(error).__name__}: {error}") from error


def _policy(scenario: Scenario, name: str, population: Population, seed: int, beat: Callable[[], None]) -> Policy:
    devices = device_count(scenario.fleet)
    if name == OURS:
        settings = settings_from({"placement_packing": "binpack", "rebalance_policy": "always", **scenario.settings})
        board = Board(population, devices, scenario.step_ms, LOG_MS, seed, failover=True)
        return FoldPolicy(scenario, population, board, settings, beat)
    board = Board(population, devices, scenario.step_ms, PIPELINE_MS, seed, failover=False)
    return BASELINES[name](scenario, population, board)


def _report(scenario: Scenario, policy: Policy, seed: int, before: Mapping[str, int], measured: Measured) -> Report:
    board, tally = policy.board, policy.board.tally
    counts = {name: count - before[name] for name, count in policy.counts().items()}
    in_system = board.in_system()
    lost = tally.carried + tally.arrived - tally.completed - tally.failed - in_system
    worst = float(np.abs(lost).max())
    ended = float(tally.completed.sum() + tally.failed.sum())
    memory = scenario.fleet.memory_mb
    report = Report(
        policy=policy.name,
        seed=seed,
        hours=scenario.hours,
        models=len(board.population.names),
        devices=device_count(scenario.fleet),
        requests=int(tally.arrived.sum()),
        completed=round(float(tally.completed.sum())),
        failed=round(float(tally.failed.sum())),
        redelivered=counts["redelivered"],
        waiting=round(float(in_system.sum())),
        lost=round(worst) if worst > 1e-3 else 0,
        attainment=_share(float(tally.inside.sum()), ended),
        tags=_by_tag(board),
        memory_of_held=_share(tally.used_mb, tally.devices_held * memory),
        memory_of_fleet=_share(tally.used_mb, tally.steps * device_count(scenario.fleet) * memory),
        devices_held=round(tally.devices_held / tally.steps, 1),
        devices_held_max=tally.devices_most,
        replicas=round(tally.stations / tally.steps, 1),
        switches=counts["switches"],
        migrations=counts["migrations"],
        decisions=dict(sorted(policy.decisions.items())) if isinstance(policy, FoldPolicy) else {},
        digest="",
        measured=measured,
    )
    return msgspec.structs.replace(report, digest=_digest(report, policy))


def _digest(report: Report, policy: Policy) -> str:
    """Of everything but what was measured: the commands of the scheduler, and the figures."""
    figures = {name: value for name, value in msgspec.structs.asdict(report).items() if name != "measured"}
    digest = hashlib.sha256(msgspec.json.encode(figures))
    if isinstance(policy, FoldPolicy):
        digest.update(policy.digest.encode())
    return digest.hexdigest()[:16]


def _by_tag(board: Board) -> tuple[TagReport, ...]:
    """Every tag, and the models without any. A model with two tags counts for both."""
    tally, tags = board.tally, board.population.tags
    found: list[TagReport] = []
    for tag in ("high-sla", "cost-sensitive", "batch-job", ""):
        mine = np.array([tag in own if tag else not own for own in tags], dtype=bool)
        if mine.any():
            ended = float(tally.completed[mine].sum() + tally.failed[mine].sum())
            attained = _share(float(tally.inside[mine].sum()), ended)
            found.append(TagReport(tag or "none", int(tally.arrived[mine].sum()), attained))
    return tuple(found)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole > 0 else 0.0


def _measured(policy: Policy, took_s: tuple[float, float, float], traffic_s: float, all_s: float) -> Measured:
    """`took_s`: real time, CPU time, real time of setting up."""
    wall_s, cpu_s, set_up_s = took_s
    steps = policy.step_s if isinstance(policy, FoldPolicy) else []
    every = [took_s for took_s, _ in steps]
    solved = [took_s for took_s, solver_ran in steps if solver_ran]
    return Measured(
        wall_s=round(wall_s, 2),
        cpu_s=round(cpu_s, 2),
        cpu_speed=round(all_s / max(cpu_s, 1e-9), 1),
        speed=round(all_s / wall_s, 1),
        traffic_speed=round(traffic_s / max(wall_s - set_up_s, 1e-9), 1),
        decisions=len(every),
        placements=len(solved),
        decision_p50_ms=_rank_ms(every, 0.5),
        decision_p99_ms=_rank_ms(every, DECISIONS_99),
        placement_p50_ms=_rank_ms(solved, 0.5),
        placement_p99_ms=_rank_ms(solved, DECISIONS_99),
        placement_max_ms=_rank_ms(solved, 1.0),
    )


def _rank_ms(times_s: list[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    if not times_s:
        return 0.0
    ordered = sorted(times_s)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
