"""`sie-stream audit verify`: one terminal record for each request, and records that tell the truth. Reads only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from msgspec import Struct
from rich.progress import Progress

from schemas.codec import decode_decision, decode_raw_output, decode_result
from schemas.wire import CodecError
from sie_stream.auditing.deeds import Deeds, deeds_of
from sie_stream.auditing.requests import Commits, RequestAudit, RequestVerifier, Stream, Stretch
from sie_stream.cli.declared_outputs import declared_outputs
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, show_json, show_text
from sie_stream.cli.progress import progress_bars
from sie_stream.cli.since import since_ms
from sie_stream.cli.trace_lookup import Routes, fetch, work_id
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.key_table import key_table_of
from sie_stream.edge.spans import Span, partitions_of, read_spans
from sie_stream.edge.tables import read_to_end
from sie_stream.ids import TopicPartition, derived_request_id
from sie_stream.privacy.declared import Shreds
from sie_stream.records import CommittedOffset, LogRecord

CLOCKS_MS = 60_000
"""A result is looked for from this long before its request on: their times come from two clocks."""
SETTLE_S = 1.0
NAMED_MAX = 20


class Range(Struct, frozen=True):
    """Requests from `from_ms` to below `to_ms`; 0: from the oldest, to the newest."""

    from_ms: int = 0
    to_ms: int = 0


class Cut(Struct, frozen=True):
    """Where each topic is read from and to, looked up in an order in which what is called done has its result."""

    streams: dict[Stream, Stretch]
    commits: Commits
    results: dict[TopicPartition, Span]
    outputs: dict[TopicPartition, Span]
    works: dict[TopicPartition, Stretch]
    results_from_ms: int
    notes: tuple[str, ...]


def verify(
    from_: Annotated[str, typer.Option("--from", help="Requests from then on: 2h, 7d ago, or an ISO time.")] = "",
    to: Annotated[str, typer.Option("--to", help="Requests before then. Default: now.")] = "",
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Prove that each request of a range has exactly one terminal record, and that its provenance holds.

    Work records exist and are that request's, placements resolve to decisions, and no worker answered after it was
    fenced. Requests under way are counted as open, not as lost. Exit code 1 when something is violated.

    \b
    Examples:
      sie-stream audit verify
      sie-stream audit verify --from 24h -o json
      sie-stream audit verify --from 2026-03-01T00:00:00+01:00 --to 2026-03-02T00:00:00+01:00
    """
    now_ms = round(time.time() * 1_000)
    asked = Range(since_ms(from_, now_ms, "--from") if from_ else 0, since_ms(to, now_ms, "--to") if to else 0)
    connection = Connection.open(bootstrap_servers)
    reader = connection.reader()
    try:
        routes = Routes(reader, connection.settings.topics)
        report = verified(connection, reader, routes, cut_of(connection, reader, routes, asked))
    finally:
        reader.close()
    if output is OutputFormat.JSON:
        show_json({"proven": report.proven, **msgspec.to_builtins(report)})
    else:
        show_text("\n".join(in_words(report)))
    if not report.proven:
        raise typer.Exit(1)


def verified(connection: Connection, reader: KafkaReader, routes: Routes, cut: Cut) -> RequestAudit:
    """Reads the request, work, output and result topics of the range, and all of sie.decisions."""
    names = connection.settings.topics
    verifier = RequestVerifier(cut.streams, cut.works, _deeds(reader, names.decisions))
    shreds = Shreds(key_table_of(connection), declared_outputs(reader, names, connection.reader))
    with progress_bars() as progress:
        _read_requests(reader, routes, cut, verifier, progress)
        for record in tracked(reader, spans_of(cut.works), progress, "work items"):
            verifier.work(place_of_record(record), record.offset, work_id(record))
        for record in tracked(reader, cut.outputs, progress, "raw outputs"):
            try:
                verifier.raw_output(decode_raw_output(record.value).result.request_id)
            except CodecError:
                continue  # its dead letter is egress's affair; no request is known behind it
        _read_results(reader, cut.results, verifier, shreds, progress)
        _settle(reader, cut, verifier, shreds, connection.settings.transaction_timeout_ms / 1_000, progress)
    report = verifier.close(cut.commits, cut.results_from_ms, cut.notes)
    return _named(reader, routes, report)


# ---------------------------------------------------------------- where to read


