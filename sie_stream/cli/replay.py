"""`sie-stream replay`: answer requests of the log again, as it was or on another version, and compare."""

from __future__ import annotations

import gc
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpu_worker.edge.engine_link import EngineLinks
from sie_stream.cli.declared_outputs import declared_in
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, console, show_json
from sie_stream.cli.replaying.choosing import Choice, Question, choose
from sie_stream.cli.replaying.declared import declarations
from sie_stream.cli.replaying.engines import Engines
from sie_stream.cli.replaying.files import partial_name
from sie_stream.cli.replaying.outputs import OutputTopic, checked_topic
from sie_stream.cli.replaying.page import report_page
from sie_stream.cli.replaying.phases import Phases
from sie_stream.cli.replaying.protected import Protection
from sie_stream.cli.replaying.reading import Readers
from sie_stream.cli.replaying.requested import refuse_topic_without_requests
from sie_stream.cli.replaying.run import Job, Replay
from sie_stream.cli.replaying.scratch import Scratch
from sie_stream.cli.replaying.show import show_report
from sie_stream.cli.since import duration_ms
from sie_stream.edge.connection import Connection
from sie_stream.edge.key_topic import open_keys
from sie_stream.edge.stop import StopFlag
from sie_stream.errors import ConfigError
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.records import WorkItem
from sie_stream.replay.compare import Again, Original, Verdict
from sie_stream.replay.pace import parse_speed
from sie_stream.replay.report import Place, Report, Tally, what_is_exact
from sie_stream.replay.versions import VersionBook, model_and_version

EXIT_INTERRUPTED = 130
GC_THRESHOLDS = (20_000, 20, 20)
"""As in a worker: records form no cycles, and looking for them every 700 allocations costs a tenth of the time."""

LateOption = Annotated[
    str,
    typer.Option(help="How long after the range its results are looked for. Default: 10m; on a topic of requests all."),
]


