"""`sie-stream produce` and `results`: the data plane from the command line."""

from __future__ import annotations

import heapq
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sie_stream.cli.known import declared_models, refuse_unknown
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    console,
    error_console,
    json_line,
    one_line,
    pick,
    show_json,
    tell,
)
from sie_stream.cli.progress import progress_bars
from sie_stream.cli.referring import InputsRefOption, Sha256Option, StoreOption, reference, store_url
from sie_stream.cli.rows import count_rows, read_rows, stdin_rows
from sie_stream.cli.streaming import show_stream
from sie_stream.client.requests import InferenceResult, Request, ResultTimeout
from sie_stream.client.sync_client import Client, Submission
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError, SieError
from sie_stream.records import STATUSES

CHUNK = 500
IDS_SHOWN = 20


def produce(
    model: Annotated[str, typer.Option("--model", "-m", help="Model name, name@version, or mi-... instance.")],
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Rows: .jsonl, .csv or .parquet.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Rows from standard input, one JSON object per line.")] = False,
    inputs: Annotated[str | None, typer.Option("--inputs", "-i", help="One inputs object as JSON.")] = None,
    inputs_ref: InputsRefOption = None,
    sha256: Sha256Option = None,
    store: StoreOption = None,
    parameters: Annotated[str | None, typer.Option(help="Generation parameters as JSON, for all rows.")] = None,
    priority: Annotated[str | None, typer.Option(help="P0, P1 or P2.")] = None,
    deadline_ms: Annotated[int | None, typer.Option(help="Milliseconds after which an answer is worthless.")] = None,
    session: Annotated[str | None, typer.Option(help="Requests of one session meet the same replica.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose quota is used.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Id of a single request.")] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait for the results and print them.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print one answer while it is written.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for results.")] = 60.0,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Send rows to a model.

    \b
    Examples:
      sie-stream produce -m wine-rf -f .models/wine-rf/samples.jsonl --wait
      sie-stream produce -m smollm2-135m-instruct -i '{"prompt": "Who wrote Hamlet?"}' --wait
      sie-stream produce -m smollm2-135m-instruct -i '{"prompt": "Who wrote Hamlet?"}' --stream
      cat rows.jsonl | sie-stream produce -m wine-rf --stdin
      sie-stream produce -m bge-small -f documents.jsonl --store s3://bucket/inputs
      sie-stream produce -m bge-small --inputs-ref s3://bucket/inputs/1.json --sha256 9f86d081... --wait
    """
    rows, total = _rows(file, stdin, inputs, inputs_ref)
    shared = {
        "inputs_ref": reference(inputs_ref, sha256),
        "parameters": None if parameters is None else _object(parameters, "--parameters"),
        "priority": priority,
        "deadline_ms": deadline_ms,
        "session": session,
        "tenant": tenant,
        "request_id": request_id,
    }
    if total != 1:
        _refuse_for_many(request_id, stream)
    with Client(bootstrap_servers, reference_store=store_url(store)) as client:
        if stream:
            show_stream(client, model, next(rows), shared, timeout_s, output)
            return
        submissions = _send(client, model, rows, shared, total, output)
        if not wait:
            _say_sent(submissions, output)
            return
        results: list[InferenceResult] = []
        try:
            results.extend(_await_all(submissions, timeout_s))
        except KeyboardInterrupt:
            error_console.print("\n".join(interrupted(submissions)), highlight=False, markup=False)
            raise
    show_results(results, output)
    _end(results, len(submissions) - len(results), timeout_s)


def _refuse_for_many(request_id: str | None, stream: bool) -> None:
    if request_id is not None:
        raise ConfigError("--request-id names one request: use it with --inputs or --inputs-ref")
    if stream:
        raise ConfigError("--stream shows one answer: use it with --inputs or --inputs-ref")


class PartlySent(SieError):
    """Not all rows were sent; those that were are on their way, and will be answered."""

    code = "partly_sent"


def partly_sent(trouble: SieError, submissions: list[Submission], output: OutputFormat) -> PartlySent:
    """What to raise for trouble with a row. In JSON the ids of what was sent are told on standard output."""
    ids = [submission.request_id for submission in submissions]
    # A chunk with a row that cannot be read is not sent; of one that Kafka did not take, some may have arrived.
    rest = "none after them was" if isinstance(trouble, ConfigError) else "some of the next may have been"
    if output is OutputFormat.JSON:
        show_json({"sent": len(ids), "request_ids": ids, "error": {"code": trouble.code, "message": str(trouble)}})
        later = "their ids are in the JSON"
    else:
        later = f"the last one: {next(look_later(ids[-1:]))}" if ids else ""
    if not ids:
        nothing = "No row was sent" if isinstance(trouble, ConfigError) else "Of the first rows some may have been sent"
        return PartlySent(f"{trouble}. {nothing}")
    return PartlySent(
        f"{trouble}. The first {len(ids)} rows were sent before that and will be answered ({later}); {rest}"
    )


def _end(results: list[InferenceResult], missing: int, timeout_s: float) -> None:
    """Exit code 1 unless every request was answered, and well. How many were not, and how these ended, is said."""
    sent = missing + len(results)
    if said := badly_ended(results, sent):
        tell(said)
    if missing:
        error_console.print(
            f"{missing} of {sent} requests had no result after {timeout_s:.0f} s; they may still come. "
            "`sie-stream doctor` looks at the engine, `sie-stream results --request-id ID` later."
        )
    if missing or any(not result.ok for result in results):
        raise typer.Exit(1)


def badly_ended(results: Sequence[InferenceResult], sent: int) -> str:
    """How many requests ended in which status other than ok, as a sentence; empty when none did."""
    ends = Counter(result.status for result in results if not result.ok)
    if not ends:
        return ""
    words = ", ".join(f"{ends[status]} {status}" for status in STATUSES if ends[status])
    return f"{ends.total()} of {sent} requests ended without an answer: {words}"


def _rows(
    file: Path | None, stdin: bool, inputs: str | None, inputs_ref: str | None
) -> tuple[Iterator[dict[str, Any]], int | None]:
    if sum((file is not None, stdin, inputs is not None, inputs_ref is not None)) != 1:
        raise ConfigError("give the rows by exactly one of --file, --stdin, --inputs or --inputs-ref")
    if file is not None:
        return read_rows(file), count_rows(file)
    if stdin:
        return stdin_rows(), None
    return iter([{} if inputs is None else _object(inputs, "--inputs")]), 1


def _object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: expected a JSON object, got {type(value).__name__}")
    return value


def _send(
    client: Client,
    model: str,
    rows: Iterable[Mapping[str, Any]],
    shared: Mapping[str, Any],
    total: int | None,
    output: OutputFormat,
) -> list[Submission]:
    """In chunks. Raises PartlySent when a row, or Kafka, makes trouble."""
    sent: list[Submission] = []
    with progress_bars() as progress:
        task = progress.add_task("sending", total=total)
        try:
            for chunk in _batched(rows, CHUNK):
                sent += client.submit_many(Request(model=model, inputs=row, **shared) for row in chunk)
                progress.advance(task, len(chunk))
        except SieError as trouble:
            if total == 1:
                raise
            raise partly_sent(trouble, sent, output) from trouble
    return sent


def _batched(rows: Iterable[Mapping[str, Any]], size: int) -> Iterator[tuple[Mapping[str, Any], ...]]:
    iterator = iter(rows)
    while chunk := tuple(itertools.islice(iterator, size)):
        yield chunk


def _await_all(submissions: list[Submission], timeout_s: float) -> Iterator[InferenceResult]:
    deadline = time.monotonic() + timeout_s
    with progress_bars() as progress:
        for submission in progress.track(submissions, description="results"):
            try:
                yield submission.result(max(0.0, deadline - time.monotonic()))
            except ResultTimeout:
                continue


def _say_sent(submissions: list[Submission], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        show_json({"sent": len(submissions), "request_ids": [submission.request_id for submission in submissions]})
        return
    ids = [submission.request_id for submission in submissions]
    lines = [f"sent {len(ids)} requests", *look_later(ids)]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def interrupted(submissions: list[Submission]) -> Iterator[str]:
    """What became of requests whose answers are waited for no longer."""
    left = [submission.request_id for submission in submissions if not submission.future.done()]
    yield f"interrupted: {len(submissions) - len(left)} of {len(submissions)} requests are answered"
    if left:
        yield f"the other {len(left)} are on their way and will be answered all the same:"
        yield from look_later(left)


def look_later(request_ids: Sequence[str]) -> Iterator[str]:
    """The command that shows each request's end, for the first of them."""
    for request_id in request_ids[:IDS_SHOWN]:
        yield f"sie-stream results --request-id {request_id}"
    if len(request_ids) > IDS_SHOWN:
        yield f"... and {len(request_ids) - IDS_SHOWN} more; `produce -o json` tells every id"


def results(
    request_id: Annotated[list[str] | None, typer.Option("--request-id", help="Only these; repeatable.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-F", help="Go on with new results until Ctrl-C.")] = False,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Only results of this model.")] = None,
    status: Annotated[str | None, typer.Option(help="Only ok, rejected, expired, shed or failed.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The newest ones, so many.", min=1)] = 100,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Read terminal records (read_committed).

    \b
    Examples:
      sie-stream results -n 10
      sie-stream results --follow --model wine-rf
      sie-stream results --request-id 6f1c... -o json
    """
    if status is not None:
        pick("--status", status, {one: one for one in STATUSES})
    connection, models = Connection.open(bootstrap_servers), set[str]()
    with Client(connection=connection) as client:
        found = seen(client.results(tuple(request_id or ()), follow=follow), models)
        picked = (result for result in found if model in (None, result.model) and status in (None, result.status))
        if follow and not request_id:
            for result in picked:
                typer.echo(json_line(result) if output is OutputFormat.JSON else _line(result))
            return
        rows = newest(picked, limit)
    if model is not None and model not in models:
        with closing(connection.reader()) as reader:
            refuse_unknown("--model", model, models | declared_models(reader, connection.settings.topics))
    show_results(rows, output)
    if not rows:
        error_console.print("no results")
    if request_id and len(rows) < len(request_id):
        error_console.print(f"{len(request_id) - len(rows)} of {len(request_id)} requests have no terminal record yet")
        raise typer.Exit(1)


def seen(found: Iterable[InferenceResult], models: set[str]) -> Iterator[InferenceResult]:
    """The same results; adds their models to the set as they come."""
    for result in found:
        if result.model:  # none: refused before it was known
            models.add(result.model)
        yield result


def newest(found: Iterable[InferenceResult], limit: int) -> list[InferenceResult]:
    """The `limit` that finished last, oldest of them first: partitions are read one after the other, not by time."""
    numbered = zip(itertools.count(), found, strict=False)
    last = heapq.nlargest(limit, numbered, key=lambda pair: (pair[1].finished_at, pair[0]))
    return [result for _, result in reversed(last)]


def show_results(found: list[InferenceResult], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        show_json([msgspec.to_builtins(result) for result in found])
        return
    for result in found:
        typer.echo(_line(result))


def _line(result: InferenceResult) -> str:
    """One result for people: what was asked, how it ended, how long it took, and the answer or the reason below."""
    model = f"{result.model}@{result.version}" if result.version else result.model
    head = one_line(f"{result.request_id}  {result.status:<8}  {model or '-'}  {result.timings_ms.total:.1f} ms")
    if result.error is not None:
        field = f" (field {result.error.field})" if result.error.field else ""
        return f"{head}\n    {one_line(f'{result.error.code}: {result.error.message}{field}')}"
    return f"{head}\n    {_short(json.dumps(result.outputs))}"


def _short(text: str, size: int = 240) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."
