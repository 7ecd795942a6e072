"""The demo in a pipe: a line for each part of the way, where no bars can be drawn."""

from __future__ import annotations

import io

from rich.console import Console

from sie_stream.cli.demo.screen import QUIET_S, Milestones, live, live_view, progress_bars
from sie_stream.cli.demo.tally import Tally


def test_each_quarter_is_told_once_and_the_end_in_any_case() -> None:
    said: list[str] = []
    lines = Milestones("models ready", 117, said.append)
    for ready in range(118):
        lines.reached(ready)
        lines.reached(ready)
    assert [line.split(" after ")[0].strip() for line in said] == [
        f"models ready: {ready} of 117" for ready in (30, 59, 88, 117)
    ]
    jump: list[str] = []
    Milestones("terminal records", 8, jump.append).reached(8)
    assert len(jump) == 1


def test_nobody_waits_long_for_a_line() -> None:
    said: list[str] = []
    now_s = [0.0]
    lines = Milestones("terminal records", 1_000, said.append, lambda: now_s[0])
    for now_s[0] in range(25):
        lines.reached(3)
    assert said == [f"  terminal records: 3 of 1000 after {at:.1f} s" for at in (QUIET_S, 2 * QUIET_S)]


def test_where_there_are_bars_no_line_is_said() -> None:
    Milestones("models ready", 4, None).reached(4)


def test_a_pipe_gets_neither_bars_nor_frames() -> None:
    pipe = io.StringIO()
    console = Console(file=pipe, force_terminal=False)
    with progress_bars(console) as progress:
        progress.update(progress.add_task("models ready", total=2), completed=2)
        tally = Tally.__new__(Tally)
        tally.latencies_ms = {}
        with live(console, live_view(progress, tally, "")) as show:
            show(live_view(progress, tally, "killed"))
    assert pipe.getvalue() == ""
