"""What the demo shows: live progress while it runs, and the summary at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sie_stream.cli.demo.tally import Tally, percentile


def progress_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


MILESTONES = 4
QUIET_S = 10.0


class Milestones:
    """How far it is, in lines, where there are no bars: in a pipe or a file. `say` of nothing says nothing."""

    def __init__(
        self,
        what: str,
        total: int,
        say: Callable[[str], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._say = say
        self._said = 0
        self._started = self._told = clock()
        self._clock = clock

    def reached(self, done: int) -> None:
        """A line for each quarter of the way, and whenever there was none for QUIET_S."""
        part, now = MILESTONES * done // max(1, self._total), self._clock()
        if self._say is None or (part <= self._said and now - self._told < QUIET_S):
            return
        self._said, self._told = max(part, self._said), now
        self._say(f"  {self._what}: {done} of {self._total} after {now - self._started:.1f} s")


@contextmanager
def live(console: Console, first: Group) -> Iterator[Callable[[Group], None]]:
    """Shows what it is given until the end; nothing where it cannot be drawn over."""
    if not console.is_terminal:
        yield lambda view: None
        return
    with Live(first, console=console, refresh_per_second=4, transient=True) as shown:
        yield shown.update


def live_view(progress: Progress, tally: Tally, note: str) -> Group:
    """Bars, running latencies per service type, and the latest event."""
    return Group(progress, latency_table(tally), f"[dim]{note}[/]")


def latency_table(tally: Tally) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("SERVICE TYPE")
    for name in ("ANSWERS", "P50 MS", "P99 MS"):
        table.add_column(name, justify="right")
    for service_type in sorted(tally.latencies_ms):
        values = list(tally.latencies_ms[service_type])
        table.add_row(
            service_type, str(len(values)), f"{percentile(values, 0.50):.1f}", f"{percentile(values, 0.99):.1f}"
        )
    return table


def show_summary(console: Console, tally: Tally, proof: dict[str, Any], facts: dict[str, str]) -> None:
    console.print()
    console.print(latency_table(tally))
    console.print()
    console.print("[bold]One answer of each kind[/]")
    for service_type, result in sorted(tally.samples.items()):
        text = json.dumps(result.outputs)
        console.print(
            f"  {service_type}: {result.model}@{result.version} on {result.provenance.worker}: "
            f"{text if len(text) <= 150 else text[:147] + '...'}",
            highlight=False,
            soft_wrap=True,
        )
    console.print()
    for name, value in facts.items():
        console.print(f"[bold]{name}[/]: {value}", highlight=False)
    console.print(Panel(proof_line(proof), title="proof (independent read_committed consumer)", expand=False))


def proof_line(proof: dict[str, Any]) -> str:
    return (
        f"requests {proof['requests']} = terminal records {proof['terminal_records']}, "
        f"duplicates {len(proof['duplicates'])}, lost {len(proof['lost'])}; "
        + ", ".join(f"{status} {count}" for status, count in proof["statuses"].items())
    )
