"""`rollout` refuses what would be something else than what was asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sie_stream.cli import rollout
from sie_stream.cli.main import app
from sie_stream.errors import ConfigError
from tests.unit.scheduler.rolling import Rolling


@pytest.mark.parametrize("share", ["-1", "100.1", "0.004", "nan"])
def test_a_share_that_would_be_none_or_too_much_is_refused(share: str, tmp_path: Path) -> None:
    """0.004 % rounds to nothing, and nothing means a rollout by steps up to all keys."""
    shown = CliRunner().invoke(app, ["rollout", "start", "-f", str(tmp_path / "v2.yaml"), f"--share={share}"])
    assert isinstance(shown.exception, ConfigError)
    assert f"--share {share}: allowed are 0.01 to 100 percent" in str(shown.exception)


def test_a_followed_model_that_nobody_declared_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live table of nothing looks as if nothing were rolled out."""
    state = Rolling().machine.state
    monkeypatch.setattr(rollout.Connection, "open", lambda _servers: None)
    monkeypatch.setattr(rollout, "cluster_state", lambda _connection: state)
    monkeypatch.setattr(rollout, "followed", lambda _connection: pytest.fail("a live table of nothing"))
    shown = CliRunner().invoke(app, ["rollout", "status", "chrn", "--follow"])
    assert isinstance(shown.exception, ConfigError)
    assert "Did you mean 'churn'" in str(shown.exception)
