"""How commands speak: tables for people on standard output, JSON for scripts, errors on standard error."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

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


class SafeConsole(Console):
    """A console that others' text cannot command: see `printable`. Its own colours and cursor moves stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


console = SafeConsole()
if not console.is_terminal:
    console = SafeConsole(width=PIPE_WIDTH)
error_console = SafeConsole(stderr=True)


def say(text: str, style: str = "") -> None:
    """A line on standard output, as it is: brackets in what others wrote are no markup."""
    console.print(text, highlight=False, markup=False, style=style)


def tell(text: str) -> None:
    """Something that the reader of a command's output should know, on standard error."""
    error_console.print(text, highlight=False, markup=False)


def _substitutes() -> dict[int, str]:
    """C0 but tab and newline as their pictures; DEL, C1 and what turns the direction of text as a box."""
    pictures = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"}
    turning = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    return pictures | dict.fromkeys((*range(127, 160), *turning, 8232, 8233), "�")


_SUBSTITUTES = _substitutes()


def printable(text: str) -> str:
    """The text with nothing in it that a terminal obeys. Request ids, models, errors and keys are what users wrote:
    with ESC they could clear a screen, retitle it, or paint an answer that never was.
    """
    return text if text.isprintable() else text.translate(_SUBSTITUTES)


def one_line(text: str) -> str:
    """As `printable`; line breaks are shown, too, so that nobody can write lines of his own into a listing."""
    return printable(text).replace("\n", "\u240a")


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
        table.add_row(*as_text(_cell(row.get(column)) for column in columns))
    return table


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def as_text(cells: Iterable[str]) -> list[Text]:
    """Cells of a table as they are: brackets in what others wrote are no markup."""
    return [Text(cell) for cell in cells]


def show_text(text: str) -> None:
    """Text of several lines on standard output."""
    typer.echo(printable(text))


def json_line(value: Any) -> str:
    """A record as one line of JSON in ASCII: what a terminal would obey is escaped in it."""
    return json.dumps(msgspec.to_builtins(value, enc_hook=str), separators=(",", ":"))


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
