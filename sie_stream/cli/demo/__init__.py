"""`sie-stream demo`: the main job, end to end, with a worker killed on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sie_stream.cli.cluster import Cluster, Layout, refuse_if_running
from sie_stream.cli.declare import apply_specs
from sie_stream.cli.demo.screen import Milestones, live, live_view, progress_bars, proof_line, show_summary
from sie_stream.cli.demo.tally import Tally
from sie_stream.cli.demo.traffic import DemoModel, load_models, plan
from sie_stream.cli.output import OutputFormat, OutputOption, console, error_console, show_json
from sie_stream.client.requests import Request, to_write
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.stop import Interrupted, StopFlag
from sie_stream.errors import SieError

MODELS_MIN = 117
TICK_S = 0.01
DRAIN_S = 60.0
KILL_AT = 0.35
"""Share of the requests sent when a worker is killed."""
VICTIM = "worker-0"


class DemoFailed(SieError):
    """The demo did not show what it promises."""

    code = "demo_failed"


def demo(
    rate: Annotated[int, typer.Option(help="Requests per second.", min=1)] = 400,
    seconds: Annotated[int, typer.Option(help="How long to send.", min=1, max=3600)] = 15,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=2, max=16)] = 2,
    keep: Annotated[bool, typer.Option("--keep", help="Keep logs and topic data in .sie/demo.")] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run 117+ real models on a real Kafka, kill a worker on the way, prove that nothing was lost or doubled.

    \b
    Examples:
      sie-stream demo
      sie-stream demo --rate 1500 --seconds 60 --workers 3 --keep
    """
    stop = StopFlag.on_signals()
    settings = load_settings()
    models = load_models(Path(settings.models_dir))
    if len(models) < MODELS_MIN:
        raise DemoFailed(
            f"only {len(models)} models in {settings.models_dir}, the demo wants {MODELS_MIN}: run `make models`"
        )
    state_dir = Path(settings.state_dir, "demo") if keep else Path(tempfile.mkdtemp(prefix="sie-stream-demo-"))
    if keep:
        refuse_if_running(state_dir.absolute())  # its state and logs are in that folder
        shutil.rmtree(state_dir, ignore_errors=True)
    settings = msgspec.structs.replace(settings, state_dir=str(state_dir))
    say = console.print if output is OutputFormat.TABLE else error_console.print
    cluster = Cluster(settings, Layout(workers=workers), lambda text: say(f"[dim]  {text}[/]"), stop.check)
    show = Demonstration(cluster, models, stop, say)
    try:
        report = show.run(rate * seconds, rate)
    except Interrupted:
        say("stopped")
        raise typer.Exit(130) from None
    finally:
        cluster.stop()
        if not keep:
            shutil.rmtree(state_dir, ignore_errors=True)
    if output is OutputFormat.JSON:
        show_json(report)


