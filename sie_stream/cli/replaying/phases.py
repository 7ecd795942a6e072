"""What a replay does right now, on standard error: a bar on a terminal, a line in a pipe where it takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

from sie_stream.cli.output import error_console
from sie_stream.cli.progress import progress_bars
from sie_stream.control import ModelLaunch


class Phase:
    """One pass over offsets: how many were passed, and the time that is left."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self._progress = progress
        self._bar = bar

    def goes_to(self, total: int) -> None:
        self._progress.update(self._bar, total=total)

    def moved(self, count: int) -> None:
        self._progress.advance(self._bar, count)

    def says(self, what: str) -> None:
        self._progress.update(self._bar, description=what)

    def shown(self) -> None:
        """As it stands, without waiting for the next turn of the bar."""
        self._progress.refresh()


class Phases:
    """One after another. Engines start in the midst of one, and nothing moves until they have."""

    def __init__(self, console: Console = error_console) -> None:
        self._console = console
        self._phase: Phase | None = None
        self._name = ""

    @contextmanager
    def begin(self, name: str) -> Iterator[Phase]:
        with progress_bars(console=self._console) as progress:
            self._name, self._phase = name, Phase(progress, progress.add_task(name, total=None))
            try:
                yield self._phase
            finally:
                self._phase = None

    @contextmanager
    def engine_starts(self, launch: ModelLaunch) -> Iterator[None]:
        """Around the wait for a version to be loaded, which takes seconds, for a large model minutes."""
        said = f"starting an engine for {launch.model}@{launch.version} ({launch.backend})"
        if not self._console.is_terminal or self._phase is None:
            self._console.print(said, highlight=False, markup=False)
            yield
            return
        self._phase.says(said)
        self._phase.shown()
        try:
            yield
        finally:
            self._phase.says(self._name)
