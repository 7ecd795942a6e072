"""Bars on standard error while a command reads or waits for long."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sie_stream.cli.output import error_console


def progress_bars(*, shown: bool = True, console: Console = error_console) -> Progress:
    """How much of how much is done, for how long it has run and how long it still takes. Gone when it is done.

    `shown`: false for what will be over before a bar could be read. In a pipe or a file there are none: they would
    leave empty lines there.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