class Demonstration:
    """One run: start, apply, send (and kill), drain, prove."""

    def __init__(self, cluster: Cluster, models: list[DemoModel], stop: StopFlag, say: Callable[..., None]) -> None:
        self.cluster = cluster
        self.models = models
        self.stop = stop
        self.say = say
        self.note = ""
        self.killed_at: float | None = None
        self.orphaned = 0

    def run(self, requests: int, rate: int) -> dict[str, Any]:
        """Raises DemoFailed when the proof does not hold."""
        started = time.monotonic()
        self.say(f"[bold]1. start[/]: broker, scheduler, {self.cluster.layout.workers} workers, ingress, egress")
        self.cluster.start()
        self.say(f"[bold]2. declare[/] {len(self.models)} models and wait until each is ready")
        self._apply()
        self.say(f"[bold]3. stream[/] {requests} requests at {rate}/s; kill {VICTIM} (SIGKILL) on the way")
        connection = self.cluster.connection
        service_types = {model.spec.model_id: model.spec.service_type for model in self.models}
        tally = Tally(connection.reader("sie-demo"), connection.settings.topics.results, service_types)
        try:
            sent, stream_s = self._stream(list(plan(self.models, requests)), rate, tally)
        finally:
            tally.close()
        self.say("[bold]4. prove[/]")
        proof = self._prove()
        facts = {
            "models": f"{len(self.models)} on {self.cluster.layout.workers} workers",
            "throughput": f"{sent / stream_s:.0f} requests/s over {stream_s:.1f} s, first sent to last answered",
            "worker killed": self._recovery(tally),
            "whole demo": f"{time.monotonic() - started:.0f} s",
        }
        if self.say == console.print:
            show_summary(console, tally, proof, facts)
        self._judge(proof, sent)
        return {"proof": proof, **facts}

    def _apply(self) -> None:
        with progress_bars(error_console) as progress:
            task = progress.add_task("models ready", total=len(self.models))
            lines = self._milestones("models ready", len(self.models))

            def told(ready: int) -> None:
                progress.update(task, completed=ready)
                lines.reached(ready)

            specs = [(model.spec, model.folder) for model in self.models]
            apply_specs(self.cluster.connection, specs, 90.0, told, self._tick)

    def _milestones(self, what: str, total: int) -> Milestones:
        return Milestones(what, total, None if error_console.is_terminal else self.say)

    def _tick(self) -> None:
        self.stop.check()
        self.cluster.watch()

    def _stream(self, requests: list[Request], rate: int, tally: Tally) -> tuple[int, float]:
        topic = self.cluster.settings.topics.requests
        writes = [to_write(request, request.request_id or "", topic) for request in requests]
        writer = self.cluster.connection.plain_writer()
        progress = progress_bars(error_console)
        sending = progress.add_task("sent", total=len(writes))
        answered = progress.add_task("terminal records", total=len(writes))
        lines = self._milestones("terminal records", len(writes))
        started = time.monotonic()
        sent = 0
        with live(error_console, live_view(progress, tally, "")) as show:
            while tally.terminal < len(writes):
                due = min(len(writes), int((time.monotonic() - started) * rate) + 1)
                writer.write(writes[sent:due])
                sent = due
                self._tick()
                self._maybe_kill(sent, len(writes), tally)
                progress.update(sending, completed=sent)
                progress.update(answered, completed=tally.terminal)
                lines.reached(tally.terminal)
                show(live_view(progress, tally, self.note))
                self._check_time(tally, started, len(writes) / rate + DRAIN_S, len(writes))
                time.sleep(TICK_S)
        lines.reached(tally.terminal)
        writer.flush(10_000)
        writer.close()
        return sent, time.monotonic() - started

    def _check_time(self, tally: Tally, started: float, limit_s: float, total: int) -> None:
        if tally.error is not None:
            raise DemoFailed(f"the results reader failed: {tally.error}") from tally.error
        if time.monotonic() - started > limit_s:
            raise DemoFailed(
                f"only {tally.terminal} of {total} requests had a terminal record after {limit_s:.0f} s; "
                "run again with --keep and look into .sie/demo/logs"
            )

    def _maybe_kill(self, sent: int, total: int, tally: Tally) -> None:
        if self.killed_at is None and sent >= KILL_AT * total:
            assert self.cluster.supervisor is not None
            child = self.cluster.supervisor.children[VICTIM]
            os.kill(child.pid, signal.SIGKILL)
            self.killed_at = time.monotonic()
            tally.orphan(child.incarnation)
            self.orphaned = len(tally.orphans)
            self.note = f"killed {VICTIM} (pid {child.pid}), which served {self.orphaned} models"
            if not error_console.is_terminal:
                self.say(f"  {self.note}")

    def _recovery(self, tally: Tally) -> str:
        if self.killed_at is None or not tally.adopted_at:
            return f"{VICTIM} by SIGKILL; it had answered nothing yet"
        waits = [at - self.killed_at for at in tally.adopted_at]
        return (
            f"{VICTIM} by SIGKILL; of the {self.orphaned} models it served, the first was answered by another "
            f"after {waits[0]:.2f} s, the last ({len(waits)}) after {waits[-1]:.2f} s"
        )

    def _prove(self) -> dict[str, Any]:
        """The witness runs as a process of its own."""
        command = [sys.executable, "-m", "sie_stream.cli.demo.proof"]
        command += ["--bootstrap-servers", self.cluster.settings.bootstrap_servers]
        command += ["--topic-prefix", self.cluster.settings.topic_prefix]
        witness = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if not witness.stdout:
            raise DemoFailed(f"the proof could not be computed:\n{witness.stderr[-2000:]}")
        return json.loads(witness.stdout)

    def _judge(self, proof: dict[str, Any], sent: int) -> None:
        bad = proof["duplicates"] or proof["lost"] or proof["unasked"] or proof["requests"] != sent
        if bad or proof["statuses"] != {"ok": sent}:
            raise DemoFailed(f"the proof does not hold: {proof_line(proof)}")
