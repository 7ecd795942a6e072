"""What a replay says while it works: nothing moves while an engine starts, and that is told in a pipe, too."""

from __future__ import annotations

import io

from sie_stream.cli.output import SafeConsole
from sie_stream.cli.replaying.phases import Phases
from tests.unit.replay.test_engines import launch

STARTING = "starting an engine for m@1 (sim)"


def test_a_pipe_gets_one_line_for_a_wait_and_nothing_else() -> None:
    written = io.StringIO()
    phases = Phases(SafeConsole(file=written))
    with phases.begin("results") as phase:
        phase.goes_to(10)
        phase.moved(10)
    with phases.begin("replaying"), phases.engine_starts(launch()):
        pass
    assert written.getvalue() == f"{STARTING}\n"


def test_a_terminal_names_the_engine_beside_the_bar_until_it_has_started() -> None:
    written = io.StringIO()
    console = SafeConsole(file=written, force_terminal=True, width=120)
    phases = Phases(console)
    with phases.begin("replaying") as phase:
        phase.goes_to(10)
        with phases.engine_starts(launch()):
            pass
        assert STARTING in written.getvalue()
        begun = len(written.getvalue())
        phase.moved(4)
        phase.shown()
    after = written.getvalue()[begun:]
    assert "replaying" in after
    assert "4/10" in after
