"""Rollouts that ended: which of them an undo takes back, and what is remembered of deleted models."""

from __future__ import annotations

from scheduler.rollout_back import standing
from scheduler.rollout_past import GONE_KEPT, past_of, remember
from scheduler.state import ROLLOUTS_KEPT, ClusterState, from_bytes, to_bytes
from sie_stream.cli.rollout_follow import ends_of, under_way
from sie_stream.cli.rollout_view import history_rows
from sie_stream.commands import RolloutOrder
from sie_stream.control import DeleteModel
from tests.unit.scheduler.kit import spec_json
from tests.unit.scheduler.rolling import ALIVE, UNIT, Rolling


def promoted(cluster: Rolling, version: str) -> None:
    """The version takes all keys over, and the model itself."""
    cluster.roll(version)
    cluster.make_ready(UNIT)
    cluster.append(RolloutOrder("churn", "promote", actor="ada"))
    settled(cluster)
    assert cluster.model().version == version
    assert cluster.model().rollout_history[-1].ending == "completed"


def settled(cluster: Rolling) -> None:
    cluster.make_ready()
    cluster.release()
    cluster.wait(6_000, ALIVE)
    drained(cluster)
    cluster.wait(500, ALIVE)


def drained(cluster: Rolling) -> None:
    if UNIT in cluster.machine.state.models:
        cluster.drain_unit(UNIT)


def undone(cluster: Rolling) -> str:
    """The version after one more undo."""
    cluster.append(RolloutOrder("churn", "undo", actor="ada"))
    settled(cluster)
    return cluster.model().version


def test_each_undo_goes_one_version_further_back() -> None:
    cluster = Rolling()
    promoted(cluster, "2.0.0")
    promoted(cluster, "3.0.0")
    promoted(cluster, "2.0.0")
    assert [undone(cluster) for _ in range(3)] == ["3.0.0", "2.0.0", "1.0.0"], "no rollout is taken back twice"
    cluster.append(RolloutOrder("churn", "undo", actor="ada"))
    assert cluster.rollout_decisions()[-1] == "rollout_ignored"
    promoted(cluster, "2.0.0")
    assert undone(cluster) == "1.0.0", "what came again may be taken back again"


def test_an_undo_whose_rollout_is_forgotten_takes_back_nothing() -> None:
    cluster = Rolling()
    promoted(cluster, "2.0.0")
    undone(cluster)
    history = cluster.model().rollout_history
    assert standing(history) == []
    assert standing(history[1:]) == []


def deleted(cluster: Rolling) -> None:
    cluster.append(DeleteModel("churn", actor="ada"))
    cluster.wait(6_000, ALIVE)
    cluster.drain()
    cluster.wait(6_000, ALIVE)
    drained(cluster)
    assert "churn" not in cluster.machine.state.models


def test_rollouts_of_a_deleted_model_are_remembered() -> None:
    cluster = Rolling()
    promoted(cluster, "2.0.0")
    cluster.roll("3.0.0")
    cluster.make_ready(UNIT)
    watched = under_way(cluster.machine.state)
    deleted(cluster)
    state = from_bytes(to_bytes(cluster.machine.state))
    assert state is not None
    seen = [(one["version"], one["ending"], one["why"]) for one in history_rows(state, "churn")]
    assert [one[:2] for one in seen] == [("2.0.0", "completed"), ("3.0.0", "aborted")]
    assert seen[1][2] == "The model was deleted."
    assert [str(one) for one in ends_of(state, watched)] == ["churn  2.0.0 -> 3.0.0  aborted: The model was deleted."]
    assert b"input_schema" not in bytes(past_of(state, "churn")[0].spec), "nothing can come back, so nothing is kept"


def test_a_model_of_the_same_name_goes_on_with_the_history_and_cannot_undo_it() -> None:
    cluster = Rolling()
    promoted(cluster, "2.0.0")
    deleted(cluster)
    cluster.apply(spec_json(version="2.0.0"))
    cluster.make_ready()
    cluster.append(RolloutOrder("churn", "undo", actor="ada"))
    assert cluster.rollout_decisions()[-1] == "rollout_ignored"
    promoted(cluster, "4.0.0")
    assert [one["version"] for one in history_rows(cluster.machine.state, "churn")] == ["2.0.0", "4.0.0"]
    deleted(cluster)
    assert [one.version for one in past_of(cluster.machine.state, "churn")] == ["2.0.0", "4.0.0"]


def test_what_is_remembered_has_an_end() -> None:
    cluster = Rolling()
    promoted(cluster, "2.0.0")
    model, state = cluster.model(), ClusterState()
    for number in range(GONE_KEPT + 3):
        model.model = f"churn-{number}"
        remember(state, model)
    for _ in range(2 * ROLLOUTS_KEPT):
        model.model = "churn-10"
        remember(state, model)
    assert len(state.gone_rollouts) == GONE_KEPT
    assert list(state.gone_rollouts)[-1] == "churn-10"
    assert len(state.gone_rollouts["churn-10"]) == ROLLOUTS_KEPT
