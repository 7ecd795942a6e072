"""`sie-stream apply|get|describe|delete|schema`: models and what became of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from scheduler.capability import capability_matrix
from scheduler.capability_words import ROW_COLUMNS, matrix_rows
from scheduler.device_classes import DeviceClass, classes_of
from scheduler.life import life_of
from schemas.codec import decode_row
from sie_stream.cli.ask import NotReady, nothing
from sie_stream.cli.declare import NotServing, awaited, declare, rolls_out, specs_for, stays_declared, wait_ready
from sie_stream.cli.declare import delete as delete_declared
from sie_stream.cli.fleet import topologies
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    console,
    pick,
    say,
    show_json,
    show_rows,
    tell,
)
from sie_stream.cli.progress import progress_bars
from sie_stream.cli.queued import fate, queued, topic_of
from sie_stream.cli.workers import cluster_state, worker_rows
from sie_stream.control import InstanceRow, ModelRow, PlacementRow, RouteRow
from sie_stream.edge.connection import Connection
from sie_stream.edge.tables import latest_rows
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.ids import instance_id
from sie_stream.rollout_records import STABLE
from sie_stream.spec import ModelSpec, json_schema
from topics.edge.admin import KafkaAdmin

Rows = list[dict[str, Any]]


def apply(
    file: Annotated[
        list[Path], typer.Option("--file", "-f", help="Declaration (YAML or JSON), or a folder of them; repeatable.")
    ],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the models are ready.")] = True,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 120.0,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Declare models: new ones are placed and loaded, changed ones are replaced without a gap.

    Waits until what was applied serves; exit 1 when it could not be loaded, also while an older version goes on. What a
    rollout brings is not waited for. A breached gate may take a rollout back before its `samples_min` answers: these
    are needed to go on, not to stop.

    \b
    Examples:
      sie-stream apply -f .models/wine-rf -f .models/wine-svc
      sie-stream apply -f models/ --no-wait -o json
    """
    specs, connection = specs_for(lambda: Connection.open(bootstrap_servers), *file)
    decisions = declare(connection, specs, timeout_s, nothing)
    refused = [decision for decision in decisions if decision.kind == "model_rejected"]
    wanted = awaited(decisions)
    if wait and wanted:
        _wait(connection, wanted, timeout_s)
    if output is OutputFormat.JSON:
        show_json([msgspec.to_builtins(decision) for decision in decisions])
    else:
        rows = [{"model": d.subject, "decision": d.kind.removeprefix("model_"), "reason": d.reason} for d in decisions]
        show_rows(rows, ["model", "decision", "reason"], output, empty="nothing to apply")
        if wait and wanted:
            console.print("1 model is ready" if len(wanted) == 1 else f"{len(wanted)} models are ready")
        for model in [decision.subject for decision in decisions if rolls_out(decision)]:
            console.print(
                f"{model}: a rollout is under way and is not waited for; "
                f"`sie-stream rollout status {model} --follow` shows how it goes",
                highlight=False,
            )
    if refused:
        raise typer.Exit(1)


def _wait(connection: Connection, wanted: Mapping[str, int], timeout_s: float) -> None:
    """Until all serve. Raises NotReady; whoever leaves before, is told what stays behind."""
    try:
        with progress_bars() as progress:
            task = progress.add_task("ready", total=len(wanted))
            wait_ready(connection, wanted, timeout_s, lambda count: progress.update(task, completed=count), nothing)
    except NotServing as late:
        raise NotReady(f"{late}\n{stays_declared(late.left, late.older, late.partly)}") from None
    except KeyboardInterrupt:
        tell(f"No longer waiting for {', '.join(sorted(wanted)[:8])}. {stays_declared(tuple(wanted))}")
        raise


