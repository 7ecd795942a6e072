"""What `rollout status` and `history` show."""

from __future__ import annotations

from sie_stream.cli.rollout import history_rows, status_rows
from sie_stream.commands import RolloutOrder
from tests.unit.scheduler.rolling import UNIT, Rolling, answered


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
