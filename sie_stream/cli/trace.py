"""`sie-stream trace`: one request from beginning to end, or what the slowest of a model share."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from schemas.codec import decode_result
from sie_stream import __version__
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    as_text,
    console,
    error_console,
    show_json,
)
from sie_stream.cli.since import shown_time, since_ms
from sie_stream.cli.trace_lookup import Place, Routes, Times, by_index, by_time, index_path, own_place
from sie_stream.cli.trace_reading import Collector, decoded
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.request_index import RequestIndex
from sie_stream.edge.spans import Span, partitions_of, read_spans, window
from sie_stream.errors import ConfigError, SieError, did_you_mean
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord
from sie_stream.touches import touches_in
from sie_stream.tracing.evidence import Trace
from sie_stream.tracing.otlp import spans_json
from sie_stream.tracing.slow import Slow, SlowReport, SlowStudy
from sie_stream.tracing.story import tell

AROUND_MS = 60_000
SLOW_SINCE = "10m"
NEIGHBOURS_SHOWN = 5
EXPORT_TIMEOUT_S = 10.0
FETCH_WAIT_MS = 5
"""Many short stretches are read one after another; each look-up of offsets waits for the fetch that is under way."""


class ExportFailed(SieError):
    """The collector did not take the spans."""

    code = "export_failed"


def trace(
    request_id: Annotated[str | None, typer.Argument(help="The request, by its id.")] = None,
    around: Annotated[
        str, typer.Option("--around", help="Look only within a minute of then: 10m ago, or an ISO time.")
    ] = "",
    since: Annotated[str, typer.Option("--since", help="Look only from then on: 10m ago, or an ISO time.")] = "",
    key: Annotated[
        str, typer.Option("--key", help="Record key (session, or request id): reads one partition; with a time.")
    ] = "",
    slow: Annotated[
        bool, typer.Option("--slow", help="The slowest 1 % of --model instead, and what they share.")
    ] = False,
    model: Annotated[str, typer.Option("--model", "-m", help="Model of --slow.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", help="Slow requests to list.", min=1)] = 10,
    otel: Annotated[
        str, typer.Option("--otel", help="Also export OpenTelemetry spans: a file for OTLP JSON, or a collector's URL.")
    ] = "",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Follow one request over all topics: ingress, placement, batch, moves, worker, result, deadline, attempts.

    The first call reads the request ids into an index beside the engine's state; later ones only read what is new.
    With --around or --since nothing is indexed. Exit code 1 when no topic knows the request. Workers tell
    beside its result which models came to a device for it and who gave way, that it moved while it ran, and retries.

    \b
    Examples:
      sie-stream trace 6f1c0a...
      sie-stream trace 6f1c0a... --around 2026-03-01T12:00:00+01:00 -o json
      sie-stream trace 6f1c0a... --otel http://localhost:4318
      sie-stream trace --slow --model wine-rf --since 10m
    """
    now_ms = round(time.time() * 1_000)
    times = _times(around, since, now_ms)
    _refuse_unclear(request_id, slow, model)
    if (key and times is None) or (slow and (key or otel)):
        raise ConfigError("--key needs --around or --since, and neither --key nor --otel goes with --slow")
    connection = Connection.open(bootstrap_servers)
    reader = connection.reader(fetch_wait_ms=FETCH_WAIT_MS)
    try:
        if slow:
            times = times or Times(since_ms(SLOW_SINCE, now_ms), now_ms)
            _show_slow(_slow(connection, reader, model, times), limit, output)
            return
        assert request_id is not None
        found = _trace(connection, reader, request_id, times, key, now_ms)
    finally:
        reader.close()
    if otel and found.steps:
        export_spans(spans_json(found, __version__), otel)
    if output is OutputFormat.JSON:
        show_json(msgspec.to_builtins(found))
    else:
        _show(found)
    if found.state == "unknown":
        elsewhere = "leave --around and --since out to look everywhere" if times else "see `sie-stream doctor`"
        error_console.print(f"no request {request_id!r} was found; {elsewhere}", highlight=False, markup=False)
        raise typer.Exit(1)


def _refuse_unclear(request_id: str | None, slow: bool, model: str) -> None:
    """Raises ConfigError unless exactly one request, or the slow ones of a model, are asked for."""
    if request_id is not None and not request_id.strip():
        raise ConfigError("request id '': it is empty; is a variable of your shell not set?")
    if slow == (request_id is not None) or slow != bool(model):
        raise ConfigError("name one request, or give --slow and --model together")


def _times(around: str, since: str, now_ms: int) -> Times | None:
    if around and since:
        raise ConfigError("give --around or --since, not both")
    if around:
        at_ms = since_ms(around, now_ms, "--around")
        return Times(at_ms - AROUND_MS, at_ms + AROUND_MS)
    return Times(since_ms(since, now_ms), now_ms + AROUND_MS) if since else None


def _trace(
    connection: Connection, reader: KafkaReader, request_id: str, times: Times | None, key: str, now_ms: int
) -> Trace:
    names = connection.settings.topics
    routes = Routes(reader, names)
    collector = Collector(connection, reader, routes, now_ms)
    if times is not None:
        topics = (names.results, *routes.request_topics)
        places = by_time(reader, topics, times, request_id, key, names)
    else:
        with RequestIndex(index_path(connection, reader.cluster_id())) as index:
            places = by_index(index, reader, routes, names.results, request_id)
    own: Place | None = own_place(request_id)
    if own is not None and own[0].topic in routes.request_topics:
        places = [*places, own]
    return tell(collector.collect(request_id, places))


