"""`make bench`: everything side by side in one run, as a table and as JSON.

`python -m tests.bench.main [--only NAME ...] [--quick] [--json FILE] [--baseline]`. Each scenario has a broker of its
own in a temporary folder. The result is written to bench-results/; `--baseline` replaces the committed one. Exit code 1
when a goal is not met: the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from tests.bench import (
    copy_loop,
    deployment,
    failover,
    fusion,
    latency,
    many_models,
    peers_run,
    pipeline,
    rollout,
    scheduler_failover,
    tiers,
)
from tests.bench.report import BASELINE, GOALS, figures, machine, show, write
from tests.bench.workload import MODEL, MODELS_DIR
from tests.bench.world import ROOT

PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
RESULT = ROOT / "bench-results" / "latest.json"
BUSY_LOAD = 1.0
Scenario = Callable[[bool], dict[str, float]]


def scenarios(peers_python: Path) -> dict[str, Scenario]:
    return {
        "copy": copy_loop.run,
        "pipeline": pipeline.run,
        "quix": partial(peers_run.quix, peers_python),
        "faust": partial(peers_run.faust, peers_python),
        "latency": latency.run,
        "many_models": many_models.run,
        "fusion": fusion.run,
        "failover": failover.run,
        "scheduler_failover": scheduler_failover.run,
        "deployment": deployment.run,
        "tiers": tiers.run,
        "rollout": rollout.run,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console = Console()
    logging.getLogger("sie_stream.kafka").setLevel(logging.ERROR)  # a broker that has just started says so a lot
    if not (MODELS_DIR / MODEL / "model-spec.yaml").exists():
        console.print(f"no model {MODEL} in {MODELS_DIR}: run `make models` first")
        return 1
    about = machine()
    if os.getloadavg()[0] > BUSY_LOAD:
        console.print(f"[yellow]load {os.getloadavg()[0]:.1f}: this machine is busy, times will be worse than true")
    # Absolute, but not resolved: the link in an environment is what makes it that environment.
    wanted = scenarios(options.peers_python.absolute())
    results: dict[str, dict[str, float]] = {}
    for name in options.only or list(wanted):
        started = time.monotonic()
        console.print(f"{name} ...", end=" ")
        results[name] = wanted[name](options.quick)
        console.print(f"{time.monotonic() - started:.0f} s")
        write(options.json, about, results)  # after each: what is measured is not lost with a later one
    met = show(console, results)
    if options.baseline:
        assert len(figures(results, GOALS)) == len(GOALS), "a baseline needs every scenario"
        assert not options.quick, "a baseline needs the whole length"
        write(BASELINE, about, results)
    return 0 if met else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tests.bench.main", description=__doc__)
    made.add_argument("--only", nargs="+", choices=list(scenarios(PEERS_PYTHON)), help="these scenarios")
    made.add_argument("--quick", action="store_true", help="a short look: less data, numbers that scatter more")
    made.add_argument("--json", type=Path, default=RESULT, help="where the result goes")
    made.add_argument("--baseline", action="store_true", help="replace the committed baseline")
    made.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="interpreter with Faust and Quix")
    return made


if __name__ == "__main__":
    sys.exit(main())
