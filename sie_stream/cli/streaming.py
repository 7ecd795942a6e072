"""`sie-stream produce --stream`: one answer, shown as it grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import typer

from sie_stream.cli.output import OutputFormat, error_console, json_line, printable
from sie_stream.client.requests import InferenceResult
from sie_stream.client.streaming import TextDelta
from sie_stream.client.sync_client import Client


def show_stream(
    client: Client,
    model: str,
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    timeout_s: float,
    output: OutputFormat,
) -> InferenceResult:
    """Prints the text as it comes, or (json) one object per line: deltas, then the result. The result.

    Raises RequestFailed and ResultTimeout.
    """
    for found in client.stream(model, inputs, timeout_s=timeout_s, **options):
        if output is OutputFormat.JSON:
            kind = "delta" if isinstance(found, TextDelta) else "result"
            typer.echo(json_line({"kind": kind, **msgspec.to_builtins(found)}))
        elif isinstance(found, TextDelta):
            if found.restarted:
                typer.echo()
                error_console.print("(the answer was begun again)")
            typer.echo(printable(found.text), nl=False)
        if isinstance(found, InferenceResult):
            if output is not OutputFormat.JSON:
                typer.echo()
                usage = found.usage
                error_console.print(
                    f"{found.request_id}  {found.model}@{found.version}  {usage.completion_tokens} tokens  first after "
                    f"{found.timings_ms.first_token:.0f} ms, all after {found.timings_ms.total:.0f} ms",
                    highlight=False,
                    markup=False,
                )
            return found
    raise AssertionError("a stream ends with its result")
