"""`sie-stream up` and `down`: the whole engine on this machine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from sie_stream.cli.cluster import Cluster, Layout, refuse_if_running, refuse_taken_port, start_detached
from sie_stream.cli.output import OutputFormat, OutputOption, console, show_json, show_rows
from sie_stream.cli.referring import ReferencesOption, as_urls
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.stop import Interrupted, StopFlag
from sie_stream.edge.supervisor import RunState, process_alive
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.settings import TIERS, Settings

WATCH_EVERY_S = 0.1


def up(
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1, max=64)] = 2,
    ingress: Annotated[int, typer.Option(help="Ingress processes.", min=1, max=64)] = 1,
    schedulers: Annotated[
        int, typer.Option(help="Scheduler processes: one leads, the others stand by.", min=1, max=5)
    ] = 1,
    tiers: Annotated[
        str,
        typer.Option(help="Tiers of the workers, in turn: tier-0 takes P0 models only and goes first on this machine."),
    ] = "",
    metrics_port: Annotated[
        int,
        typer.Option(
            help="Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics; 0: do not.", min=0, max=65_535
        ),
    ] = 0,
    references: ReferencesOption = "",
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once everything is ready; stop with `down`.")
    ] = False,
    bootstrap_servers: Annotated[
        str, typer.Option("--bootstrap-servers", "-b", help="Use this Kafka instead of the embedded broker.")
    ] = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Start broker, scheduler, workers, ingress, egress and the bridge to other clusters on this machine.

    Logs go to .sie/logs, one file per process. Ctrl-C stops everything in order.

    \b
    Examples:
      sie-stream up
      sie-stream up --workers 3 --detach
      sie-stream up --workers 2 --tiers tier-0,tier-1
      sie-stream up --metrics-port 9464
      sie-stream up --references /data/inputs,s3://bucket/inputs
      sie-stream up --bootstrap-servers kafka-1:9092
    """
    asked = {"bootstrap_servers": bootstrap_servers, "reference_prefixes": as_urls(references)}
    overrides = {name: text for name, text in asked.items() if text}
    settings = load_settings(overrides)
    layout = Layout(
        workers=workers,
        ingress=ingress,
        schedulers=schedulers,
        tiers=parse_tiers(tiers),
        metrics_port=metrics_port,
        compiler="steady",
    )
    refuse_if_running(Path(settings.state_dir).absolute())
    refuse_taken_port(metrics_port)
    if detach:
        given = {"--bootstrap-servers": bootstrap_servers, "--references": as_urls(references)}
        arguments = again(layout) + [part for option, text in given.items() if text for part in (option, text)]
        show_state(start_detached(arguments, Path(settings.state_dir).absolute()), output)
        return
    run(settings, layout, output)


def again(layout: Layout) -> list[str]:
    """Options of `up` that give this layout."""
    arguments = ["--workers", str(layout.workers), "--ingress", str(layout.ingress)]
    arguments += ["--schedulers", str(layout.schedulers), "--metrics-port", str(layout.metrics_port)]
    return [*arguments, "--tiers", ",".join(layout.tiers)] if layout.tiers else arguments


def run(settings: Settings, layout: Layout, output: OutputFormat) -> None:
    """Start everything, and watch over it until somebody asks to stop."""
    stop = StopFlag.on_signals()
    cluster = Cluster(settings, layout, say=lambda text: console.print(f"[dim]{text}[/]"), check=stop.check)
    try:
        cluster.start()
        state = RunState.load(cluster.state_dir)
        assert state is not None
        show_state(state, output)
        console.print("Ready. Ctrl-C stops everything.")
        while not stop:
            cluster.watch()
            time.sleep(WATCH_EVERY_S)
    except Interrupted:
        pass  # asked to stop while starting: what was started is stopped below
    finally:
        console.print("stopping")
        cluster.stop()


def parse_tiers(text: str) -> tuple[str, ...]:
    """Raises ConfigError for a tier that does not exist."""
    tiers = tuple(part.strip() for part in text.split(",")) if text else ()
    for tier in tiers:
        if tier not in TIERS:
            known = ", ".join(filter(None, TIERS))
            raise ConfigError(f"--tiers: {tier!r}, allowed are {known}, or nothing.{did_you_mean(tier, TIERS)}")
    return tiers


def show_state(state: RunState, output: OutputFormat) -> None:
    """What runs where."""
    rows = [{"process": name, **facts} for name, facts in state.processes.items()]
    if state.broker_pid is not None:
        rows.insert(0, {"process": "broker", "pid": state.broker_pid, "log": str(state.bootstrap_servers)})
    if output is OutputFormat.JSON:
        show_json(
            {"bootstrap_servers": state.bootstrap_servers, "supervisor_pid": state.supervisor_pid, "processes": rows}
        )
        return
    console.print(f"Kafka at {state.bootstrap_servers}")
    show_rows(rows, ["process", "pid", "restarts", "log"], output, empty="nothing runs")


def down(
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for a clean stop.")] = 30.0,
) -> None:
    """Stop what `up` started in this folder; finished work is committed first.

    \b
    Examples:
      sie-stream down
    """
    state_dir = Path(load_settings().state_dir).absolute()
    state = RunState.load(state_dir)
    if state is None:
        console.print(f"nothing runs in {state_dir}")
        return
    os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while process_alive(state.supervisor_pid):
        if time.monotonic() > deadline:
            console.print(
                f"still stopping after {timeout_s:.0f} s (pid {state.supervisor_pid}); see {state_dir / 'up.log'}"
            )
            raise typer.Exit(1)
        time.sleep(0.1)
    console.print("stopped")
