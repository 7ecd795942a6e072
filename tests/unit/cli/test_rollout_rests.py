"""`rollout status` counts what waits for a variant without a replica, and says what to do."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from scheduler.limits import DELETE_LINGER_MS
from sie_stream.cli import rollout, rollout_rests
from sie_stream.cli.main import app
from sie_stream.cli.rollout_rests import rest_rows
from tests.unit.scheduler.rolling import UNIT
from tests.unit.scheduler.test_rollout_rests import ABORT, Left

TOPIC = "sie.work.churn.CANARY"


class Broker:
    """A connection whose workers' group has answered nothing."""

    def __init__(self, waiting: int | None) -> None:
        self.waiting = waiting

    def __call__(self, _connection: object, state: object, model: str) -> list[dict[str, object]]:
        return list(rest_rows(state, lambda topic: self.waiting, model))  # type: ignore[arg-type]  # the state it was given


def waiting_for_room() -> Left:
    cluster = Left()
    cluster.lose("w1")
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + 500)
    return cluster


def test_what_an_aborted_version_left_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = waiting_for_room()
    monkeypatch.setattr(rollout.Connection, "open", lambda _servers: None)
    monkeypatch.setattr(rollout, "cluster_state", lambda _connection: cluster.machine.state)
    monkeypatch.setattr(rollout, "counted_rests", Broker(12))
    text = " ".join(CliRunner().invoke(app, ["rollout", "status", "churn"]).output.split())
    assert "no rollout is under way" in text
    assert f"churn, variant canary: 12 requests wait in {TOPIC} for a replica of 1.0.0: no device can hold it" in text
    assert "Add a worker, or free memory: they are answered then." in text
    [row] = json.loads(CliRunner().invoke(app, ["rollout", "status", "-o", "json"]).output)
    assert (row["phase"], row["variant"], row["queued"], row["topic"]) == ("rest", "canary", 12, TOPIC)


@pytest.mark.parametrize(("waiting", "said"), [(1, "1 request waits in"), (None, "not yet counted requests wait in")])
def test_one_and_uncounted(waiting: int | None, said: str) -> None:
    [row] = rest_rows(waiting_for_room().machine.state, lambda _topic: waiting)
    assert row["note"].startswith(said)
    assert row["queued"] == waiting


def test_an_empty_topic_is_no_row_and_others_are_not_asked() -> None:
    cluster = waiting_for_room()
    assert list(rest_rows(cluster.machine.state, lambda _topic: 0)) == []
    asked: list[str] = []
    assert list(rest_rows(cluster.machine.state, asked.append, "other")) == []
    assert asked == []


def test_while_it_is_rolled_out_an_abort_is_told_and_a_replica_that_loads_is_named() -> None:
    cluster = Left()
    state = cluster.machine.state
    assert list(rest_rows(state, lambda _topic: 3)) == [], "its replica answers"
    cluster.lose("w1")
    [row] = rest_rows(state, lambda _topic: 3)
    assert "`sie-stream rollout abort churn --variant canary` lets 1.0.0 answer them" in row["note"]
    cluster.join("w2")
    cluster.passes(500)
    [row] = rest_rows(state, lambda _topic: 3)
    assert row["note"] == f"3 requests wait in {TOPIC}: worked off when the replica of 2.0.0 on w2 has loaded."
    cluster.make_ready(UNIT)
    assert list(rest_rows(state, lambda _topic: 3)) == []


def test_nothing_is_connected_to_count_nothing() -> None:
    state = Left().machine.state
    assert rollout_rests.counted_rests(None, state) == []  # type: ignore[arg-type]  # not used


def test_copies_for_a_shadow_are_called_so() -> None:
    cluster = Left(shadow=True)
    cluster.lose("w1")
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + 500)
    [row] = rest_rows(cluster.machine.state, lambda _topic: 3)
    assert row["note"].startswith(f"3 copies wait in {TOPIC} for a replica of 1.0.0")
