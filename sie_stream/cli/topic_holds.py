"""`sie-stream topics hold|release|holds`: legal holds. The log says who, why and when; Kafka keeps the records."""

from __future__ import annotations

import getpass
from typing import Annotated, Any

import typer

from scheduler.worker_state import Hold
from sie_stream.cli.ask import ask, of_kind, show_answer
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    error_console,
    show_rows,
)
from sie_stream.cli.since import shown_time
from sie_stream.cli.workers import cluster_state
from sie_stream.control import HoldTopic, ReleaseTopic
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError, did_you_mean
from sie_stream.ports import TopicSpec
from sie_stream.settings import Settings
from topics.catalog import system_topics, work_topic
from topics.edge.admin import KafkaAdmin
from topics.plan import is_held, plan_hold, plan_release

ANSWER_S = 10.0
REFUSED = "hold_refused"
TopicArgument = Annotated[
    str, typer.Argument(help="Name of the topic, with or without the prefix of the installation.")
]


def hold(
    topic: TopicArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever looks at it later.")],
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Keep every record of a topic until `topics release`: nothing expires, nothing is compacted away.

    What is gone already does not come back. The hold stays through restarts and `topics apply`.

    \b
    Examples:
      sie-stream topics hold results --reason "case 2026-17, ask legal before release"
    """
    connection = Connection.open(bootstrap_servers)
    admin = KafkaAdmin.of(connection.settings)
    found = _existing(connection.settings, admin, topic)
    answer = _order(connection, HoldTopic(found.topic, reason, getpass.getuser()), "topic_held")
    admin.apply(plan_hold(found))
    if not is_held(admin.describe([found.topic])[found.topic]):
        raise ConfigError(f"{found.topic} is held on the log, but not in Kafka: run the same command again")
    _tell(answer, output)


def release(
    topic: TopicArgument, bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE
) -> None:
    """End a hold: the topic gets its declared retention back, and Kafka soon removes what is older.

    \b
    Examples:
      sie-stream topics release results
    """
    connection = Connection.open(bootstrap_servers)
    admin = KafkaAdmin.of(connection.settings)
    found = _existing(connection.settings, admin, topic)
    answer = _order(connection, ReleaseTopic(found.topic, getpass.getuser()), "topic_released", fine=is_held(found))
    admin.apply(plan_release(declared(connection.settings, found.topic), found))
    _tell(answer, output)


def holds(bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Which topics are held, since when, by whom and why; exit code 2 when Kafka and the log do not agree.

    \b
    Examples:
      sie-stream topics holds -o json
    """
    connection = Connection.open(bootstrap_servers)
    rows = hold_rows(
        cluster_state(connection).holds,
        KafkaAdmin.of(connection.settings).describe_all(connection.settings.topic_prefix),
    )
    show_rows(rows, ["topic", "in_force", "since", "actor", "reason"], output, empty="no topic is held")
    if any(row["in_force"] != "yes" for row in rows):
        raise typer.Exit(2)


def hold_rows(on_log: dict[str, Hold], topics: list[TopicSpec]) -> list[dict[str, Any]]:
    """One row for each topic that is held on the log, in Kafka, or both."""
    in_kafka = {spec.topic for spec in topics if is_held(spec)}
    rows: list[dict[str, Any]] = []
    for topic in sorted({*on_log, *in_kafka}):
        found = on_log.get(topic)
        in_force = "yes" if topic in in_kafka else "no: hold it again"
        rows.append(
            {
                "topic": topic,
                "in_force": in_force if found is not None else "yes, but nobody asked for it on the log",
                "since": "" if found is None else shown_time(found.since_ms),
                "actor": "" if found is None else found.actor,
                "reason": "" if found is None else found.reason,
            }
        )
    return rows


def declared(settings: Settings, topic: str) -> TopicSpec:
    """What the installation says about one of its topics. Raises ConfigError for a topic that is not its own."""
    known = {spec.topic: spec for spec in system_topics(settings)}
    if topic in known:
        return known[topic]
    prefix = settings.topics.work("")
    if topic.startswith(prefix):
        return work_topic(settings, topic.removeprefix(prefix), 1)
    raise ConfigError(
        f"{topic!r} is no topic of this installation (allowed: {settings.topic_prefix}NAME and {prefix}MODEL): its "
        f"retention is declared elsewhere, so it has to be held there.{did_you_mean(topic, known)}"
    )


def _existing(settings: Settings, admin: KafkaAdmin, name: str) -> TopicSpec:
    topic = name if name.startswith(settings.topic_prefix) else f"{settings.topic_prefix}{name}"
    declared(settings, topic)
    found = admin.describe([topic]).get(topic)
    if found is None:
        raise ConfigError(f"topic {topic} does not exist: `sie-stream topics plan` shows what is missing")
    return found


def _order(connection: Connection, command: HoldTopic | ReleaseTopic, kind: str, *, fine: bool = False) -> Decision:
    """The scheduler's answer. `fine`: a refusal changes nothing about what is to be done."""
    answers = of_kind({kind, REFUSED})
    answer = ask(connection, [command], [command.topic], answers, ANSWER_S)[0]
    if answer.kind == REFUSED and not fine:
        error_console.print(f"{answer.subject}: {answer.reason}", highlight=False, markup=False)
        raise typer.Exit(1)
    return answer


def _tell(answer: Decision, output: OutputFormat) -> None:
    show_answer(answer, output, [f"{answer.decision}: {answer.kind} {answer.subject}: {answer.reason}"])
