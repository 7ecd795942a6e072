"""Writes commands to sie.cluster and waits for the decisions that answer them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
import typer

from schemas.codec import decode_decision, encode_cluster
from schemas.wire import CodecError
from sie_stream.cli.output import OutputFormat, console, show_json
from sie_stream.control import ClusterRecord
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.errors import SieError
from sie_stream.ids import TopicPartition
from sie_stream.records import LogWrite

POLL_MS = 50
Tick = Callable[[], None]
Subject = Callable[[Decision], str]
"""What a decision is the answer to; empty: to nothing that was asked."""


class NotReady(SieError):
    """The scheduler did not answer, or a model did not become ready, in time."""

    code = "not_ready"


def nothing() -> None:
    """Nothing to do between polls."""


def of_kind(kinds: Collection[str]) -> Subject:
    """Decisions of these kinds answer what was asked about their subject."""
    return lambda decision: decision.subject if decision.kind in kinds else ""


def ask(
    connection: Connection,
    commands: Sequence[ClusterRecord],
    subjects: Sequence[str],
    answers: Subject,
    timeout_s: float,
    tick: Tick = nothing,
) -> list[Decision]:
    """The answers to these commands, in the order they come: about each command's subject the first decision whose
    cause is the command itself or a later record. What somebody else asked just before is answered to him.

    Raises NotReady when one is missing after `timeout_s`.
    """
    topics = connection.settings.topics
    reader, writer = connection.reader(), connection.plain_writer()
    try:
        places = [TopicPartition(topics.decisions, number) for number in range(reader.partitions_of(topics.decisions))]
        reader.assign(reader.end_offsets(places))
        asked = writer.delivered([LogWrite(topics.cluster, encode_cluster(command)) for command in commands], 10_000)
        return _collect(reader, list(zip(subjects, asked, strict=True)), answers, timeout_s, tick)
    finally:
        reader.close()
        writer.close()


def show_answer(answer: Decision, output: OutputFormat, words: Iterable[str], refusals: Collection[str] = ()) -> None:
    """The scheduler's answer: as JSON, or these lines for people. Exit code 1 when it is one of `refusals`."""
    if output is OutputFormat.JSON:
        show_json(msgspec.to_builtins(answer))
    else:
        for line in words:
            console.print(line, highlight=False, markup=False)
    if answer.kind in refusals:
        raise typer.Exit(1)


def _collect(
    reader: KafkaReader, waiting: list[tuple[str, int]], answers: Subject, timeout_s: float, tick: Tick
) -> list[Decision]:
    """`waiting`: subject and offset of each command."""
    found: list[Decision] = []
    deadline = time.monotonic() + timeout_s
    while waiting:
        for record in reader.poll(1_000, POLL_MS):
            try:
                decision = decode_decision(record.value)
            except CodecError:
                continue  # not the answer; `sie-stream audit decisions` reports what cannot be read
            subject = answers(decision)
            command = next((one for one in waiting if one[0] == subject and one[1] <= decision.cause_offset), None)
            if command is not None:
                waiting.remove(command)
                found.append(decision)
        tick()
        if waiting and time.monotonic() > deadline:
            names = [subject for subject, _ in waiting]
            raise NotReady(
                f"the scheduler did not answer within {timeout_s:g} s about {', '.join(names[:5])}. "
                "Is it running? `sie-stream doctor` looks. What was asked for is written down: it is done once a "
                "scheduler runs, without asking again."
            )
    return found