def cut_of(connection: Connection, reader: KafkaReader, routes: Routes, asked: Range) -> Cut:
    names = connection.settings.topics
    notes: list[str] = []
    places = [place for topic in routes.request_topics for place in partitions_of(reader, topic)]
    stretches = _stretches(reader, places, asked, connection.settings.dedupe_window_ms, notes)
    groups = routes.groups()
    streams = {
        Stream(place, instance): stretches[place] for place in places for instance in routes.instances_of(place.topic)
    }
    ingress: dict[Stream, int] = {}
    for group in sorted(set(groups.values())):
        mine = [stream for stream in streams if groups[stream.place.topic, stream.instance] == group]
        committed = _committed(connection, group, [stream.place for stream in mine])
        ingress |= {stream: committed[stream.place].offset for stream in mine if stream.place in committed}
    work_topics = [topic for topic in reader.topics() if topic.startswith(names.work(""))]
    work_places = [place for topic in work_topics for place in partitions_of(reader, topic)]
    workers = _committed(connection, names.worker_group, work_places)
    output_places = partitions_of(reader, names.outputs)
    egress = _committed(connection, names.egress_group, output_places)
    result_places = partitions_of(reader, names.results)
    begun_ms = max(0, asked.from_ms - CLOCKS_MS)
    results = _from(reader, result_places, begun_ms)
    return Cut(
        streams=streams,
        commits=Commits(ingress, workers),
        results=results,
        outputs={
            place: Span(egress[place].offset if place in egress else 0, end)
            for place, end in reader.end_offsets(output_places).items()
        },
        works={
            place: Stretch(span.start, span.start, span.end)
            for place, span in _from(reader, work_places, begun_ms).items()
        },
        results_from_ms=_complete_from_ms(reader, result_places, notes),
        notes=tuple(notes),
    )


def _stretches(
    reader: KafkaReader, places: list[TopicPartition], asked: Range, window_ms: int, notes: list[str]
) -> dict[TopicPartition, Stretch]:
    begins, ends = reader.beginning_offsets(places), reader.end_offsets(places)
    audited = reader.offsets_at(places, asked.from_ms) if asked.from_ms else begins
    lead = reader.offsets_at(places, asked.from_ms - window_ms) if asked.from_ms else begins
    until = reader.offsets_at(places, asked.to_ms) if asked.to_ms else ends
    for place, begin in begins.items():
        if begin and audited[place] <= begin:
            notes.append(
                f"Requests 0 to {begin - 1} of {place.topic}/{place.partition} are gone: retention removed them."
            )
    return {
        place: Stretch(lead[place], audited[place], max(audited[place], min(until[place], ends[place])))
        for place in places
    }


def _from(reader: KafkaReader, places: list[TopicPartition], from_ms: int) -> dict[TopicPartition, Span]:
    starts = reader.offsets_at(places, from_ms) if from_ms else reader.beginning_offsets(places)
    ends = reader.end_offsets(places)
    return {place: Span(starts[place], ends[place]) for place in places}


def _complete_from_ms(reader: KafkaReader, places: list[TopicPartition], notes: list[str]) -> int:
    """Time of the oldest record of every partition of the results that retention has cut; the newest of these."""
    begins, ends = reader.beginning_offsets(places), reader.end_offsets(places)
    cut = {place: Span(begin, min(begin + 1_000, ends[place])) for place, begin in begins.items() if begin > 0}
    oldest: dict[TopicPartition, int] = {}
    for record in read_spans(reader, cut):
        oldest.setdefault(place_of_record(record), record.timestamp_ms)
    notes += [
        f"Results 0 to {span.start - 1} of {place.topic}/{place.partition} are gone." for place, span in cut.items()
    ]
    return max(oldest.values(), default=0)


def _committed(
    connection: Connection, group: str, places: list[TopicPartition]
) -> dict[TopicPartition, CommittedOffset]:
    reader = connection.reader(group)
    try:
        return {place: found for place, found in reader.committed(places).items() if found is not None}
    finally:
        reader.close()


def _deeds(reader: KafkaReader, topic: str) -> Deeds:
    def readable() -> Iterator[Decision]:
        for record in read_to_end(reader, topic, timeout_s=600.0):
            try:
                yield decode_decision(record.value)
            except CodecError:
                continue  # `audit decisions` tells about it

    return deeds_of(readable())


# ---------------------------------------------------------------- reading


def _read_requests(
    reader: KafkaReader, routes: Routes, cut: Cut, verifier: RequestVerifier, progress: Progress
) -> None:
    spans = {stream.place: Span(stretch.start, stretch.end) for stream, stretch in cut.streams.items()}
    instances = {topic: routes.instances_of(topic) for topic in routes.request_topics}
    for record in tracked(reader, spans, progress, "requests"):
        given = routes.source_id(record)
        made = derived_request_id(record.topic, record.partition, record.offset)
        for instance in instances[record.topic]:
            own = made if not instance else f"{made}:{instance}"
            verifier.request(
                Stream(place_of_record(record), instance), record.offset, record.timestamp_ms, given or own
            )


