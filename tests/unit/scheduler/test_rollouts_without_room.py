"""A new version of a model that has not the replicas it wants, because there is no room for more."""

from __future__ import annotations

from sie_stream.cli.rollout_view import status_rows
from sie_stream.rollout_records import RoutesHeld
from sie_stream.routing import SHARES
from tests.unit.scheduler.kit import MIB, Cluster, decisions, joined, spec_json
from tests.unit.scheduler.rolling import ALIVE, UNIT, Rolling

THREE = {"min": 3, "max": 3}


class Cramped(Rolling):
    """Three replicas are wanted on two workers, so two are there."""

    def __init__(self, memory_mb: int) -> None:
        Cluster.__init__(self)
        self.lead()
        for worker, incarnation in ALIVE:
            self.append(joined(worker, incarnation, memory_mb=memory_mb))
        self.append(RoutesHeld("ingress-0"))
        self.apply(spec_json(replicas=THREE))
        self.make_ready()
        assert len(self.model().replicas) == 2
        assert self.model().unplaced


def test_a_new_version_needs_no_more_replicas_than_the_stable_one_was_given() -> None:
    cluster = Cramped(memory_mb=500)
    cluster.roll(replicas=THREE)
    for _ in range(12):
        cluster.make_ready(UNIT)
        cluster.windows()
    cluster.make_ready()
    cluster.release()
    cluster.wait(1_000, ALIVE)
    assert [one.ending for one in cluster.model().rollout_history] == ["completed"]
    assert cluster.model().version == "2.0.0"


def test_one_that_lacks_no_room_still_needs_all_that_are_wanted() -> None:
    cluster = Rolling()
    cluster.model().replicas_wanted = 2
    cluster.wait(500, ALIVE)
    cluster.make_ready()
    cluster.roll(replicas={"min": 2, "max": 2})
    cluster.make_ready(UNIT)
    cluster.windows(12)
    rollout = cluster.model().rollouts["canary"]
    assert rollout.share == 5_000
    assert rollout.holding == "the next step needs 2 replicas, 1 is ready"


def test_that_it_has_no_place_is_told_once_and_it_starts_when_there_is_one() -> None:
    cluster = Cramped(memory_mb=150)
    cluster.roll(replicas=THREE)
    cluster.wait(20_000, ALIVE)
    [held] = decisions(cluster.commands, "rollout_held")
    assert held.subject == "churn"
    assert f"0 are ready: w0/cpu0, w1/cpu0: needs {100 * MIB} bytes" in held.reason
    assert not held.reason.endswith("..")
    [row] = status_rows(cluster.machine.state)
    assert (row["phase"], row["replicas"]) == ("loading", "0/1")
    assert "needs" in row["note"]
    assert cluster.shares() == {"stable": SHARES}
    cluster.append(joined("w2", "i0", memory_mb=150))
    assert [replica.worker for replica in cluster.model(UNIT).replicas] == ["w2"], "a first replica before a third one"
    cluster.make_ready(UNIT)
    assert cluster.shares()["canary"] == 1_000
    assert cluster.model().rollouts["canary"].holding == ""


def test_replicas_of_a_cramped_model_s_new_version_are_placed_as_busy_ones() -> None:
    cluster = Rolling()
    cluster.model().cramped_until_ms = cluster.now_ms + 60_000
    cluster.roll()
    assert cluster.model(UNIT).cramped_until_ms == cluster.model().cramped_until_ms
