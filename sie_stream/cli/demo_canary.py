"""`sie-stream demo-canary`: three versions are rolled out under load; one is good, one scores wrong, one is slow."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Raw, Struct

from schemas.codec import decode_result
from sie_stream.cli.ask import ask, nothing, of_kind
from sie_stream.cli.cluster import Cluster, Layout
from sie_stream.cli.declare import apply_specs, load_specs, with_absolute_source
from sie_stream.cli.output import OutputFormat, OutputOption, console, error_console, show_json, show_rows
from sie_stream.cli.rollout_view import history_rows, status_rows
from sie_stream.cli.workers import cluster_state
from sie_stream.client.requests import Request, to_write
from sie_stream.control import ApplyModel
from sie_stream.edge.connection import Connection
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.stop import Interrupted, StopFlag
from sie_stream.errors import Retriable, SieError
from sie_stream.ids import TopicPartition
from sie_stream.sketch import bucket_of, quantile
from sie_stream.spec import Gates, ModelSpec, Rollout, to_json

MODEL = "wine-rf"
SWAPPED = ("alcalinity_of_ash", "magnesium")
"""The scoring bug: two neighbouring columns change places, as after a careless refactoring of a feature pipeline."""
TURN_S = 0.02
LOOK_S = 0.5
DRAIN_S = 30.0
CALM_S = 6.0
COLUMNS = ["act", "version", "ending", "took_s", "why"]


class CanaryFailed(SieError):
    """The demonstration did not show what it promises."""

    code = "demo_failed"


class Act(Struct, frozen=True):
    title: str
    version: str
    ending: str
    """How its rollout must end."""
    named: str
    """What the reason of a rollback must name."""
    changes: Callable[[ModelSpec], dict[str, Any]]


def _swapped(spec: ModelSpec) -> dict[str, Any]:
    names = {SWAPPED[0]: SWAPPED[1], SWAPPED[1]: SWAPPED[0]}
    features = [names.get(name, name) for name in spec.backend.config["features"]]
    config = {**spec.backend.config, "features": features}
    return {"backend": spec.backend.model_copy(update={"config": config})}


def _one_by_one(spec: ModelSpec) -> dict[str, Any]:
    return {"batch_sizes": spec.batch_sizes.model_copy(update={"max": 1, "preferred": ()})}


ACTS = (
    Act("a good version", "2.0.0", "completed", "", lambda _: {}),
    Act("a subtle score bug: two columns changed places", "3.0.0", "rolled_back", "score", _swapped),
    Act("a slow path: one request for each engine call", "4.0.0", "rolled_back", "p99", _one_by_one),
)


def demo_canary(
    rate: Annotated[int, typer.Option(help="Requests per second.", min=50)] = 800,
    workers: Annotated[int, typer.Option(help="Worker processes.", min=1, max=16)] = 2,
    hold_s: Annotated[float, typer.Option("--hold", help="Seconds at each step.", min=1)] = 8.0,
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
    say = console.print if output is OutputFormat.TABLE else error_console.print
    cluster = Cluster(settings, Layout(workers=workers), lambda text: say(f"[dim]  {text}[/]"), stop.check)
    try:
        report = _play(cluster, rate, round(hold_s * 1_000), stop, say)
    except Interrupted:
        say("stopped")
        raise typer.Exit(130) from None
    finally:
        cluster.stop()
        shutil.rmtree(state_dir, ignore_errors=True)
    if output is OutputFormat.JSON:
        show_json(report)
    else:
        show_rows(report["acts"], COLUMNS, output, empty="")
        say(f"requests {report['requests']}: {report['statuses']}, lost {report['lost']}")
        say(f"p99 of the stable version: {report['p99_ms_before']} ms before, {report['p99_ms_during']} ms during")


def _play(cluster: Cluster, rate: int, hold_ms: int, stop: StopFlag, say: Callable[..., None]) -> dict[str, Any]:
    cluster.start()
    models_dir = Path(cluster.settings.models_dir).absolute()
    [(spec, folder)] = load_specs(models_dir / MODEL / "model-spec.yaml")
    apply_specs(cluster.connection, [(spec, folder)], 60.0, lambda _: None, nothing)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    rollout = Rollout(hold_ms=hold_ms, samples_min=100, gates=Gates(p99_ratio_max=2.0))
    acts = []
    with Load(cluster.connection, rows, rate) as load:
        _watch(cluster, stop, time.monotonic() + CALM_S)
        before = load.p99_ms("stable")
        load.forget()
        for act in ACTS:
            say(f"[bold]{act.title}[/] ({act.version})")
            changes = {"version": act.version, "rollout": rollout, **act.changes(spec)}
            acts.append(_act(cluster, act, with_absolute_source(spec.model_copy(update=changes), folder), stop, say))
        during = load.p99_ms("stable")
        load.stop()
        load.drain(DRAIN_S)
    return {
        "acts": acts,
        "requests": load.sent,
        "statuses": load.statuses,
        "lost": load.sent - sum(load.statuses.values()),
        "p99_ms_before": before,
        "p99_ms_during": during,
    }


def _watch(cluster: Cluster, stop: StopFlag, until: float) -> None:
    while time.monotonic() < until:
        stop.check()
        cluster.watch()
        time.sleep(LOOK_S)


def _act(cluster: Cluster, act: Act, spec: ModelSpec, stop: StopFlag, say: Callable[..., None]) -> dict[str, Any]:
    """Raises CanaryFailed when it ends otherwise than it must."""
    started = time.monotonic()
    answers = of_kind({"rollout_started", "model_rejected"})
    [answer] = ask(cluster.connection, [ApplyModel(Raw(to_json(spec)), "demo")], [MODEL], answers, 15.0)
    if answer.kind == "model_rejected":
        raise CanaryFailed(f"{act.version} was refused: {answer.reason}")
    shown = ""
    while True:
        _watch(cluster, stop, time.monotonic() + LOOK_S)
        state = cluster_state(cluster.connection)
        ended = [row for row in history_rows(state, MODEL) if row["version"] == act.version]
        if ended:
            break
        for row in status_rows(state, MODEL):
            line = f"  {row['phase']} {row['share']} of the keys, {row['samples']} samples {row['gates']} {row['note']}"
            if row["share"] not in shown or not shown:
                say(line, markup=False)
                shown = line
        if time.monotonic() - started > 180:
            raise CanaryFailed(f"the rollout of {act.version} did not end within 180 s: {shown}")
    [row] = ended
    took_s = round(time.monotonic() - started, 1)
    say(f"  {row['ending']} after {took_s} s: {row['why']}", markup=False)
    if row["ending"] != act.ending or act.named not in row["why"]:
        raise CanaryFailed(f"{act.title}: {row['ending']} ({row['why']}), expected {act.ending} {act.named}")
    return {"act": act.title, "version": act.version, "ending": row["ending"], "took_s": took_s, "why": row["why"]}


class Load:
    """Sends at a steady rate from one thread and counts results in another."""

    def __init__(self, connection: Connection, rows: list[dict[str, Any]], rate: int) -> None:
        self._topics = connection.settings.topics
        self._writer = connection.plain_writer()
        self._reader = connection.reader()
        self._rows = itertools.cycle(rows)
        self._rate = rate
        self._stopping = threading.Event()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._count)]
        self._latency: dict[str, dict[int, int]] = {}
        self.sent = 0
        self.statuses: dict[str, int] = {}

    def __enter__(self) -> Load:
        places = [
            TopicPartition(self._topics.results, n) for n in range(self._reader.partitions_of(self._topics.results))
        ]
        self._reader.assign(self._reader.end_offsets(places))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._writer.close()
        self._reader.close()

    def stop(self) -> None:
        self._stopping.set()
        self._threads[0].join()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything sent is answered, or as long as this."""
        deadline = time.monotonic() + timeout_s
        while sum(self.statuses.values()) < self.sent and time.monotonic() < deadline:
            time.sleep(TURN_S)

    def p99_ms(self, variant: str) -> float | None:
        found = quantile(dict(self._latency.get(variant, {})), 0.99)
        return None if found is None else round(found, 1)

    def forget(self) -> None:
        self._latency = {}

    def _send(self) -> None:
        started = time.monotonic()
        while not self._stopping.is_set():
            due = int((time.monotonic() - started) * self._rate) - self.sent
            writes = []
            for number in range(self.sent, self.sent + due):
                request = Request(model=MODEL, inputs=next(self._rows), session=f"customer-{number % 5_003}")
                writes.append(to_write(request, f"canary-{number}", self._topics.requests))
            if writes:
                self._writer.write(writes)
                self.sent += len(writes)
            time.sleep(TURN_S)
        self._writer.flush(10_000)

    def _count(self) -> None:
        while not self._closing.is_set():
            try:
                records = self._reader.poll(5_000, 100)
            except Retriable:
                continue
            for record in records:
                result = decode_result(record.value)
                self.statuses[result.status] = self.statuses.get(result.status, 0) + 1
                latency = self._latency.setdefault(result.variant, {})
                bucket = bucket_of(result.timings_ms.total)
                latency[bucket] = latency.get(bucket, 0) + 1
