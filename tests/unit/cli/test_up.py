"""`sie-stream up`: what it refuses before anything starts, and a start that fails is told as one."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sie_stream.cli import cluster, main
from sie_stream.edge.supervisor import ProcessFailed, ProcessSpec, Supervisor
from sie_stream.errors import ConfigError

TIMEOUT_S = 30.0
FAILS_ONCE = """
import pathlib, time
mark = pathlib.Path({!r})
if not mark.exists():
    mark.touch()
    raise SystemExit(1)
print('"ready"', flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [(), ("--detach",)])
def test_a_taken_metrics_port_is_told_before_anything_starts(
    how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_arguments: object, **_options: object) -> None:
        raise AssertionError("nothing may start")

    monkeypatch.setattr(cluster.subprocess, "Popen", started)
    monkeypatch.setattr(cluster.EmbeddedBroker, "start", started)
    monkeypatch.setenv("SIE_STREAM_STATE_DIR", str(tmp_path / "state"))
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        shown = CliRunner().invoke(main.app, ["up", "--metrics-port", str(port), *how])
    assert isinstance(shown.exception, ConfigError)
    assert f"--metrics-port {port}" in str(shown.exception)
    assert not (tmp_path / "state").exists()


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Its processes are modules of this folder."""
    (tmp_path / "leaves.py").write_text("raise SystemExit(78)\n")
    (tmp_path / "says_and_leaves.py").write_text("print('\"ready\"', flush=True)\nraise SystemExit(78)\n")
    (tmp_path / "fails.py").write_text("raise SystemExit(1)\n")
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE.format(str(tmp_path / "been_here")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Supervisor(tmp_path / "logs", {}, lambda _child, _code: None)


def test_the_ready_line_of_an_earlier_run_counts_for_nothing(supervisor: Supervisor) -> None:
    supervisor.logs_dir.mkdir()
    (supervisor.logs_dir / "metrics-0.log").write_text('{"event": "ready"}\n')
    supervisor.start(ProcessSpec("metrics-0", "leaves"))
    with pytest.raises(ProcessFailed, match="metrics-0 ended with code 78 before it was ready"):
        supervisor.wait_ready(TIMEOUT_S)


def test_a_process_that_ends_after_its_ready_line_fails_the_start(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec("metrics-0", "says_and_leaves")).process.wait(TIMEOUT_S)
    with pytest.raises(ProcessFailed, match="metrics-0 ended with code 78"):
        supervisor.wait_ready(TIMEOUT_S)


def test_a_process_that_fails_while_everything_starts_gets_another_life(supervisor: Supervisor) -> None:
    """Kafka may stand still for longer than a transaction waits; a call that gave up ends its process."""
    child = supervisor.start(ProcessSpec("metrics-0", "fails_once"))
    try:
        supervisor.wait_ready(TIMEOUT_S)
        assert (child.ready, child.restarts) == (True, 1)
    finally:
        supervisor.stop(["metrics"], TIMEOUT_S)


def test_a_process_that_keeps_failing_fails_the_start(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec("metrics-0", "fails"))
    with pytest.raises(ProcessFailed, match="metrics-0 ended with code 1 before it was ready, 3 times"):
        supervisor.wait_ready(TIMEOUT_S)
