"""`sie-stream failures`: what broke, what followed from it in which order, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import typer

from schemas.codec import decode_result
from schemas.wire import CodecError
from sie_stream.auditing.failures import AnswerSearch, Failure, failures_of
from sie_stream.cli.decisions import known_names, logged
from sie_stream.cli.known import refuse_unknown
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, error_console, show_json, show_text
from sie_stream.cli.since import shown_time, since_ms
from sie_stream.decisions import Decision
from sie_stream.decisions import concerns as about_model
from sie_stream.edge.connection import Connection
from sie_stream.edge.spans import partitions_of, read_spans, window
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader

RESULTS_MAX = 200_000
"""So many results are looked through for first answers."""
REASON_CHARS = 160
FAILURES_SHOWN = 10
STEPS_SHOWN = 12
"""What people see of many, and of what followed from one; JSON has all."""


def failures(
    since: Annotated[str, typer.Option("--since", help="90s, 10m, 2h, 7d ago, or an ISO time.")] = "1h",
    subject: Annotated[
        str, typer.Option("--of", help="Only what concerns this worker, device (WORKER/DEVICE), model or scheduler.")
    ] = "",
    show_all: Annotated[bool, typer.Option("--all", help="Every failure, and every step after it.")] = False,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """What failed (workers, devices, engines, replicas, schedulers), what followed from it, and how long it took.

    Times are milliseconds after the failure was noticed. A first answer is the first result of partitions that went to
    another worker, by that worker.

    \b
    Examples:
      sie-stream failures
      sie-stream failures --since 10m --of worker-0
      sie-stream failures --since 2h -o json
    """
    at_ms = since_ms(since, round(time.time() * 1_000))
    connection = Connection.open(bootstrap_servers)
    topics = connection.settings.topics
    reader = connection.reader()
    try:
        known = [entry.decision for entry in logged(reader, topics.decisions, at_ms, follow=False)]
        found = failures_of([decision for decision in known if decision.at_ms >= at_ms])
        wanted = with_answers(reader, topics, [one for one in found if not subject or concerns(one, subject)])
        if subject and not wanted:
            refuse_unknown("--of", subject, known_names(reader, topics))
    finally:
        reader.close()
    if output is OutputFormat.JSON:
        show_json([as_json(one) for one in wanted])
        return
    for text in shown(wanted, show_all):
        show_text(text)
    if not wanted:
        error_console.print("no failures")


def concerns(failure: Failure, subject: str) -> bool:
    """Whether it began with the subject, or something of a model that is named so moved."""
    root = failure.root
    return subject == root.subject.partition("/")[0] or about_model(root, subject)


def with_answers(reader: LogReader, topics: TopicNames, found: list[Failure]) -> list[Failure]:
    """First answers added, as far as the first RESULTS_MAX results after the oldest failure tell."""
    search = AnswerSearch(found)
    if search.since_ms is None:
        return found
    spans = window(reader, partitions_of(reader, topics.results), search.since_ms, round(time.time() * 1_000) + 60_000)
    results = read_spans(reader, spans)
    for number, record in enumerate(results):
        if number == RESULTS_MAX:
            error_console.print(f"more than {RESULTS_MAX} results since: give a later --since for all first answers")
            break
        try:
            search.saw(decode_result(record.value), f"{record.topic}/{record.partition}@{record.offset}")
        except CodecError:
            continue  # `sie-stream audit verify` reports what cannot be read
    results.close()
    return [search.added_to(one) for one in found]


def as_json(failure: Failure) -> dict[str, Any]:
    return {
        "failure": failure.root.decision,
        "kind": failure.root.kind,
        "subject": failure.root.subject,
        "at_ms": failure.root.at_ms,
        "fenced_after_ms": failure.after_ms("worker_fenced"),
        "reassigned_after_ms": failure.after_ms("partitions_assigned"),
        "first_answer_after_ms": failure.first_answer_ms,
        "back_after_ms": back_ms(failure),
        "root": msgspec.to_builtins(failure.root),
        "chain": [msgspec.to_builtins(decision) for decision in failure.chain],
        "answers": [
            {
                "model": answer.taken.model,
                "worker": answer.taken.worker,
                "decision": answer.taken.decision,
                "request_id": answer.request_id,
                "after_ms": answer.finished_at_ms - failure.root.at_ms,
                "record": answer.record,
            }
            for answer in failure.answers
        ],
    }


def back_ms(failure: Failure) -> int | None:
    """Until the engine or device that was lost was back; None: it is not, or it is another kind of failure."""
    kinds = ("engine_back", "device_back")
    return next((after for after in map(failure.after_ms, kinds) if after is not None), None)


def shown(found: Sequence[Failure], show_all: bool) -> Iterator[str]:
    """Text of the newest failures, each with the first steps after it; then how many were left out."""
    first = 0 if show_all else max(0, len(found) - FAILURES_SHOWN)
    left_out = first
    for one in found[first:]:
        said = [*lines(one)]
        more = 0 if show_all else max(0, len(said) - 2 - STEPS_SHOWN)
        left_out += more
        yield "\n".join(said[: len(said) - more] + ([f"    {'':>10}  ... and {more} more steps"] if more else []))
    if left_out:
        earlier = f"{first} earlier failures are not shown. " if first else ""
        yield f"{earlier}`sie-stream failures --all` shows everything, `-o json` has every field."


def lines(failure: Failure) -> Iterator[str]:
    """A headline, then what followed: a line for each decision and each first answer, oldest first."""
    root = failure.root
    yield f"{shown_time(root.at_ms)}  {root.kind}  {root.subject}  ({root.decision})"
    yield f"    {'':>10}  {shortened(root.reason)}"
    steps = [(decision.at_ms, _step(decision)) for decision in failure.chain]
    for answer in failure.answers:
        taken = answer.taken
        said = f"first answer of {taken.model} there, by {taken.worker}: {answer.request_id} ({answer.record})"
        steps.append((answer.finished_at_ms, said))
    for at_ms, said in sorted(steps, key=lambda step: step[0]):
        yield f"    {f'+{max(0, at_ms - root.at_ms)} ms':>10}  {said}"


def _step(decision: Decision) -> str:
    moves = [f"{move.what} {move.source or 'nowhere'} -> {move.target or 'nowhere'}" for move in decision.moves[:2]]
    more = f" and {len(decision.moves) - 2} more" if len(decision.moves) > 2 else ""
    moved = f" [{'; '.join(moves)}{more}]" if moves else ""
    return f"{decision.kind} {decision.subject}: {shortened(decision.reason)}{moved} ({decision.decision})"


def shortened(text: str) -> str:
    return text if len(text) <= REASON_CHARS else f"{text[:REASON_CHARS]}..."
