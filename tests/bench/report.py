"""Goals, the table, and the JSON that is committed as a baseline."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct
from rich.console import Console
from rich.table import Table

Results = Mapping[str, Mapping[str, float]]
BASELINE = Path(__file__).with_name("baseline.json")


class Goal(Struct, frozen=True):
    """A figure made of the results of some scenarios, and how large or small it must be."""

    name: str
    needs: tuple[str, ...]
    figure: Callable[[Results], float]
    low: float = 0.0
    high: float = float("inf")
    unit: str = ""

    def met(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def wanted(self) -> str:
        return f">= {self.low:g}{self.unit}" if self.low else f"<= {self.high:g}{self.unit}"


def _of(scenario: str, name: str) -> Callable[[Results], float]:
    return lambda results: results[scenario][name]


def _ratio(name: str, ours: str, theirs: str) -> Callable[[Results], float]:
    return lambda results: results[ours][name] / results[theirs][name]


LITTLE_MS = 3.0


def _stable_p99_in_a_rollout(results: Results) -> float:
    """Against calm; what is moved by less than LITTLE_MS counts as not moved."""
    found = results["rollout"]
    return found["p99_moved_ratio"] if found["p99_moved_ms"] >= LITTLE_MS else min(1.0, found["p99_moved_ratio"])


GOALS = (
    Goal(
        "pipeline / copy, per core used (with the broker's)",
        ("pipeline", "copy"),
        _ratio("per_core_s_with_broker", "pipeline", "copy"),
        low=0.35,
    ),
    Goal(
        "ahead of Faust, records/s", ("pipeline", "faust"), _ratio("per_second", "pipeline", "faust"), low=10, unit="x"
    ),
    Goal("ahead of Quix, records/s", ("pipeline", "quix"), _ratio("per_second", "pipeline", "quix"), low=2, unit="x"),
    Goal("latency p50 at 500/s", ("latency",), _of("latency", "p50_ms"), high=20, unit=" ms"),
    Goal("latency p99 at 500/s", ("latency",), _of("latency", "p99_ms"), high=60, unit=" ms"),
    Goal("117 models / 1 model, records/s", ("many_models",), _of("many_models", "throughput_ratio"), low=0.85),
    Goal("idle, 117 models, our cores", ("many_models",), _of("many_models", "idle_ours"), high=0.03),
    Goal("memory of a worker host", ("many_models",), _of("many_models", "worker_host_mb"), high=250, unit=" MB"),
    Goal("failover, exit reported (median)", ("failover",), _of("failover", "reported_median_s"), high=3.2, unit=" s"),
    Goal(
        "failover, heartbeats only (median)", ("failover",), _of("failover", "heartbeat_median_s"), high=3.2, unit=" s"
    ),
    Goal(
        "scheduler failover, leader killed (median)",
        ("scheduler_failover",),
        _of("scheduler_failover", "killed_median_s"),
        high=2.5,
        unit=" s",
    ),
    Goal(
        "scheduler failover, leader stopped (median)",
        ("scheduler_failover",),
        _of("scheduler_failover", "stopped_median_s"),
        high=2.5,
        unit=" s",
    ),
    Goal("P0 p99 beside a language model / alone", ("tiers",), _of("tiers", "tiers_p99_ratio"), high=1.3),
    Goal("p99 of the stable version in a rollout / calm", ("rollout",), _stable_p99_in_a_rollout, high=1.1),
    Goal("apply to first answer, engines started", ("deployment",), _of("deployment", "slowest_s"), high=5, unit=" s"),
)
OTHERS = (
    Goal(
        "pipeline / copy, per core of the clients alone",
        ("pipeline", "copy"),
        _ratio("per_core_s", "pipeline", "copy"),
    ),
    Goal("pipeline / copy, records/s", ("pipeline", "copy"), _ratio("per_second", "pipeline", "copy")),
    Goal("117 services / one pool, memory", ("fusion",), _of("fusion", "memory_ratio")),
    Goal("117 services / one pool, time to start", ("fusion",), _of("fusion", "start_ratio")),
    Goal("one pool / 117 services, records/s", ("fusion",), _of("fusion", "throughput_ratio")),
    Goal("117 models / 1 model, per core of the clients", ("many_models",), _of("many_models", "cpu_ratio")),
)
"""Shown and kept without a goal."""


def machine() -> dict[str, Any]:
    """What the numbers depend on; no names of hosts."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "confluent_kafka": version("confluent-kafka"),
        "load_before": round(os.getloadavg()[0], 1),
    }


def figures(results: Results, goals: tuple[Goal, ...]) -> dict[str, float]:
    """{goal: value} of the goals whose scenarios were run."""
    return {goal.name: goal.figure(results) for goal in goals if all(name in results for name in goal.needs)}


def write(path: Path, about: Mapping[str, Any], results: Results) -> None:
    rounded = {scenario: {name: _short(value) for name, value in row.items()} for scenario, row in results.items()}
    ratios = {name: _short(value) for name, value in figures(results, GOALS + OTHERS).items()}
    document = {"machine": about, "ratios": ratios, "scenarios": rounded}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _short(value: float) -> float:
    return float(f"{value:.4g}") if abs(value) < 1e4 else round(value)


def show(console: Console, results: Results) -> bool:
    """Both tables. True when every goal that was measured is met."""
    raw = Table(title="measured")
    for heading in ("scenario", "figure", "value"):
        raw.add_column(heading, justify="right" if heading == "value" else "left")
    for scenario, row in results.items():
        for place, (name, value) in enumerate(row.items()):
            raw.add_row(scenario if place == 0 else "", name, f"{_short(value):,}", end_section=place == len(row) - 1)
    console.print(raw)
    baseline = msgspec.json.decode(BASELINE.read_bytes())["ratios"] if BASELINE.exists() else {}
    table = Table(title="goals")
    for heading in ("goal", "wanted", "now", "baseline", ""):
        table.add_column(heading, justify="right" if heading in ("now", "baseline") else "left")
    found = figures(results, GOALS)
    met = True
    for goal in GOALS:
        if goal.name in found:
            good = goal.met(found[goal.name])
            met = met and good
            before = f"{baseline[goal.name]:.3g}" if goal.name in baseline else ""
            mark = "[green]met[/]" if good else "[red]not met[/]"
            table.add_row(goal.name, goal.wanted, f"{found[goal.name]:.3g}", before, mark)
    for name, value in figures(results, OTHERS).items():
        table.add_row(name, "", f"{value:.3g}", f"{baseline[name]:.3g}" if name in baseline else "", "")
    console.print(table)
    return met