# ---------------------------------------------------------------- one request


def _show(found: Trace) -> None:
    """One screen: a verdict, the steps, the batch, what is to be noted."""
    console.print(f"{found.request_id}  {found.verdict}", highlight=False, markup=False, style="bold")
    if not found.steps:
        return
    console.print("\n".join(_facts(found)), highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("+MS", "right"), ("STAGE", "left"), ("TOOK MS", "right"), ("WHAT", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]  # literals
    begun = _begun(found)
    for step in found.steps:
        took = "" if step.lasted_ms is None else f"{step.lasted_ms:.1f}"
        what = f"{step.what}  [{step.where}]" if step.where else step.what
        table.add_row(f"{step.at_ms - begun:+d}", step.stage, took, Text(what))
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _begun(found: Trace) -> int:
    return next((step.at_ms for step in found.steps if step.stage not in ("placement", "control")), 0)


def _facts(found: Trace) -> Iterator[str]:
    model = f"{found.model}@{found.version}" if found.version else found.model
    yield f"    sent      {shown_time(_begun(found))}  model {model or '-'}"
    if found.worker:
        incarnation = f" ({found.incarnation})" if found.incarnation else ""
        device = f"/{found.device}" if found.device else ""
        again = f", begun at most {found.attempts} times" if found.attempts > 1 else ""
        yield f"    worker    {found.worker}{device}{incarnation}{again}"
    if found.durations_ms:
        parts = ", ".join(f"{name.replace('_', ' ')} {took:.1f}" for name, took in found.durations_ms.items())
        yield f"    ms        {parts}"
    if found.deadline_left_ms is not None:
        yield f"    deadline  {found.deadline_left_ms} ms left"
    if found.traceparent:
        yield f"    trace     {found.traceparent}"
    if found.batch_size > 1:
        shown = [f"{one.request_id} ({one.status})" for one in found.neighbours[:NEIGHBOURS_SHOWN]]
        more = len(found.neighbours) - len(shown)
        yield f"    batch     {found.batch_size} together: {', '.join(shown)}{f' and {more} more' if more else ''}"


def export_spans(spans: dict[str, Any], target: str) -> None:
    body = json.dumps(spans).encode()
    if not target.startswith(("http://", "https://")):
        try:
            with Path(target).open("ab") as file:
                file.write(body + b"\n")
        except OSError as error:
            raise ConfigError(f"--otel {target}: cannot be written: {error.strerror}") from error
        return
    url = target if target.endswith("/v1/traces") else f"{target.rstrip('/')}/v1/traces"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=EXPORT_TIMEOUT_S):
            return
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise ExportFailed(f"--otel {url}: the collector did not take the spans: {error}") from error


# ---------------------------------------------------------------- the slow ones


def _slow(connection: Connection, reader: KafkaReader, model: str, times: Times) -> SlowReport:
    names = connection.settings.topics
    routes = Routes(reader, names)
    study = SlowStudy(model)
    spans = window(reader, partitions_of(reader, names.results), times.from_ms, times.to_ms)
    for record, result in decoded(_told(reader, spans), decode_result):
        study.add(result, touches_in(record.headers))
    if not study.requests and model not in routes.by_model:
        raise ConfigError(f"--model {model!r}: not known here.{did_you_mean(model, routes.by_model)}")
    collector = Collector(connection, reader, routes, times.to_ms)
    return study.report(collector.decisions_about(model, times.from_ms, times.to_ms))


def _told(reader: KafkaReader, spans: dict[TopicPartition, Span]) -> Iterator[LogRecord]:
    """Reads with a spinner where it takes long: the number of results of other models is not known before."""
    total = sum(span.end - span.start for span in spans.values())
    with error_console.status(f"reading {total} results"):
        yield from read_spans(reader, spans)


def _show_slow(report: SlowReport, limit: int, output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        show_json(msgspec.to_builtins(msgspec.structs.replace(report, slow=report.slow[:limit])))
        return
    if report.p99_ms is None or report.p50_ms is None:
        console.print(f"{report.model}: no requests in that time", highlight=False)
        return
    console.print(
        f"{report.model}: {report.requests} requests, p50 {report.p50_ms:.1f} ms, p99 {report.p99_ms:.1f} ms; "
        f"{len(report.slow)} at or above p99",
        highlight=False,
        markup=False,
    )
    for trait in report.shared:
        against = "" if trait.share_of_all is None else f", of all requests {trait.share_of_all:.0%}"
        console.print(f"    {trait.share:4.0%} {trait.trait}{against}", highlight=False, markup=False)
    if not report.shared:
        console.print("    they share nothing that the others have not as well", highlight=False)
    _slow_table(report.slow[:limit])
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _slow_table(slow: tuple[Slow, ...]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("TOTAL MS", "REQUEST", "FINISHED", "BATCH"):
        table.add_column(name, overflow="fold")
    for entry in slow:
        cells = (f"{entry.total_ms:.1f}", entry.request_id, shown_time(entry.finished_ms), entry.batch or "-")
        table.add_row(*as_text(cells))
    console.print(table)
