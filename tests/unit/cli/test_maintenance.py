"""Who waits for a drain hears how it ended, also when somebody else ended it."""

from __future__ import annotations

from typing import cast

import pytest
import typer

from scheduler.state import ClusterState
from sie_stream.cli import maintenance
from sie_stream.cli.maintenance import what_is_left
from sie_stream.cli.output import OutputFormat
from sie_stream.control import DrainWorker, WorkerExited
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from tests.unit.cli.test_ask import Cluster
from tests.unit.scheduler.kit import running


def drain(monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    """`drain w0` in a cluster that answers with this decision."""
    answer = Decision("d-150-0", kind, "w0", reason, cause_offset=150, at_ms=0, chosen={})
    connection = cast("Connection", Cluster(answer))
    monkeypatch.setattr(maintenance.Connection, "open", lambda _servers: connection)
    monkeypatch.setattr(maintenance, "cluster_state", lambda _: ClusterState())
    maintenance.drain("w0", True, 0.0, None, OutputFormat.TABLE)


def test_a_drain_that_ended_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drain(monkeypatch, "worker_drained", "It holds nothing.")
    assert "w0: drained. It holds nothing." in capsys.readouterr().out


def test_a_drain_that_somebody_took_back_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        drain(monkeypatch, "worker_uncordoned", "Asked for by bob.")
    assert ended.value.exit_code == 1
    assert "w0: uncordoned. Asked for by bob." in capsys.readouterr().out


def test_a_drain_that_lasts_says_what_each_model_waits_for() -> None:
    cluster = running()
    cluster.append(DrainWorker("w0", "ana"))
    assert "w0 still holds 1 model after 3 s: churn (its replacement is not ready yet)" in left(cluster.machine.state)
    cluster.make_ready()
    assert "churn (6 partitions are asked back: it ends what runs first)" in left(cluster.machine.state)
    cluster.append(WorkerExited("w0", "a", -9, "up"))
    assert "churn (it is lost, and its fence is awaited)" in left(cluster.machine.state)


def left(state: ClusterState) -> str:
    return what_is_left(state, "w0", 3.0)
