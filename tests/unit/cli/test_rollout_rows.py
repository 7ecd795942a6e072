"""What `rollout status` and `history` show."""

from __future__ import annotations

import io

import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from scheduler.state import from_bytes, to_bytes
from sie_stream.cli import rollout
from sie_stream.cli.main import app
from sie_stream.cli.rollout_view import history_rows, history_table_rows, picture, status_rows
from sie_stream.commands import RolloutOrder
from sie_stream.control import InstanceRow
from tests.unit.scheduler.kit import spec_json
from tests.unit.scheduler.rolling import ALIVE, QUICK, UNIT, Rolling, answered


def test_status_and_history() -> None:
    cluster = Rolling()
    state = cluster.machine.state
    assert status_rows(state) == history_rows(state) == []
    cluster.roll()
    [row] = status_rows(state)
    assert (row["phase"], row["share"], row["replicas"], row["gates"]) == ("loading", "0 %", "0/1", [])
    cluster.make_ready(UNIT)
    cluster.windows()
    cluster.append(RolloutOrder("churn", "pause", actor="ada"))
    [row] = status_rows(state, "churn")
    assert row["version"] == "1.0.0 -> 2.0.0"
    assert row["phase"] == "serving, paused by ada"
    assert (row["share"], row["step"]) == ("20 %", "2/4")
    assert status_rows(state, "other") == []
    cluster.windows(new=answered(200, score=0.9))
    assert status_rows(state) == []
    [ended] = history_rows(state)
    assert (ended["ending"], ended["from"], ended["version"]) == ("rolled_back", "1.0.0", "2.0.0")
    assert "ks:score" in ended["why"]
    assert any(gate["verdict"] == "breach" for gate in ended["gate_results"])
    assert [(one["share"], one["state"]) for one in ended["steps"]] == [("10 %", "passed"), ("20 %", "failed")]
    [short] = history_table_rows([ended])
    assert (short["version"], short["steps"]) == ("1.0.0 -> 2.0.0", "10% 20%")


def test_every_step_is_seen_while_it_goes() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.windows()
    [row] = status_rows(cluster.machine.state)
    steps = [(one["share"], one["state"]) for one in row["steps"]]
    assert steps == [("10 %", "passed"), ("20 %", "now"), ("50 %", "to come"), ("100 %", "to come")], row["note"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(picture(cluster.machine.state, "churn"))
    text = console.export_text()
    assert "1.0.0 -> 2.0.0" in text
    assert "to come" in text


def test_instance_row_lists_replicas_of_both_variants() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    row = cluster.row("instances", cluster.model().instance, InstanceRow)
    assert [(one.variant, one.version, one.state) for one in row.replicas] == [
        ("stable", "1.0.0", "ready"),
        ("canary", "2.0.0", "ready"),
    ]


def test_what_somebody_promoted_passed_nothing() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.append(RolloutOrder("churn", "promote", actor="ada"))
    cluster.make_ready()
    cluster.release()
    cluster.wait(500, ALIVE)
    [ended] = history_rows(cluster.machine.state)
    assert (ended["ending"], ended["why"]) == ("completed", "Promoted by ada.")
    steps = [(one["share"], one["state"], one["samples"]) for one in ended["steps"]]
    assert steps == [("10 %", "promoted by ada", 0), ("100 %", "promoted by ada", 0)]


def test_a_step_that_somebody_ended_did_not_fail() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.windows()
    cluster.append(RolloutOrder("churn", "abort", actor="ada"))
    [ended] = history_rows(cluster.machine.state)
    assert [(one["share"], one["state"]) for one in ended["steps"]] == [("10 %", "passed"), ("20 %", "aborted")]


def test_a_shadow_is_called_so_with_its_samples() -> None:
    """Copies at 0 % of the keys look like a rollout that does nothing."""
    cluster = Rolling()
    state = cluster.machine.state
    cluster.roll(rollout={**QUICK, "steps": [50, 100], "shadow": True})
    [row] = status_rows(state)
    assert [(one["share"], one["state"]) for one in row["steps"]][:2] == [("shadow", "to come"), ("50 %", "to come")]
    cluster.make_ready(UNIT)
    cluster.windows(new=answered(60))
    [row] = status_rows(state)
    assert (row["phase"], row["step"], row["share"]) == ("shadow", "shadow", "0 %")
    assert "copies are compared, nothing is answered by it: 60 of 100 samples" in row["note"]
    [now, *ahead] = row["steps"]
    assert (now["share"], now["state"], now["samples"], now["samples_min"]) == ("shadow", "now", 60, 100)
    assert [(one["share"], one["state"]) for one in ahead] == [("50 %", "to come"), ("100 %", "to come")]
    cluster.windows(new=answered(60))
    cluster.windows(new=answered(200, score=0.9))
    [ended] = history_rows(state)
    steps = [(one["share"], one["state"], one["samples"]) for one in ended["steps"]]
    assert steps[0] == ("shadow", "passed", 120)
    assert history_table_rows([ended])[0]["steps"] == "shadow 50%"


def test_what_is_promoted_while_it_loads_was_no_shadow() -> None:
    cluster = Rolling()
    cluster.apply(spec_json(version="2.0.0", rollout={**QUICK, "shadow": True}))
    cluster.append(RolloutOrder("churn", "pause", actor="ada"))
    cluster.make_ready(UNIT)
    cluster.append(RolloutOrder("churn", "promote", actor="ada"))
    [row] = status_rows(cluster.machine.state)
    assert [one["share"] for one in row["steps"]] == ["100 %"]


def test_what_was_taken_back_is_in_the_history() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    cluster.append(RolloutOrder("churn", "promote", actor="ada"))
    cluster.make_ready()
    cluster.release()
    cluster.wait(500, ALIVE)
    cluster.append(RolloutOrder("churn", "undo", actor="ada"))
    ended = history_rows(cluster.machine.state)
    assert [(one["ending"], one["from"], one["version"], one["actor"]) for one in ended][1:] == [
        ("undone", "2.0.0", "1.0.0", "ada")
    ]
    assert ended[-1]["why"].startswith(f"ada takes {ended[0]['rollout']} back: version 1.0.0 replaces 2.0.0")
    assert history_table_rows(ended)[-1]["steps"] == "none"
    restored = from_bytes(to_bytes(cluster.machine.state))
    assert restored is not None
    assert history_rows(restored) == ended


def test_the_history_is_by_the_end_whatever_the_model_and_its_table_names_the_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.append(RolloutOrder("churn", "abort", actor="ada"))
    (one,) = cluster.model().rollout_history
    later, last = (structs.replace(one, variant=name, ended_ms=one.ended_ms + ms) for name, ms in (("b", 5), ("c", 9)))
    state = cluster.machine.state
    state.gone_rollouts = {"aaa": (later,), "zzz": (structs.replace(one, ended_ms=one.ended_ms - 1),)}
    cluster.model().rollout_history = (one, last)
    rows = history_rows(state)
    ends = [(row["model"], row["variant"]) for row in rows]
    assert ends == [("zzz", "canary"), ("churn", "canary"), ("aaa", "b"), ("churn", "c")]
    monkeypatch.setattr(rollout.Connection, "open", lambda _servers: None)
    monkeypatch.setattr(rollout, "cluster_state", lambda _connection: state)
    head, *lines = CliRunner().invoke(app, ["rollout", "history"]).output.splitlines()
    at = head.index("VARIANT")
    assert [line[at:].split()[0] for line in lines if line[:2] == "20"] == ["canary", "canary", "b", "c"]
