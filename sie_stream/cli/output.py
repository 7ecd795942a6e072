"""How commands speak: tables for people on standard output, JSON for scripts, errors on standard error."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sie_stream.errors import SieError, did_you_mean

PickT = TypeVar("PickT")


class OutputFormat(enum.StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="table for people, json for scripts.")]
BootstrapOption = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-servers", "-b", help="Kafka to use. Default: the running `sie-stream up`, or the environment."
    ),
]

PIPE_WIDTH = 200
"""Columns of a table that goes to a file or a pipe: whoever reads it there can scroll."""

console = Console()
if not console.is_terminal:
    console = Console(width=PIPE_WIDTH)
error_console = Console(stderr=True)


def with_examples(help_text: str, *lines: str) -> str:
    """Help of a group of commands, with examples as single commands have them."""
    return f"{help_text}\n\n\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: OutputFormat, empty: str) -> None:
    """Rows as a table with the named columns, or as a JSON list with every field. `empty`: what to say of no rows."""
    if output is OutputFormat.JSON:
        show_json(rows)
        return
    if not rows:
        console.print(empty)
        return
    console.print(table_of(rows, columns))


def table_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    """One line for each row with the named columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.upper().replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*[_cell(row.get(column)) for column in columns])
    return table


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "-"
    return str(value)


def show_error(error: SieError) -> None:
    error_console.print(f"[bold red]error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)


def pick(option: str, chosen: str, choices: Mapping[str, PickT]) -> PickT:
    """The value of a named choice. Raises typer.BadParameter naming the choices and the nearest."""
    if chosen not in choices:
        raise typer.BadParameter(f"{option} {chosen!r}: allowed {', '.join(choices)}.{did_you_mean(chosen, choices)}")
    return choices[chosen]
