"""`sie-stream simulate`: a fleet in virtual time, with the scheduler of production, and the baselines beside it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sie_stream.cli.output import OutputFormat, OutputOption, error_console, pick, show_json, show_rows
from sie_stream.errors import ConfigError
from sie_stream.sim.fleet.run import BASELINES, OURS, Report, load, shipped
from sie_stream.sim.fleet.run import simulate as run
from sie_stream.sim.fleet.scenario import Scenario

HOURS_MIN, HOURS_MAX = 0.01, 744.0
COLUMNS = (
    *(
        "policy",
        "requests",
        "in_sla_%",
        "high_sla_%",
        "cost_%",
        "batch_%",
        "untagged_%",
        "memory_%",
        "gpus",
        "replicas",
    ),
    *("switches", "moves", "failed", "redelivered", "waiting", "x_real_time", "digest"),
)

GC_THRESHOLD = 200_000


def simulate(
    scenario: Annotated[str, typer.Argument(help="A TOML file, or a scenario that is shipped (see --list).")] = "",
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same world.", min=0)] = 1,
    hours: Annotated[float | None, typer.Option("--hours", help="Virtual hours, instead of the scenario's.")] = None,
    baseline: Annotated[
        list[str] | None, typer.Option("--baseline", help=f"Compare with: {', '.join(BASELINES)}. May be repeated.")
    ] = None,
    baselines: Annotated[bool, typer.Option("--baselines", help="Compare with all of them.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder with public traces; default: what was fitted to them.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Scenarios that are shipped.")] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run a fleet through hours of traffic and faults in virtual time, with the real scheduler, solver and routing.

    Engines are models of engines, from the latency and memory that the models declare. No Kafka and no GPU is needed.
    A request of a model with two tags counts for both, so the tags may add up to more than there were requests.

    \b
    Examples:
      sie-stream simulate --list
      sie-stream simulate a100-32x8 --baselines
      sie-stream simulate double-peak --hours 24 --baseline static --seed 7
      sie-stream simulate my-fleet.toml -o json
    """
    if listing:
        rows = [{"scenario": name, "hours": load(name).hours, "title": load(name).title} for name in shipped()]
        show_rows(rows, ("scenario", "hours", "title"), output, "No scenario is shipped.")
        return
    if not scenario:
        raise typer.BadParameter(f"name a scenario: a TOML file, or one of {', '.join(shipped())}")
    chosen = load(scenario)
    if hours is not None:
        if not HOURS_MIN <= hours <= HOURS_MAX:
            raise typer.BadParameter(f"--hours {hours:g}: allowed {HOURS_MIN:g} to {HOURS_MAX:g}")
        chosen = msgspec.structs.replace(chosen, hours=hours)
    if data is not None and not data.is_dir():
        raise ConfigError(f"--data {data}: there is no such folder. Leave it out to use what was fitted to the traces.")
    others = (
        [*BASELINES] if baselines else [pick("--baseline", name, {b: b for b in BASELINES}) for name in baseline or ()]
    )
    calm_garbage_collector()
    reports = _all(chosen, [OURS, *others], seed, data)
    if output is OutputFormat.JSON:
        show_json([msgspec.to_builtins(report) for report in reports])
        return
    show_rows([_row(report) for report in reports], COLUMNS, output, "")
    _latencies(reports[0])


def calm_garbage_collector() -> None:
    """A fleet is a million records without cycles: looking for some each few hundred takes a sixth of the time."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _all(scenario: Scenario, policies: Sequence[str], seed: int, data: Path | None) -> list[Report]:
    """One after another, with a bar for each. Ctrl-C ends it cleanly."""
    reports: list[Report] = []
    if not error_console.is_terminal:  # no bar there: say at least what takes so long
        error_console.print(f"simulating {scenario.hours:g} h with {', '.join(policies)} ...", highlight=False)
    columns = (
        TextColumn("{task.description:<12} {task.fields[phase]:<10}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
    )
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=error_console, transient=True) as bars:
        for policy in policies:
            bar = bars.add_task(policy, total=1.0, phase="")

            def show(what: str, share: float, bar=bar) -> None:
                bars.update(bar, completed=share, phase=what)

            reports.append(run(scenario, policy, seed, data, show))
            bars.update(bar, completed=1.0, phase="done")
    return reports


def _row(report: Report) -> dict[str, str | int | float]:
    by_tag = {tag.tag: _percent(tag.attainment) for tag in report.tags}
    return {
        "policy": report.policy,
        "requests": report.requests,
        "in_sla_%": _percent(report.attainment),
        "high_sla_%": by_tag.get("high-sla", "-"),
        "cost_%": by_tag.get("cost-sensitive", "-"),
        "batch_%": by_tag.get("batch-job", "-"),
        "untagged_%": by_tag.get("none", "-"),
        "memory_%": f"{100 * report.memory_of_held:.1f}",
        "gpus": f"{report.devices_held:.0f}/{report.devices}",
        "replicas": f"{report.replicas:.0f}",
        "switches": report.switches,
        "moves": report.migrations,
        "failed": report.failed + report.lost,
        "redelivered": report.redelivered,
        "waiting": report.waiting,
        "x_real_time": f"{report.measured.speed:.0f}",
        "digest": report.digest,
    }


def _percent(share: float) -> str:
    return f"{100 * share:.3f}"


def _latencies(report: Report) -> None:
    m = report.measured
    typer.echo(
        f"\n{report.policy}: {report.hours:g} h, {report.models} models, {report.devices} GPUs in {m.wall_s:.1f} s: "
        f"{m.speed:.0f} x real time, {m.traffic_speed:.0f} x after the fleet was set up; {m.cpu_s:.1f} s of CPU time, "
        f"{m.cpu_speed:.0f} x\n"
        f"decisions on this machine, CPU time: {m.decisions}, p50 {m.decision_p50_ms:g} ms, p99 "
        f"{m.decision_p99_ms:g} ms; with the solver {m.placements}, p50 {m.placement_p50_ms:g} ms, p99 "
        f"{m.placement_p99_ms:g} ms, longest {m.placement_max_ms:g} ms\n"
        f"memory: share of the GPUs that hold any replica, over time; of the whole fleet {report.memory_of_fleet:.1%}\n"
        "tags: a model with two counts for both, one without any is untagged; waiting: requests not answered when the "
        "time was over"
    )
