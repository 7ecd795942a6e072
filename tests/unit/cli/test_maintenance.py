"""Who waits for a drain hears how it ended, also when somebody else ended it."""

from __future__ import annotations

from typing import cast

import pytest
import typer

from sie_stream.cli import maintenance
from sie_stream.cli.output import OutputFormat
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from tests.unit.cli.test_ask import Cluster


def drain(monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    """`drain w0` in a cluster that answers with this decision."""
    answer = Decision("d-150-0", kind, "w0", reason, cause_offset=150, at_ms=0, chosen={})
    connection = cast("Connection", Cluster(answer))
    monkeypatch.setattr(maintenance.Connection, "open", lambda _servers: connection)
    monkeypatch.setattr(maintenance, "_what_is_left", lambda *_: "it goes on draining")
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
