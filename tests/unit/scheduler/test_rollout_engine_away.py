"""A new version whose engine ended and loads again for long: its keys do not wait for it, nor go to and fro."""

from __future__ import annotations

import pytest
from msgspec import Raw

from scheduler.limits import ENGINE_AWAY_MS
from scheduler.rollout import Plan, RolloutState, advance
from scheduler.rollout_seen import Seen
from scheduler.state import ReplicaState
from sie_stream.cli.rollout_view import status_rows
from sie_stream.control import EngineLost
from sie_stream.engine_facts import EngineModel
from sie_stream.routing import SHARES
from tests.unit.scheduler.kit import decisions
from tests.unit.scheduler.rolling import UNIT
from tests.unit.scheduler.test_rollout_bypass import Lone


class Reloading(Lone):
    def canary(self) -> ReplicaState:
        [replica] = self.model(UNIT).replicas
        return replica

    def end_engine(self, name: str = UNIT) -> None:
        [replica] = self.model(name).replicas
        loaded = (EngineModel(name, self.model(name).version, replica.placement_epoch),)
        at = (replica.worker, replica.incarnation, replica.device)
        domain = self.model(name).launches[replica.generation].domain
        self.append(EngineLost(*at, "sklearn", "SIGKILL", loaded, 1, ("r1",), domain=domain))

    def lives(self, ms: int) -> list[str]:
        """Kinds of decisions about the rollout within `ms`, but that it holds: nobody reports statistics here."""
        said = [one.kind for one in decisions(self.wait(ms, tuple(self.alive)))]
        return [kind for kind in said if kind.startswith("rollout") and kind != "rollout_held"]


@pytest.mark.parametrize("share", [50, 100])
def test_its_keys_go_round_it_once_it_is_away_for_long_and_come_back_when_it_stands(share: int) -> None:
    cluster = Reloading(share)
    before = cluster.chosen()
    cluster.end_engine()
    assert cluster.lives(ENGINE_AWAY_MS - 500) == [], "most engines are back by then"
    assert cluster.chosen() == before
    assert cluster.lives(1_000) == ["rollout_bypassed"]
    assert set(cluster.chosen().values()) == {"stable"}
    [said] = decisions(cluster.commands, "rollout_bypassed")
    assert f"the engine of {cluster.victim}/cpu0 ended 10 s ago and loads again" in said.reason
    assert cluster.canary().down is not None, "its replica keeps its place and its partitions"
    assert status_rows(cluster.machine.state)[0]["replicas"] == "0/1"
    cluster.lives(20_000)
    cluster.make_ready(UNIT)
    assert cluster.lives(ENGINE_AWAY_MS - 500) == [], "not before it is known to stand"
    assert cluster.lives(1_000) == ["rollout_back"]
    assert cluster.chosen() == before


def test_an_engine_that_is_back_in_seconds_is_waited_for() -> None:
    cluster = Reloading(50)
    before = cluster.chosen()
    for _ in range(5):
        cluster.end_engine()
        assert cluster.lives(4_000) == []
        cluster.make_ready(UNIT)
        assert cluster.lives(26_000) == []
    assert cluster.chosen() == before


def test_a_request_that_kills_it_again_and_again_carries_no_keys_to_and_fro() -> None:
    """It is among what its own topic still holds, so it is there each time the engine is back."""
    cluster = Reloading(100)
    cluster.end_engine()
    said = cluster.lives(ENGINE_AWAY_MS + 30_000)
    for _ in range(4):
        cluster.make_ready(UNIT)
        said += cluster.lives(ENGINE_AWAY_MS // 2)
        cluster.end_engine()
        said += cluster.lives(40_000)
    assert said == ["rollout_bypassed"]
    assert cluster.shares() == {"stable": SHARES, "canary": 0}


def test_an_engine_that_ends_while_it_loads_is_away_since_the_first_end() -> None:
    cluster = Reloading(100)
    said: list[str] = []
    for _ in range(3):
        cluster.end_engine()
        said += cluster.lives(4_000)
    assert said == ["rollout_bypassed"]


def test_with_both_engines_away_nothing_moves() -> None:
    cluster = Reloading(50)
    cluster.end_engine()
    cluster.end_engine("churn")
    assert cluster.lives(3 * ENGINE_AWAY_MS) == []
    assert not cluster.model().rollouts["canary"].bypassed
    cluster.make_ready()
    assert cluster.model().rollouts["canary"].bypassed, "the stable one is back, so it answers"


def test_keys_come_back_at_once_when_nobody_else_answers_them() -> None:
    cluster = Reloading(50)
    cluster.end_engine()
    cluster.lives(ENGINE_AWAY_MS + 500)
    cluster.end_engine("churn")
    cluster.lives(ENGINE_AWAY_MS + 500)
    assert cluster.model().rollouts["canary"].bypassed
    cluster.make_ready(UNIT)
    assert "rollout_back" in cluster.rollout_decisions()
    assert not cluster.model().rollouts["canary"].bypassed


def test_a_step_that_needs_an_engine_that_is_away_says_so() -> None:
    plan = Plan((5_000, 10_000), hold_ms=0, samples_min=0)
    rollout = RolloutState(
        "r-1",
        "canary",
        "2.0.0",
        "1.0.0",
        Raw(b"{}"),
        Raw(b"{}"),
        plan,
        0,
        phase="serving",
        step=0,
        share=5_000,
        windows=1,
    )
    away = "the engine of w1/cpu0 ended 12 s ago and loads again"
    after, said = advance(rollout, Seen(ready=1, wanted=2, given_up=False, away=away), 10)
    assert after.holding == f"the next step needs 2 replicas, 1 is ready: {away}"
    assert said is not None
    assert said.kind == "rollout_held"


def test_one_that_never_comes_back_is_given_up_and_rolled_back() -> None:
    cluster = Reloading(50)
    cluster.end_engine()
    said: list[str] = []
    for _ in range(8):
        said += cluster.lives(cluster.settings.load_timeout_ms)
    assert said == ["rollout_bypassed", "rollout_rolled_back"]
    assert cluster.model().rollout_history[-1].why.startswith("Its replicas were given up")
    assert cluster.shares() == {"stable": SHARES}
