"""`sie-stream demo-canary`: three versions are rolled out under load; one is good, one scores wrong, one is slow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Raw, Struct
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from scheduler.state import ClusterState
from sie_stream.cli.ask import ask, of_kind
from sie_stream.cli.canary_load import SETTLE_S, Load, try_rates
from sie_stream.cli.canary_rate import RATES, rate_with_room
from sie_stream.cli.cluster import Cluster, Layout
from sie_stream.cli.declare import apply_specs, load_specs, with_absolute_paths
from sie_stream.cli.output import OutputFormat, OutputOption, console, error_console, show_json, show_rows
from sie_stream.cli.rollout import followed
from sie_stream.cli.rollout_view import history_rows, picture, status_rows
from sie_stream.control import ApplyModel
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.stop import Interrupted, StopFlag
from sie_stream.errors import SieError
from sie_stream.spec import Gates, ModelSpec, Rollout, to_json

MODEL = "wine-rf"
SWAPPED = ("alcalinity_of_ash", "magnesium")
"""The scoring bug: two neighbouring columns change places, as after a careless refactoring of a feature pipeline."""
GROWN = 800_000
"""The slow path: rows among which an ensemble's challenger of weight 0 looks for neighbours, for every request."""
GROWN_MB = 512
LOOK_S = 0.25
DRAIN_S = 20.0
CALM_S = 12.0
TOTAL_S = 240.0
"""For everything after the start."""
MOVED_MS, MOVED_SHARE = 3.0, 0.1
"""How much a good rollout may move the p99 of the stable traffic: one or the other."""
COLUMNS = ["act", "version", "ending", "took_s", "why"]


class CanaryFailed(SieError):
    """The demonstration did not show what it promises."""

    code = "demo_failed"


class Act(Struct, frozen=True):
    title: str
    version: str
    ending: str
    """How its rollout must end."""
    named: tuple[str, ...]
    """Gates, one of which a rollback must name."""
    changes: Callable[[ModelSpec, Grown], dict[str, Any]]