def get(
    what: Annotated[str, typer.Argument(help="models, instances, workers, placements, routes, topics or brokers.")],
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """List what there is.

    \b
    Examples:
      sie-stream get models
      sie-stream get workers -o json
    """
    reader_of, columns = pick("get", what.lower(), KINDS)
    show_rows(reader_of(Connection.open(bootstrap_servers)), columns, output, empty=f"no {what}")


def _table(connection: Connection, topic: str, row_type: type[Any]) -> list[Any]:
    reader = connection.reader()
    try:
        return list(latest_rows(reader, topic, lambda value: decode_row(value, row_type), tell).values())
    finally:
        reader.close()


def plain(row: msgspec.Struct) -> dict[str, Any]:
    """A row as dictionaries and lists; JSON texts inside it become objects."""
    return msgspec.json.decode(msgspec.json.encode(row))


def model_rows(connection: Connection) -> Rows:
    rows = []
    states = {row["model"]: row["status"] for row in instance_rows(connection)}
    for row in _table(connection, connection.settings.topics.models, ModelRow):
        spec = json.loads(bytes(row.spec))
        rows.append(
            {
                "model": row.model,
                "version": row.version,
                "backend": spec.get("backend", {}).get("name")
                if isinstance(spec.get("backend"), dict)
                else spec.get("backend"),
                "service_type": spec.get("service_type"),
                "priority": spec.get("priority_level", "P1"),
                "status": states.get(row.model, row.status),
                "instance": instance_id(row.model),
                "generation": row.generation,
                "not_enforced": list(row.not_enforced),
                "spec": spec,
            }
        )
    return rows


def instance_rows(connection: Connection) -> Rows:
    rows = []
    for row in _table(connection, connection.settings.topics.instances, InstanceRow):
        found = plain(row)
        own = [replica for replica in row.replicas if replica.variant == STABLE]
        found |= replica_counts(row)
        found["workers"] = [replica.worker for replica in own]
        found["variants"] = [
            f"{replica.variant} {replica.version} {replica.state} on {replica.worker}:{replica.device}"
            for replica in row.replicas
            if replica.variant != STABLE
        ]
        rows.append(found)
    return sorted(rows, key=lambda found: found["model"])


def replica_counts(row: InstanceRow) -> dict[str, Any]:
    """Replicas of the model itself that are ready, and how many are wanted: as numbers, and as text for people."""
    ready = sum(replica.state == "ready" and replica.variant == STABLE for replica in row.replicas)
    wanted = row.replicas_wanted if row.replicas_wanted >= 0 else None
    text = f"{ready}/{'?' if wanted is None else wanted}"
    return {"replicas_ready": ready, "replicas_wanted": wanted, "ready_replicas": text}


def placement_rows(connection: Connection) -> Rows:
    rows = []
    for row in _table(connection, connection.settings.topics.placements, PlacementRow):
        found = plain(row)
        found["replicas"] = [f"{r.worker}:{'+'.join(r.devices or (r.device,))}" for r in row.replicas]
        found["partitions"] = [f"{p.partition}->{p.worker}" for p in row.partitions]
        rows.append(found)
    return rows


def route_rows(connection: Connection) -> Rows:
    return [plain(row) for row in _table(connection, connection.settings.topics.routes, RouteRow)]


def topic_rows(connection: Connection) -> Rows:
    admin = KafkaAdmin(connection.settings.bootstrap_servers, connection.settings.client_overrides)
    described = admin.describe_all(connection.settings.topic_prefix)
    return [{"topic": topic.topic, "partitions": topic.partitions, "config": dict(topic.config)} for topic in described]


def broker_rows(connection: Connection) -> Rows:
    return [{"bootstrap_servers": connection.settings.bootstrap_servers}]


KINDS: dict[str, tuple[Callable[[Connection], Rows], list[str]]] = {
    "models": (model_rows, ["model", "version", "backend", "service_type", "priority", "status", "instance"]),
    "instances": (
        instance_rows,
        ["instance", "model", "version", "status", "ready_replicas", "workers", "variants", "message"],
    ),
    "workers": (
        worker_rows,
        ["worker", "state", "service", "incarnation", "pid", "devices", "backends", "models", "partitions"],
    ),
    "placements": (placement_rows, ["model", "topic", "replicas", "partitions"]),
    "routes": (
        route_rows,
        ["model", "instance", "route_epoch", "topic", "lanes", "width", "input_topic", "output_topic"],
    ),
    "topics": (topic_rows, ["topic", "partitions"]),
    "brokers": (broker_rows, ["bootstrap_servers"]),
}


def describe(
    model: Annotated[str, typer.Argument(help="Model name or mi-... instance.")],
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Everything about one model: declaration, replicas, partitions, timings, fields not enforced yet.

    \b
    Examples:
      sie-stream describe wine-rf
    """
    connection = Connection.open(bootstrap_servers)
    models = {row["model"]: row for row in model_rows(connection)}
    found = models.get(model) or next((row for row in models.values() if row["instance"] == model), None)
    if found is None:
        raise ConfigError(f"no model {model!r}.{did_you_mean(model, models)} `sie-stream get models` lists them.")
    name = found["model"]
    instance = next((row for row in instance_rows(connection) if row["model"] == name), {})
    placement = next((row for row in placement_rows(connection) if row["model"] == name), {})
    notices = missing_topics(connection)
    matrix = capability_matrix(ModelSpec.model_validate_json(json.dumps(found["spec"])), device_classes(connection))
    if output is OutputFormat.JSON:
        capability = {"fits": matrix_rows(matrix), "assumptions": list(matrix.assumptions)}
        life = life_rows(instance)
        states = {"instance_state": instance, "life": life, "placement": placement, "notices": notices}
        show_json({**found, **states, "capability": capability})
        return
    _describe_state(found, instance, placement, notices)
    show_rows(
        life_rows(instance), ["step", "after_ms", "took_ms", "words"], output, empty="no step of its life is known"
    )
    if found["not_enforced"]:
        say(f"declared, not enforced yet: {', '.join(found['not_enforced'])}")
    show_rows(matrix_rows(matrix), list(ROW_COLUMNS), output, empty="no live worker to run it")
    for sentence in matrix.assumptions:
        say(sentence)
    console.print_json(json.dumps(found["spec"]))


def missing_topics(connection: Connection) -> list[str]:
    """What keeps workers from following placements, although they live."""
    with closing(connection.reader()) as reader:
        if reader.partitions_of(connection.settings.topics.keys):
            return []
    return [
        f"{connection.settings.topics.keys} does not exist, so workers with a key ring (pii_keys) load no model: "
        "run `sie-stream topics apply`"
    ]


def _describe_state(
    found: Mapping[str, Any], instance: Mapping[str, Any], placement: Mapping[str, Any], notices: Sequence[str]
) -> None:
    say(f"{found['model']} {found['version']}  {found['instance']}  {instance.get('status', '?')}", style="bold")
    if instance.get("message"):
        say(f"message: {instance['message']}")
    for sentence in notices:
        say(sentence)
    say(f"replicas: {', '.join(placement.get('replicas', [])) or 'none'}")
    for line in instance.get("variants", []):
        say(f"beside it: {line}")
    say(f"partitions: {', '.join(placement.get('partitions', [])) or 'none'}")


def life_rows(instance: Mapping[str, Any]) -> Rows:
    """From the declaration to the first answer: when each step was reached, and what took how long."""
    return [plain(step) for step in life_of(instance.get("timings_ms", {}))]


def device_classes(connection: Connection) -> tuple[DeviceClass, ...]:
    return classes_of(topologies(cluster_state(connection)))


def delete(
    model: Annotated[str, typer.Argument(help="Model name.")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the scheduler.")] = 30.0,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Take a model away: no new requests, what is queued is worked off; its topics stay until retention ends.

    Says how many requests wait, and whether anybody is there to answer them.

    \b
    Examples:
      sie-stream delete wine-logreg
    """
    connection = Connection.open(bootstrap_servers)
    decision = delete_declared(connection, model, timeout_s, nothing)
    deleting = decision.kind == "model_deleting"
    topic = topic_of(decision, connection.settings.topics)
    waiting = _queued(connection, topic) if deleting else None
    if output is OutputFormat.JSON:
        show_json({**msgspec.to_builtins(decision), "queued": waiting})
    else:
        say(f"{decision.subject}: {decision.kind}: {decision.reason}")
        if deleting:
            say(fate(decision, topic, waiting))
    if decision.kind == "delete_ignored":
        raise typer.Exit(1)


def _queued(connection: Connection, topic: str) -> int | None:
    reader = connection.reader(connection.settings.topics.worker_group)
    try:
        return queued(reader, topic)
    finally:
        reader.close()


def schema() -> None:
    """Print the JSON Schema of declarations, for editors and validators.

    \b
    Examples:
      sie-stream schema > model-service.schema.json
    """
    show_json(json_schema())
