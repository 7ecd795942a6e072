"""What real engine processes write, on its way to the log of their worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker.engine_port import BatchCompleted, EngineDied, ModelLoaded
from gpu_worker.output_gate import BYTES_PER_S, LAST_LINES
from tests.integration.test_engine_process import Engines
from tests.waiting import wait_until

LINES = 60_000
"""Of 900 bytes: 54 MB."""


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.links.close()


def test_an_engine_that_writes_without_end_fills_no_log_and_its_last_lines_are_kept(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "worker.log"
    stream = log.open("w")
    monkeypatch.setattr(sys, "stderr", stream)  # here, not in a fixture: pytest has its own for each of its phases
    engines.load()
    engines.wait_for(ModelLoaded)
    engines.run(1, f'{{"do":"flood","lines":{LINES}}}')
    engines.wait_for(BatchCompleted)
    engines.run(2, '{"do":"segfault"}')
    died = engines.wait_for(EngineDied)
    assert isinstance(died, EngineDied)
    assert died.cause == "SIGSEGV"
    lines = wait_until(lambda: all_of(log), "the end of the output")
    told = [int(line.split()[4]) for line in lines if line.startswith("engine trouble on cpu:0: ")]
    assert sum(told) > LINES / 2
    assert log.stat().st_size < BYTES_PER_S * (len(told) + 2), "one second more than were told of, and the last lines"
    assert lines[-1].split()[:2] == ["line", str(LINES - 1)]
    stream.close()


def all_of(log: Path) -> list[str]:
    """Lines of the log, once it is complete; before that, none."""
    lines = log.read_text().splitlines()
    marked = [place for place, line in enumerate(lines) if line.endswith("its last lines were:")]
    return lines if marked and len(lines) == marked[0] + 1 + LAST_LINES else []


def test_a_child_that_holds_the_output_hides_no_death(engines: Engines) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"leave a child"}')
    done = engines.wait_for(BatchCompleted)
    assert isinstance(done, BatchCompleted)
    engines.run(2, '{"do":"exit"}')
    died = engines.wait_for(EngineDied)
    assert isinstance(died, EngineDied)
    assert died.cause == "exit 3"