def replay(
    topic: Annotated[
        str, typer.Option(help="sie.work.MODEL, sie.results, a topic of requests. Default: what --model worked on.")
    ] = "",
    first: Annotated[
        str, typer.Option("--from", help="Offset (of each partition), 10m or 2h ago, or an ISO time.")
    ] = "",
    until: Annotated[str, typer.Option("--to", help="The same, not included. Default: the end as it is now.")] = "",
    partition: Annotated[list[int] | None, typer.Option(help="Only this partition of the topic; repeatable.")] = None,
    request_id: Annotated[list[str] | None, typer.Option("--request-id", help="Only this one; repeatable.")] = None,
    decision: Annotated[str, typer.Option(help="What this decision (d-OFFSET-N) is behind.")] = "",
    model: Annotated[
        str, typer.Option("--model", "-m", help="NAME: as it was. NAME@VERSION: what if that version answered.")
    ] = "",
    tolerance: Annotated[
        float, typer.Option(help="Largest accepted distance of a number, relative above 1. 0: exact.", min=0)
    ] = 0.0,
    speed: Annotated[str, typer.Option(help="500 records/s at most, or 1x, 0.5x the original pace.")] = "",
    late: LateOption = "",
    to_topic: Annotated[str, typer.Option(help="A topic of your own that the new results are written to.")] = "",
    html: Annotated[Path | None, typer.Option(help="Write the report with plots to this file.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write every compared record to this file.")] = None,
    harmful: Annotated[bool, typer.Option("--harmful", help="Also inputs that no engine survived.")] = False,
    niceness: Annotated[int, typer.Option("--nice", help="How far engines step back for others.", min=0, max=19)] = 10,
    fail: Annotated[
        bool, typer.Option("--fail/--no-fail", help="Exit 1 when something differs, or nothing is compared.")
    ] = True,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Answer requests of the log again and compare with what was answered then.

    Reads only: it joins no group, commits nothing, and runs engines of its own at a lower priority.
    --model alone covers its variants too, unless --from or --to is an offset: that is one of its own work topic.
    Ctrl-C stops it with a report of what was done so far, marked partial; files are then NAME.partial.html and so on.

    \b
    Examples:
      sie-stream replay --model wine-rf --from 1h
      sie-stream replay --model wine-rf@2.0.0 --from 24h --html what-if.html
      sie-stream replay --topic sie.work.wine-rf --from 0 --to 5000 --tolerance 1e-9
      sie-stream replay --request-id 6f1c... -o json
      sie-stream replay --decision d-120-0 --speed 500
    """
    name, version = model_and_version(model)
    _check_folders(html=html, parquet=parquet)
    late_ms, ids = duration_ms(late, "--late") if late else None, tuple(request_id or ())
    question = Question(topic, first, until, tuple(partition or ()), ids, decision, name, late_ms)
    asked = Asked(question, version, tolerance, speed, to_topic, parquet, harmful)
    connection = Connection.open(bootstrap_servers)
    stop = StopFlag.on_signals()
    os.nice(niceness)
    gc.set_threshold(*GC_THRESHOLDS)
    report = replayed(connection, asked, stop)
    _hand_over(report, output, html, parquet)
    if report.partial:
        raise typer.Exit(EXIT_INTERRUPTED)
    if fail and not report.same:
        raise typer.Exit(1)


def _hand_over(report: Report, output: OutputFormat, html: Path | None, parquet: Path | None) -> None:
    if output is OutputFormat.JSON:
        show_json(msgspec.to_builtins(report))
    else:
        show_report(report)
    files = [path if path is None or not report.partial else partial_name(path) for path in (html, parquet)]
    if files[0] is not None:
        files[0].write_text(report_page(report))
    if html is not None and not report.partial:
        partial_name(html).unlink(missing_ok=True)  # of a replay before this one; that of --parquet has become it
    if output is OutputFormat.JSON:
        return
    for path in files:
        if path is not None:
            console.print(f"written: {path}", highlight=False)


def _check_folders(**files: Path | None) -> None:
    """Before an hour of work, not after it. Raises ConfigError."""
    for option, path in files.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"--{option} {path}: there is no folder {path.absolute().parent}; make it first")


class Asked(msgspec.Struct, frozen=True):
    question: Question
    version: str
    """Empty: as it was."""
    tolerance: float = 0.0
    speed: str = ""
    to_topic: str = ""
    parquet: Path | None = None
    harmful: bool = False


def replayed(connection: Connection, asked: Asked, stop: StopFlag) -> Report:
    """Raises ConfigError for what cannot be replayed at all."""
    settings, tally = connection.settings, Tally()
    with ExitStack() as stack:
        readers = Readers(connection)
        stack.callback(readers.close)
        phases = Phases()
        with phases.begin("declarations"):
            book = VersionBook(declarations(readers.records, settings.topics))
        question = asked.question
        pinned = book.pinned(question.model, asked.version) if asked.version else None
        if question.model and pinned is None:
            book.pinned(question.model, "")
        job = Job(pinned, asked.tolerance, parse_speed(asked.speed), asked.harmful)
        scratch = Scratch()
        stack.callback(scratch.close)
        topic = None
        if asked.to_topic:
            topic = OutputTopic(connection, checked_topic(readers.records, settings, asked.to_topic), tally)
            stack.callback(topic.close)
        file = None
        if asked.parquet is not None:
            # Half a second of CPU that a replay without a file does not need.
            from sie_stream.cli.replaying.parquet import ParquetFile

            file = ParquetFile(asked.parquet)
            stack.callback(file.close)

        def tell_each(original: Original, again: Again, place: Place, found: Verdict, work: WorkItem) -> None:
            if file is not None:
                file.add(original, again, place, found)
            if topic is not None:
                topic.add(original, again, place, work)

        tell = None if file is None and topic is None else tell_each
        protection = Protection(lambda: open_keys(connection), DeclaredOutputs(declared_in(book)))
        run = Replay(readers, settings, book, job, scratch, tally, tell, stop, protection)
        links = EngineLinks(settings.engine_threads)
        engines = Engines(links, settings.record_bytes_max, run.answered, stop, phases.engine_starts)
        stack.callback(engines.close)
        with phases.begin("looking for the range"):
            if not (question.request_ids or question.decision):
                read_from = book.input_topics()
                refuse_topic_without_requests(
                    readers, settings.topics, question.topic, read_from, question.partitions, stop
                )
            choice = choose(readers, settings.topics, question, stop)
        report = _through(run, choice, engines, tally, stop, asked, phases)
        if file is not None:
            file.ends(report.title, partial=report.partial)
        return report


def _through(
    run: Replay, choice: Choice, engines: Engines, tally: Tally, stop: StopFlag, asked: Asked, phases: Phases
) -> Report:
    """Both passes, with a bar for each."""
    started_s = time.monotonic()
    with phases.begin("results") as phase:
        phase.goes_to(sum(span.size for span in choice.results))
        run.find_results(choice, engines, phase.moved)
    with phases.begin("replaying") as phase:
        phase.goes_to(run.size(choice))
        run.run(choice, engines, phase.moved)
    if not (tally.answers or tally.causes or tally.unscored or stop):
        tally.note("nothing is in this range")
    title = choice.title + (f" on {asked.question.model}@{asked.version}" if asked.version else ", as it was")
    if engines.deaths:
        tally.note(f"engines died {engines.deaths} times")
    return tally.finish(
        title,
        what_is_exact(engines.backends()),
        time.monotonic() - started_s,
        partial=bool(stop),
        to_topic=asked.to_topic,
    )