class Grown:
    """The slow version's weights, made by a process of their own while the system starts."""

    def __init__(self, model: Path, out: Path) -> None:
        self._out = out
        self._digest = ""
        command = [sys.executable, "-m", "zoo.grown", str(model), "--rows", str(GROWN), "--out", str(out)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait(self, tick: Callable[[], None]) -> None:
        """Until they are made: latencies are compared later, and this takes a whole core. Raises CanaryFailed."""
        while self._process.poll() is None:
            tick()
            time.sleep(LOOK_S)
        digest, trouble = self._process.communicate()
        if self._process.returncode:
            raise CanaryFailed(f"the slow version could not be made: {trouble[-2_000:]}")
        self._digest = digest.strip()

    def changes(self, spec: ModelSpec) -> dict[str, Any]:
        source = spec.source.model_copy(update={"uri": str(self._out), "digest": self._digest})
        return {"source": source, "min_gpu_memory_mb": GROWN_MB}

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def _same(_spec: ModelSpec, _grown: Grown) -> dict[str, Any]:
    return {}


def _swapped(spec: ModelSpec, _grown: Grown) -> dict[str, Any]:
    names = {SWAPPED[0]: SWAPPED[1], SWAPPED[1]: SWAPPED[0]}
    features = [names.get(name, name) for name in spec.backend.config["features"]]
    config = {**spec.backend.config, "features": features}
    return {"backend": spec.backend.model_copy(update={"config": config})}


def _grown(spec: ModelSpec, grown: Grown) -> dict[str, Any]:
    return grown.changes(spec)


ACTS = (
    Act("a good version", "2.0.0", "completed", (), _same),
    Act("a subtle score bug: two columns changed places", "3.0.0", "rolled_back", ("ks:", "psi:"), _swapped),
    Act("a slow path: a challenger of weight 0 was left in the ensemble", "4.0.0", "rolled_back", ("p99_",), _grown),
)


def demo_canary(
    rate: Annotated[
        int | None, typer.Option(help="Requests per second; default: half of what this machine carries.", min=50)
    ] = None,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1, max=16)] = 1,
    hold_s: Annotated[float, typer.Option("--hold", help="Seconds at each step.", min=1, max=30)] = 6.0,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Roll a good, a wrong and a slow version out under load on a real Kafka; show that only the good one stays.

    \b
    Examples:
      sie-stream demo-canary
      sie-stream demo-canary --rate 3200 --workers 3 -o json
    """
    stop = StopFlag.on_signals()
    state_dir = Path(tempfile.mkdtemp(prefix="sie-stream-canary-"))
    settings = msgspec.structs.replace(load_settings(), state_dir=str(state_dir))
    screen = console if output is OutputFormat.TABLE else error_console
    cluster = Cluster(
        settings, Layout(workers=workers, compiler="steady"), lambda text: screen.print(f"[dim]  {text}[/]"), stop.check
    )
    try:
        report = Canary(cluster, stop, screen, rate, round(hold_s * 1_000)).run()
    except Interrupted:
        screen.print("stopped")
        raise typer.Exit(130) from None
    finally:
        cluster.stop()
        shutil.rmtree(state_dir, ignore_errors=True)
    if output is OutputFormat.JSON:
        show_json(report)
    else:
        show_rows(report["acts"], COLUMNS, output, empty="")
        screen.print(
            f"requests {report['requests']} at {report['rate']}/s: {report['statuses']}, lost {report['lost']}",
            highlight=False,
        )
        screen.print(f"p99 of the stable traffic: {report['p99']['words']}", highlight=False)


class Canary:
    """One run of the demonstration."""

    def __init__(self, cluster: Cluster, stop: StopFlag, screen: Console, rate: int | None, hold_ms: int) -> None:
        self._cluster = cluster
        self._stop = stop
        self._screen = screen
        self._rate = rate
        self._rollout = Rollout(hold_ms=hold_ms, samples_min=100, gates=Gates(p99_ratio_max=1.5))
        self._deadline = 0.0

    def run(self) -> dict[str, Any]:
        """Raises CanaryFailed when an act ends otherwise than it must, or an answer is missing."""
        cluster = self._cluster
        cluster.start()
        self._deadline = time.monotonic() + TOTAL_S
        models_dir = Path(cluster.settings.models_dir).absolute()
        [(spec, folder)] = load_specs(models_dir / MODEL / "model-spec.yaml")
        grown = Grown(folder, cluster.state_dir / "grown")
        try:
            apply_specs(cluster.connection, [(spec, folder)], 60.0, lambda _: None, self._tick)
            grown.wait(self._tick)
            rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
            with Load(cluster.connection, MODEL, rows) as load:
                return self._play(load, with_absolute_paths(spec, folder), grown)
        finally:
            grown.stop()

    def _play(self, load: Load, spec: ModelSpec, grown: Grown) -> dict[str, Any]:
        load.pace(self._rate or RATES[0])
        self._wait(CALM_S / 2)  # the first answers meet cold caches
        rate = self._rate or self._found_rate(load)
        load.pace(rate)
        before, spread = self._calm(load)
        acts = [self._act(ACTS[0], spec, grown, load)]
        during = load.p99_ms("stable")
        after, _ = self._calm(load)
        acts += [self._act(act, spec, grown, load) for act in ACTS[1:]]
        load.stop()
        load.drain(DRAIN_S)
        lost = load.sent - load.answered
        if lost or set(load.statuses) != {"ok"}:
            raise CanaryFailed(f"of {load.sent} requests {lost} have no answer; answers: {load.statuses}")
        seen = {"requests": load.sent, "statuses": load.statuses, "lost": lost}
        return {"acts": acts, "rate": rate, **seen, "p99": moved(before, during, after, spread)}

    def _found_rate(self, load: Load) -> int:
        """Half of the rate at which requests begin to wait for each other: a rollout adds transactions."""
        tried = try_rates(load, self._wait)
        found = rate_with_room(tried)
        seen = ", ".join(f"{one.rate}/s: {one.p90_ms:g} ms" for one in tried)
        self._screen.print(f"  p90 by rate: {seen}; going on with {found} requests a second", highlight=False)
        return found

    def _calm(self, load: Load) -> tuple[float | None, list[float]]:
        """p99 of the stable version while nothing is rolled out, of all the time and of each slice; forgotten then."""
        self._wait(SETTLE_S)
        load.forget()
        self._wait(CALM_S)
        seen = load.p99_ms("stable"), load.p99_by_slice("stable")
        load.forget()
        return seen

    def _tick(self) -> None:
        self._stop.check()
        self._cluster.watch()
        if time.monotonic() > self._deadline:
            raise CanaryFailed(f"not done within {TOTAL_S:g} s: try a lower --rate, this machine may not carry it")

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()
            time.sleep(LOOK_S)

    def _act(self, act: Act, spec: ModelSpec, grown: Grown, load: Load) -> dict[str, Any]:
        self._screen.print(f"[bold]{act.title}[/] ({act.version})", highlight=False)
        changes = {"version": act.version, "rollout": self._rollout, **act.changes(spec, grown)}
        started = time.monotonic()
        command = ApplyModel(Raw(to_json(spec.model_copy(update=changes))), "demo")
        answers = of_kind({"rollout_started", "model_rejected"})
        [answer] = ask(self._cluster.connection, [command], [MODEL], answers, 15.0)
        if answer.kind == "model_rejected":
            raise CanaryFailed(f"{act.version} was refused: {answer.reason}")
        row = self._watched(act, load)
        took_s = round(time.monotonic() - started, 1)
        self._screen.print(f"  {row['ending']} after {took_s} s: {row['why']}", markup=False, highlight=False)
        named = not act.named or any(gate in row["why"] for gate in act.named)
        if row["ending"] != act.ending or not named:
            wanted = f"{act.ending} {' or '.join(act.named)}"
            raise CanaryFailed(f"{act.title}: {row['ending']} ({row['why']}), expected {wanted}")
        return {"act": act.title, "version": act.version, "ending": row["ending"], "took_s": took_s, "why": row["why"]}

    def _watched(self, act: Act, load: Load) -> dict[str, Any]:
        """Shows the rollout until it ends: a live table on a terminal, else one line for each step."""
        live = Live(console=self._screen, auto_refresh=False) if self._screen.is_terminal else None
        said = ""
        with live or nullcontext():
            for state in followed(self._cluster.connection):
                self._tick()
                if live is not None:
                    live.update(_picture(state, load), refresh=True)
                elif (line := _line(state)) and line != said:
                    self._screen.print(f"  {line}", markup=False, highlight=False)
                    said = line
                for row in history_rows(state, MODEL):
                    if row["version"] == act.version:
                        return row
        raise CanaryFailed("the log of the control plane ended")


def _picture(state: ClusterState, load: Load) -> Group:
    note = f"sent {load.sent}, answered {load.answered}, p99 of the stable version {load.p99_ms('stable')} ms"
    return Group(picture(state, MODEL), Text(note, style="dim"))


def _line(state: ClusterState) -> str:
    steps = [f"{row['share']} of the keys to {row['version'].split()[-1]}" for row in status_rows(state, MODEL)]
    return steps[0] if steps else ""


def moved(before: float | None, during: float | None, after: float | None, spread: list[float]) -> dict[str, Any]:
    """The p99 of the stable version during the good rollout against the mean of before and after: a machine that slows
    down by itself is not held against the rollout.
    """
    if before is None or during is None or after is None:
        raise CanaryFailed("the stable version answered nothing")
    calm = (before + after) / 2
    change = during - calm
    little = change < MOVED_MS or change < MOVED_SHARE * calm
    words = f"{before} ms before, {during} ms during the good rollout, {after} ms after it ({change:+.1f} ms, "
    words += f"{change / calm:+.0%}): {'within' if little else 'beyond'} {MOVED_MS:g} ms or {MOVED_SHARE:.0%}"
    words += f"; before, two-second slices had {spread[0]} to {spread[-1]} ms"
    if not little and during <= spread[-1]:
        words += ", so the machine moves it as much by itself"
    times = {"before_ms": before, "during_ms": during, "after_ms": after, "spread_ms": [spread[0], spread[-1]]}
    return {**times, "little": little, "words": words}
