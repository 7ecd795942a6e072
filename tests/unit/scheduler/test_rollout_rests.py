"""What is left in the topic of a variant that ended while it had no replica: it is answered, or said to wait."""

from __future__ import annotations

import pytest

from scheduler.limits import DELETE_GIVE_UP_MS, DELETE_LINGER_MS
from scheduler.rollout_rests import has_no_place
from scheduler.state import from_bytes, to_bytes
from sie_stream.auditing.failures import failures_of
from sie_stream.commands import RolloutOrder
from sie_stream.control import DeleteModel, PlacementRow
from sie_stream.rollout_records import RoutesHeld
from sie_stream.routing import SHARES
from tests.unit.scheduler.kit import Cluster, decisions, joined, spec_json
from tests.unit.scheduler.rolling import QUICK, UNIT, answered
from tests.unit.scheduler.test_rollout_bypass import Lone

ABORT = RolloutOrder("churn", "abort", actor="ada")


class Left(Lone):
    """The worker of the new version is lost for good; nobody else has room for what it needs."""

    def __init__(self, stable_mb: int = 100, canary_mb: int = 100, home_mb: int = 150, **rollout: object) -> None:
        Cluster.__init__(self)
        self.lead()
        self.alive = [("w0", "i0"), ("w1", "i0")]
        self.append(RoutesHeld("ingress-0"))
        self.append(joined("w0", "i0", memory_mb=home_mb))
        self.apply(spec_json(memory_mb=stable_mb))
        self.make_ready()
        self.append(joined("w1", "i0", memory_mb=canary_mb))
        self.roll(rollout={**QUICK, "steps": [50, 100], "hold_ms": 20_000, **rollout}, memory_mb=canary_mb)
        self.make_ready(UNIT)
        assert self.model(UNIT).replicas[0].worker == "w1"
        self.victim = "w1"

    def passes(self, ms: int) -> list[str]:
        return [one.kind for one in decisions(self.wait(ms, tuple(self.alive)))]

    def work_off(self) -> None:
        self.make_ready(UNIT)
        assert {one.state for one in self.row("placements", UNIT, PlacementRow).partitions} == {"draining"}
        self.drain_unit(UNIT)
        assert UNIT not in self.machine.state.models
        assert decisions(self.commands, "model_deleted")[-1].chosen["partitions_left"] == "none"


def test_the_stable_version_works_it_off_where_it_alone_has_a_place() -> None:
    cluster = Left(stable_mb=40, canary_mb=100, home_mb=100)
    cluster.lose("w1")
    cluster.append(ABORT)
    assert cluster.shares() == {"stable": SHARES}
    unit = cluster.model(UNIT)
    assert (unit.version, [one.worker for one in unit.replicas]) == ("1.0.0", ["w0"])
    cluster.passes(DELETE_LINGER_MS + 500)
    cluster.work_off()


def test_rolled_back_by_a_gate_it_is_worked_off_as_well() -> None:
    cluster = Left(stable_mb=40, canary_mb=100, home_mb=100)
    cluster.tell(answered(200))
    cluster.lose("w1")
    cluster.tell(answered(80, failed=80))
    assert cluster.model().rollout_history[-1].ending == "rolled_back"
    cluster.passes(DELETE_LINGER_MS + 500)
    cluster.work_off()


def test_without_any_place_it_waits_without_end_and_that_is_said_once() -> None:
    cluster = Left()
    cluster.lose("w1")
    [aborted] = decisions(cluster.append(ABORT), "rollout_aborted")
    assert "It has no replica: what is left in sie.work.churn.CANARY is worked off by the first" in aborted.reason
    cluster.passes(DELETE_GIVE_UP_MS + 60_000)
    [said] = decisions(cluster.commands, "rollout_rest_waits")
    assert said.subject == "churn"
    assert "No device can hold a replica of 1.0.0" in said.reason
    assert "`sie-stream rollout status churn` counts it" in said.reason
    assert "w0/cpu0" in " ".join(said.rejected)
    assert not decisions(cluster.commands, "model_deleted"), "nobody deleted it, and it is not forgotten"
    assert from_bytes(to_bytes(cluster.machine.state)) == cluster.machine.state
    cluster.join("w2")
    cluster.passes(500)
    cluster.work_off()


def test_its_own_worker_that_comes_back_works_it_off() -> None:
    cluster = Left()
    cluster.lose("w1")
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + 500)
    cluster.join("w1")
    cluster.passes(500)
    cluster.work_off()


def test_it_is_in_the_chain_of_the_failure() -> None:
    cluster = Left()
    cluster.lose("w1")
    cluster.append(ABORT)
    cluster.passes(1_000)
    [chain] = [one.chain for one in failures_of(decisions(cluster.commands)) if one.root.kind == "worker_lost"]
    assert "rollout_rest_waits" in [one.kind for one in chain]


@pytest.mark.parametrize("later_ms", [0, DELETE_GIVE_UP_MS])
def test_with_its_model_deleted_it_waits_no_longer_than_a_deleted_model(later_ms: int) -> None:
    cluster = Left()
    cluster.lose("w1")
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + later_ms)
    cluster.append(DeleteModel("churn"))
    cluster.passes(DELETE_GIVE_UP_MS - 1_000)
    assert UNIT in cluster.machine.state.models
    cluster.passes(DELETE_LINGER_MS + 60_000)
    assert UNIT not in cluster.machine.state.models
    [said] = [one for one in decisions(cluster.commands, "model_deleted") if one.subject == UNIT]
    assert "until a rollout with variant canary has a replica again" in said.reason
    assert said.chosen["partitions_left"] != "none"


def test_a_rollout_anew_that_never_serves_forgets_nothing_of_the_one_before() -> None:
    cluster = Left()
    cluster.lose("w1")
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + 500)
    cluster.roll(version="3.0.0", rollout=QUICK)
    assert cluster.model().rollouts["canary"].phase == "loading"
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + 500)
    assert has_no_place(cluster.model(UNIT)), "its partitions count as worked off only when somebody did that"


def test_what_never_had_traffic_waits_for_nobody() -> None:
    cluster = Left()
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + 500)
    cluster.drain_unit(UNIT)
    cluster.lose("w1")
    cluster.roll(version="3.0.0", rollout=QUICK)
    cluster.append(ABORT)
    cluster.passes(DELETE_LINGER_MS + 1_000)
    assert UNIT not in cluster.machine.state.models
    assert not decisions(cluster.commands, "rollout_rest_waits")
