"""`rollout` refuses what would be something else than what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler.state import ClusterState, from_bytes, to_bytes
from sie_stream.cli import rollout
from sie_stream.cli.main import app
from sie_stream.commands import RolloutOrder
from sie_stream.errors import ConfigError
from tests.unit.scheduler.rolling import ALIVE, UNIT, Rolling, answered


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


def _followed(monkeypatch: pytest.MonkeyPatch, cluster: Rolling, acts: list[Callable[[], object]]) -> tuple[int, str]:
    """Exit code and output of `rollout status churn --follow`, while the acts happen one after the other."""

    def states(_connection: object) -> Iterator[ClusterState]:
        assert before is not None
        yield before  # the reader folds from a snapshot that is older than what was seen first
        for act in acts:
            act()
            yield state
            yield state
        pytest.fail("it went on after the end")

    before = from_bytes(to_bytes(Rolling().machine.state))
    state = cluster.machine.state
    monkeypatch.setattr(rollout.Connection, "open", lambda _servers: None)
    monkeypatch.setattr(rollout, "cluster_state", lambda _connection: from_bytes(to_bytes(state)))
    monkeypatch.setattr(rollout, "followed", states)
    shown = CliRunner().invoke(app, ["rollout", "status", "churn", "--follow"])
    assert isinstance(shown.exception, SystemExit | None), shown.exception
    return shown.exit_code, shown.output


def test_in_a_pipe_each_change_is_a_line_and_it_ends_with_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Rolling()
    cluster.roll()
    acts: list[Callable[[], object]] = [
        lambda: cluster.make_ready(UNIT),
        lambda: cluster.windows(new=answered(10)),
        lambda: cluster.windows(new=answered(20)),
        lambda: cluster.append(RolloutOrder("churn", "promote", actor="ada")),
        cluster.make_ready,
        cluster.release,
        lambda: cluster.wait(500, ALIVE),
    ]
    code, output = _followed(monkeypatch, cluster, acts)
    lines = [line.split("  ", 1)[1] for line in output.splitlines()]
    assert code == 0, output
    assert lines[0].startswith("churn  1.0.0 -> 2.0.0  loading"), output
    assert sum("10 % of the keys" in line for line in lines) <= 3, "samples alone are no change"
    assert lines[-1] == "churn  1.0.0 -> 2.0.0  completed: Promoted by ada."


def test_a_follower_fails_with_its_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    acts: list[Callable[[], object]] = [lambda: cluster.append(RolloutOrder("churn", "abort", actor="ada"))]
    code, output = _followed(monkeypatch, cluster, acts)
    assert code == 1
    assert output.splitlines()[-1].endswith("churn  1.0.0 -> 2.0.0  aborted: Aborted by ada.")


def test_where_nothing_is_under_way_a_follower_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = _followed(monkeypatch, Rolling(), [])
    assert (code, output.splitlines()[0]) == (0, "no rollout is under way")


@pytest.mark.parametrize("command", [["apply"], ["rollout", "start"]])
def test_help_says_that_a_breach_waits_for_no_count(command: list[str]) -> None:
    shown = " ".join(CliRunner().invoke(app, [*command, "--help"]).output.split())
    assert "samples_min" in shown
    assert "breached gate" in shown
