"""`sie-stream topics plan|apply`: the topics as declared in topics/*.yaml, against the cluster as it is."""

from __future__ import annotations

from typing import Any

import msgspec
import typer

from sie_stream.cli import topic_holds
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    console,
    show_json,
    show_rows,
    with_examples,
)
from sie_stream.edge.connection import Connection
from sie_stream.edge.registry import register_released
from topics.catalog import system_topics
from topics.edge.admin import KafkaAdmin
from topics.plan import (
    AddPartitions,
    ChangeConfig,
    CreateTopic,
    Drift,
    Held,
    TopicChange,
    UnsetConfig,
    plan,
    repairable,
)

app = typer.Typer(
    help=with_examples(
        "Topics and schemas of this installation: plan, apply, and legal holds.",
        "sie-stream topics plan",
        'sie-stream topics hold results --reason "case 4711"',
    ),
    no_args_is_help=True,
)
app.command("hold")(topic_holds.hold)
app.command("release")(topic_holds.release)
app.command("holds")(topic_holds.holds)


def planned(connection: Connection) -> tuple[TopicChange, ...]:
    """What has to change so that the system topics are as declared."""
    desired = system_topics(connection.settings)
    return plan(desired, KafkaAdmin.of(connection.settings).describe([spec.topic for spec in desired]))


def in_words(change: TopicChange) -> dict[str, Any]:
    match change:
        case CreateTopic():
            what = f"create with {change.partitions} partitions"
        case AddPartitions():
            what = f"add partitions: {change.partitions_now} -> {change.partitions}"
        case ChangeConfig():
            what = f"set {change.name}: {change.value_now or 'default'} -> {change.value}"
        case UnsetConfig():
            what = f"unset {change.name}: {change.value_now} -> default"
        case Held():
            what = change.message
        case Drift():
            what = f"cannot be repaired: {change.message}"
    return {"topic": change.topic, "change": what, **msgspec.to_builtins(change)}


@app.command("plan")
def plan_topics(bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show what `topics apply` would change; exit code 2 when there is something.

    \b
    Examples:
      sie-stream topics plan -o json
    """
    changes = planned(Connection.open(bootstrap_servers))
    show_rows([in_words(change) for change in changes], ["topic", "change"], output, empty="topics are as declared")
    if repairable(changes):
        raise typer.Exit(2)


@app.command("apply")
def apply_topics(bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Create and change topics as declared, and register the released schemas. Running it again changes nothing.

    \b
    Examples:
      sie-stream topics apply -b kafka-1:9092
    """
    connection = Connection.open(bootstrap_servers)
    changes = planned(connection)
    KafkaAdmin.of(connection.settings).apply(repairable(changes))
    register_schemas(connection)
    if output is OutputFormat.JSON:
        show_json([in_words(change) for change in changes])
    else:
        show_rows([in_words(change) for change in changes], ["topic", "change"], output, empty="topics are as declared")
        console.print("schemas are registered")


def register_schemas(connection: Connection) -> None:
    reader, writer = connection.reader(), connection.plain_writer()
    try:
        register_released(reader, writer, connection.settings.topics)
    finally:
        reader.close()
        writer.close()