def _read_results(
    reader: KafkaReader,
    spans: dict[TopicPartition, Span],
    verifier: RequestVerifier,
    shreds: Shreds,
    progress: Progress,
) -> None:
    for record in tracked(reader, spans, progress, "results"):
        where = f"{record.topic}/{record.partition}@{record.offset}"
        try:
            result = decode_result(record.value)
        except CodecError as error:
            verifier.unreadable(where, str(error))
        else:
            verifier.result(where, record.timestamp_ms, result)
            verifier.report.shredded += shreds.reach(result)


def _settle(
    reader: KafkaReader, cut: Cut, verifier: RequestVerifier, shreds: Shreds, patience_s: float, progress: Progress
) -> None:
    """An open transaction hides committed results behind it; it ends within the transaction timeout."""
    deadline = time.monotonic() + patience_s + SETTLE_S
    reached = {place: span.end for place, span in cut.results.items()}
    while verifier.lost(cut.commits, cut.results_from_ms) and time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        ends = reader.end_offsets(list(reached))
        more = {place: Span(start, ends[place]) for place, start in reached.items()}
        _read_results(reader, more, verifier, shreds, progress)
        reached = ends


def tracked(
    reader: KafkaReader, spans: dict[TopicPartition, Span], progress: Progress, what: str
) -> Iterator[LogRecord]:
    task = progress.add_task(what, total=sum(max(0, span.end - span.start) for span in spans.values()))
    seen = 0
    for record in read_spans(reader, spans):
        seen += 1
        if seen % 5_000 == 0:
            progress.update(task, completed=seen)
        yield record
    progress.update(task, completed=seen)


def spans_of(stretches: dict[TopicPartition, Stretch]) -> dict[TopicPartition, Span]:
    return {place: Span(stretch.start, stretch.end) for place, stretch in stretches.items()}


def place_of_record(record: LogRecord) -> TopicPartition:
    return TopicPartition(record.topic, record.partition)


def _named(reader: KafkaReader, routes: Routes, report: RequestAudit) -> RequestAudit:
    """Requests without a result are known by their place; look their ids up, for whoever will trace them."""
    silent = {}
    for number, one in enumerate(report.first):
        if one.kind == "no_result" and len(silent) < NAMED_MAX:
            topic, _, rest = one.where.rpartition("/")
            partition, _, offset = rest.partition("@")
            silent[TopicPartition(topic, int(partition)), int(offset)] = number
    for place, record in fetch(reader, silent).items():
        request_id = routes.source_id(record) or derived_request_id(record.topic, record.partition, record.offset)
        number = silent[place]
        report.first[number] = msgspec.structs.replace(report.first[number], request_id=request_id)
    return report


# ---------------------------------------------------------------- words


def in_words(report: RequestAudit) -> Iterator[str]:
    """The report for people."""
    if not report.proven:
        yield "VIOLATIONS FOUND"
    else:
        yield (
            "every request has one terminal record"
            if report.requests
            else "no requests in this range: nothing is proven"
        )
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(report.by_status.items()))
    yield f"    requests   {report.requests}: {report.answered} answered{f' ({statuses})' if statuses else ''}"
    where = ", ".join(f"{count} at {at}" for at, count in sorted(report.open_at.items()))
    yield f"               {report.open_} open{f' ({where})' if where else ''}, {report.repeats} repeats dropped"
    if report.unprovable:
        yield f"               {report.unprovable} of a time whose results are partly gone: nothing can be proven"
    yield f"    results    {report.results} read, {report.outside} of them of other requests"
    if report.shredded:
        yield f"    shredded   {report.shredded} of them hold values of shredded subjects: nobody can read these"
    unchecked = (report.unchecked_work, report.unchecked_placements)
    if any(unchecked):
        yield "    unchecked  {} work records and {} placements that are gone or outside the range".format(*unchecked)
    hidden = ", ".join(f"{topic} {count}" for topic, count in sorted(report.invisible.items()) if count)
    yield f"    invisible  {hidden or 'none'} (markers and aborted transactions hold offsets, never records)"
    for kind, count in sorted(report.by_kind.items()):
        yield f"    violated   {kind}: {count}"
    for one in report.first[:10]:
        yield f"      {one.kind} at {one.where}: {one.what}{f' (request {one.request_id})' if one.request_id else ''}"
    for note in report.notes:
        yield f"    note       {note}"
