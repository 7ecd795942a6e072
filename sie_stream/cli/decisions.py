"""`sie-stream decisions` and `undo`: what the scheduler decided and why, and taking it back."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from schemas.codec import decode_decision
from schemas.wire import CodecError
from sie_stream.cli.ask import ask, show_answer
from sie_stream.cli.known import declared_models, names_in, refuse_unknown
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    error_console,
    json_line,
    show_json,
    show_text,
)
from sie_stream.cli.since import shown_time, since_ms
from sie_stream.control import UndoDecision
from sie_stream.decisions import Decision, MemoryChange, Move, SolverRun, about, concerns, place_of
from sie_stream.edge.connection import Connection
from sie_stream.edge.tables import read_to_end
from sie_stream.errors import ConfigError, Retriable
from sie_stream.ids import TopicNames, TopicPartition, base_of, instance_id
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord

SLACK_MS = 60_000
"""A decision has the broker's time of its cause, its record the time of the scheduler's clock: the most they differ."""
POLL_MS = 200


class Logged(msgspec.Struct, frozen=True):
    """A decision and where it is on sie.decisions."""

    offset: int
    published_after_ms: int
    """From the cause's time (the broker's clock) to the decision's record (the scheduler's clock): how long deciding
    and waiting for its turn took, as far as the two clocks agree.
    """
    decision: Decision


def decisions(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Only about this model, its variants, or what moved something of them.")
    ] = "",
    since: Annotated[str, typer.Option("--since", help="90s, 10m, 2h, 7d ago, or an ISO time. Default: all.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-F", help="Go on with new decisions until Ctrl-C.")] = False,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """What the scheduler decided: who asked, on which facts, what was chosen, rejected and moved, memory, time.

    \b
    Examples:
      sie-stream decisions --model wine-rf
      sie-stream decisions --since 10m -o json
      sie-stream decisions --since 2026-03-01T12:00:00+01:00 --follow
    """
    at_ms = since_ms(since, round(time.time() * 1_000)) if since else 0
    connection = Connection.open(bootstrap_servers)
    topics = connection.settings.topics
    reader = connection.reader()
    try:
        found = logged(reader, topics.decisions, at_ms, follow=follow)
        asked = (entry for entry in found if wanted(entry.decision, model, at_ms))
        if output is OutputFormat.JSON and not follow:
            rows = [as_json(entry) for entry in asked]
            if model and not rows:
                refuse_unknown("--model", model, known_names(reader, topics))
            show_json(rows)
            return
        count = 0
        for entry in asked:
            count += 1
            if output is OutputFormat.JSON:
                typer.echo(json_line(as_json(entry)))
            else:
                show_text("\n".join(lines(entry)))
        if not count:
            if model:
                refuse_unknown("--model", model, known_names(reader, topics))
            error_console.print("no decisions")
    finally:
        reader.close()


def known_names(reader: LogReader, topics: TopicNames) -> set[str]:
    """Declared models, and whatever a decision was ever about."""
    models = declared_models(reader, topics)
    ever = names_in(entry.decision for entry in logged(reader, topics.decisions, 0, follow=False))
    return models | {instance_id(model) for model in models} | ever


def _undone(found: Decision) -> str:
    return found.undoes if found.kind in ANSWERS else ""


def wanted(decision: Decision, model: str, at_ms: int) -> bool:
    """Whether it is of `at_ms` or later and concerns the model, a name or `mi-...`; empty: any."""
    if decision.at_ms < at_ms:
        return False
    if not model:
        return True
    if not model.startswith("mi-"):
        return concerns(decision, model)
    return any(instance_id(base_of(name)) == model for name in about(decision) if name)


def logged(reader: LogReader, topic: str, at_ms: int, *, follow: bool) -> Iterator[Logged]:
    """Decisions from about `at_ms` on, to the present end or for ever. What cannot be read is told and passed over."""
    partitions = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
    starts = reader.offsets_at(partitions, at_ms - SLACK_MS) if at_ms else reader.beginning_offsets(partitions)
    ends = reader.end_offsets(partitions)
    seen = {place: min(starts[place], ends[place]) for place in partitions}
    for record in read_to_end(reader, topic, seen):
        seen[TopicPartition(record.topic, record.partition)] = record.offset + 1
        yield from _decoded(record)
    if not follow:
        return
    reader.assign(seen)
    while True:
        try:
            records = reader.poll(1_000, POLL_MS)
        except Retriable:
            continue  # passing trouble of Kafka
        for record in records:
            yield from _decoded(record)


def _decoded(record: LogRecord) -> Iterator[Logged]:
    try:
        decision = decode_decision(record.value)
    except CodecError as error:
        error_console.print(
            f"{record.topic}, offset {record.offset}: no decision: {error}", highlight=False, markup=False
        )
        return
    yield Logged(record.offset, record.timestamp_ms - decision.at_ms, decision)


def as_json(entry: Logged) -> dict[str, Any]:
    """Every field of the decision, and where it is on sie.decisions."""
    builtins: dict[str, Any] = msgspec.to_builtins(entry.decision)
    return {"offset": entry.offset, "published_after_ms": entry.published_after_ms, **builtins}


# ---------------------------------------------------------------- for people


def lines(entry: Logged) -> Iterator[str]:
    """A decision for people: a headline, then one line per thing that is known."""
    decision = entry.decision
    yield f"{decision.decision}  {shown_time(decision.at_ms)}  {decision.kind}  {decision.subject}"
    facts = ", ".join(f"{fact.kind} {fact.topic}/{fact.partition}@{fact.offset}" for fact in decision.facts)
    yield from _line("asked by", decision.asked_by)
    yield from _line("facts", facts or f"sie.cluster record {decision.cause_offset}")
    yield from _line("because", decision.reason)
    yield from _line("undoes", decision.undoes)
    yield from _line("chosen", ", ".join(f"{name} {value}" for name, value in decision.chosen.items()))
    for sentence in decision.rejected:
        yield from _line("rejected", sentence)
    for move in decision.moves:
        yield from _line("moved", _move(move))
    for change in decision.memory:
        yield from _line("memory", _memory(change))
    if decision.solver is not None:
        for sentence in _solver(decision.solver):
            yield from _line("solver", sentence)
    yield from _line("otherwise", decision.do_nothing)
    took = "" if decision.took_ms is None else f"{decision.took_ms} ms; "
    yield from _line("took", f"{took}published {entry.published_after_ms} ms after its cause")


def _line(name: str, text: str) -> Iterator[str]:
    if text:
        yield f"    {name:<10}{text}"


def _move(move: Move) -> str:
    return f"{move.what} of {move.model}: {move.source or 'nowhere'} -> {move.target or 'nowhere'}"


def _memory(change: MemoryChange) -> str:
    of = f" of {_mib(change.total_bytes)}" if change.total_bytes else ""
    return f"{change.worker}/{change.device}: {_mib(change.before_bytes)} -> {_mib(change.after_bytes)}{of} promised"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _solver(run: SolverRun) -> Iterator[str]:
    terms = ", ".join(f"{name} {value}" for name, value in run.terms.items())
    yield f"{run.solver}: {run.status}, cost {run.objective} ({terms}), no plan can cost less than {run.bound}"
    yield f"doing nothing costs {run.do_nothing}"


# ---------------------------------------------------------------- undo

ANSWERS = ("placement_restored", "undo_refused")


def undo(
    decision: Annotated[str, typer.Argument(help="Id of the decision, d-OFFSET-N.")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the scheduler.")] = 30.0,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Put the replicas that a decision moved back where they were before it, as a new decision; exit code 1 if refused.

    \b
    Examples:
      sie-stream decisions --model wine-rf
      sie-stream undo d-120-0
    """
    if place_of(decision) is None:
        raise ConfigError(f"{decision!r} is no id of a decision: allowed is d-OFFSET-N, e.g. d-120-0")
    connection = Connection.open(bootstrap_servers)
    command = UndoDecision(decision, getpass.getuser())
    answer = ask(connection, [command], [decision], _undone, timeout_s)[0]
    words = [f"{answer.decision}: {answer.kind}: {answer.reason}", *(f"    {_move(move)}" for move in answer.moves)]
    show_answer(answer, output, words, {"undo_refused"})
