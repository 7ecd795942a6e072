"""`python -m sie_stream.sim.main --scenario chaos --seed 7`: one world, or `--seeds 1000` of them.

Without a scenario all of them take turns. A failure prints how to see it again. Exit codes: 0 all held, 1 not,
78 unknown scenario.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sie_stream.errors import ConfigError
from sie_stream.sim.run import Outcome, Run
from sie_stream.sim.scenario import Scenario, parse_scenario, unknown_scenario

SCENARIOS = Path(__file__).resolve().parents[2] / "tests" / "simulation" / "scenarios"
EXIT_CONFIG = 78
CHUNK = 4
Job = tuple[str, int]
"""Scenario and seed."""


def scenario_names(folder: Path = SCENARIOS) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.toml"))


@functools.cache
def load_scenario(name: str, folder: Path = SCENARIOS) -> Scenario:
    """Raises ConfigError for an unknown scenario or a wrong one."""
    known = scenario_names(folder)
    if name not in known:
        raise unknown_scenario(name, known)
    return parse_scenario((folder / f"{name}.toml").read_text(encoding="utf-8"), name)


def run_one(job: Job) -> Outcome:
    name, seed = job
    try:
        return Run(name, load_scenario(name), seed).go()
    except Exception as error:
        error.add_note(f"again: make sim SCENARIO={name} SEED={seed}")
        raise


def run_many(jobs: Sequence[Job], workers: int) -> Iterator[Outcome]:
    """Outcomes as they come, in no particular order when `workers` is more than one."""
    if workers <= 1 or len(jobs) < 2 * CHUNK:
        yield from map(run_one, jobs)
        return
    gc.freeze()  # what is imported is shared with the children and never collected
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=64) as pool:
        yield from pool.imap_unordered(run_one, jobs, CHUNK)


def mixed_jobs(count: int, first_seed: int = 0) -> list[Job]:
    """`count` worlds; scenarios take turns. "chaos" comes up as often as three others."""
    names = scenario_names()
    names += ["chaos"] * 2 if "chaos" in names else []
    return [(names[number % len(names)], first_seed + number) for number in range(count)]


def describe(outcome: Outcome) -> str:
    faults = ", ".join(f"{count} {name}" for name, count in outcome.faults.items()) or "no faults"
    ended = ", ".join(f"{count} {name}" for name, count in outcome.statuses.items())
    return (
        f"{outcome.scenario} seed {outcome.seed}: {outcome.requests} requests ({ended}) in {outcome.transactions} "
        f"transactions and {outcome.elapsed_ms / 1000:.1f} s of virtual time; {faults}; digest {outcome.digest}"
    )


def report_failure(outcome: Outcome) -> str:
    lines = [f"FAILED {describe(outcome)}", *outcome.tail, f"        {outcome.failure}"]
    lines.append(f"again: make sim SCENARIO={outcome.scenario} SEED={outcome.seed}")
    lines.append(f"or:    python -m sie_stream.sim.main --scenario {outcome.scenario} --seed {outcome.seed} --trace")
    return "\n".join(lines)


def summary(outcomes: Iterable[Outcome], took_s: float) -> str:
    seeds = requests = transactions = failed = 0
    faults: dict[str, int] = {}
    marks: dict[str, int] = {}
    for outcome in outcomes:
        seeds += 1
        requests += outcome.requests
        transactions += outcome.transactions
        failed += bool(outcome.failure)
        for name, count in outcome.faults.items():
            faults[name] = faults.get(name, 0) + count
        for name, count in outcome.marks.items():
            marks[name] = marks.get(name, 0) + count
    seen = ", ".join(f"{count} {name}" for name, count in sorted(marks.items()))
    what = ", ".join(f"{count} {name}" for name, count in sorted(faults.items()))
    return (
        f"{seeds} worlds ({seeds / max(took_s, 1e-9):.1f}/s), {requests} requests, {transactions} transactions, "
        f"{failed} failed.\nFaults: {what or 'none'}.\nSeen: {seen}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sie_stream.sim.main", description=__doc__)
    parser.add_argument("--scenario", default="", help=f"one of: {', '.join(scenario_names())}; default: all in turn")
    parser.add_argument("--seed", type=int, default=0, help="the seed, or the first of --seeds")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run")
    parser.add_argument("--trace", action="store_true", help="print everything that happens (one seed)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes to use")
    options = parser.parse_args(arguments)
    try:
        if options.scenario:
            load_scenario(options.scenario)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    if options.seeds == 1:
        return _one(options.scenario or "chaos", options.seed, options.trace)
    jobs = mixed_jobs(options.seeds, options.seed)
    if options.scenario:
        jobs = [(options.scenario, seed) for _, seed in jobs]
    return _many(jobs, options.workers)


def _one(name: str, seed: int, trace: bool) -> int:
    outcome = Run(name, load_scenario(name), seed, trace).go()
    if outcome.failure:
        print(report_failure(outcome))
        return 1
    if trace:
        print("\n".join(outcome.tail))
    print(describe(outcome))
    return 0


def _many(jobs: Sequence[Job], workers: int) -> int:
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for outcome in run_many(jobs, workers):
        outcomes.append(outcome)
        if outcome.failure:
            print(report_failure(outcome))
    print(summary(outcomes, time.monotonic() - started))
    return 1 if any(outcome.failure for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
