"""A new version whose only replica is lost: ready replicas of the stable version answer its keys meanwhile."""

from __future__ import annotations

import pytest
from msgspec import Raw, structs

from scheduler.rollout_bypass import bypass
from scheduler.rollout_seen import Seen
from scheduler.state import from_bytes, to_bytes
from sie_stream.cli.rollout_view import status_rows
from sie_stream.commands import RolloutOrder, StartRollout
from sie_stream.control import EnsureTopic, ReplicaFailed, TopicEnsured
from sie_stream.rollout_records import RoutesHeld, VariantStats, VariantWindow
from sie_stream.routing import SHARES, choose_variant
from tests.unit.scheduler.kit import Cluster, decisions, joined, spec_json
from tests.unit.scheduler.rolling import QUICK, UNIT, WINDOW_MS, Rolling, answered

KEYS = [b"key%d" % number for number in range(500)]


class Lone(Rolling):
    """One replica of each version, each on a worker that has no room for another; the new one has `share` percent."""

    def __init__(self, share: int, workers: int = 2, **rollout: object) -> None:
        Cluster.__init__(self)
        self.lead()
        self.alive = [(f"w{number}", "i0") for number in range(workers)]
        for worker, incarnation in self.alive:
            self.append(joined(worker, incarnation, memory_mb=150))
        self.append(RoutesHeld("ingress-0"))
        self.apply(spec_json())
        self.make_ready()
        self.roll(rollout={**QUICK, "steps": sorted({share, 100}), "hold_ms": 20_000, **rollout})
        self.make_ready(UNIT)
        self.victim = self.model(UNIT).replicas[0].worker

    def lose(self, worker: str) -> list[str]:
        """It says nothing any more. Returns the kinds of decisions about the rollout that follow."""
        self.alive = [one for one in self.alive if one[0] != worker]
        commands = self.wait(4_000, tuple(self.alive))
        self.fence(commands)
        return [one.kind for one in decisions(commands) if one.kind.startswith("rollout")]

    def join(self, worker: str) -> None:
        self.append(joined(worker, "i1", memory_mb=150))
        self.alive.append((worker, "i1"))

    def tell(self, new: VariantStats) -> None:
        """One window of each version, while those that are there live."""
        start_ms = self.now_ms
        self.wait(WINDOW_MS, tuple(self.alive))
        for variant, version, stats in (("stable", "1.0.0", answered(400)), ("canary", "2.0.0", new)):
            self.append(VariantWindow("churn", variant, version, start_ms, self.now_ms, True, stats))

    def compare(self, variant: str, version: str) -> None:
        """One more version at a fixed share."""
        for command in self.append(StartRollout(Raw(spec_json(version=version)), variant, 2_000, "ada")):
            if isinstance(command, EnsureTopic):
                self.append(TopicEnsured(command.model, command.topic, command.partitions))
        self.make_ready(f"churn.{variant.upper()}")

    def chosen(self) -> dict[bytes, str]:
        return {key: choose_variant(self.route.variants, key, b"churn").variant for key in KEYS}


@pytest.mark.parametrize("share", [10, 50, 100])
def test_its_keys_go_to_ready_replicas_of_the_stable_version_and_come_back(share: int) -> None:
    cluster = Lone(share)
    before = cluster.chosen()
    assert "canary" in before.values()
    assert cluster.lose(cluster.victim) == ["rollout_bypassed"], "said once"
    assert cluster.shares() == {"stable": SHARES, "canary": 0}
    assert set(cluster.chosen().values()) == {"stable"}
    [said] = decisions(cluster.commands, "rollout_bypassed")
    assert f"its {share} % of the keys go to 1.0.0 (1 ready)" in said.reason
    [row] = status_rows(cluster.machine.state)
    assert "no replica of 2.0.0 is ready" in row["note"]
    assert from_bytes(to_bytes(cluster.machine.state)) is not None
    cluster.join(cluster.victim)
    cluster.wait(500, tuple(cluster.alive))
    assert set(cluster.chosen().values()) == {"stable"}, "not before it is ready"
    cluster.make_ready(UNIT)
    assert cluster.chosen() == before, "the same keys"
    rollout = cluster.model().rollouts["canary"]
    assert (rollout.since_ms, rollout.holding, rollout.share) == (cluster.now_ms, "", share * 100), "held anew"
    assert cluster.rollout_decisions()[-2:] == ["rollout_bypassed", "rollout_back"]


def test_it_is_not_promoted_meanwhile_and_a_breach_still_takes_it_back() -> None:
    cluster = Lone(50)
    cluster.tell(answered(200))
    cluster.lose(cluster.victim)
    for _ in range(15):
        cluster.tell(answered(200))
    assert cluster.model().rollouts["canary"].share == 5_000
    assert cluster.model().rollouts["canary"].bypassed
    cluster.tell(answered(80, failed=80))
    assert cluster.model().rollout_history[-1].ending == "rolled_back"
    assert cluster.shares() == {"stable": SHARES}


def test_with_nobody_to_answer_for_it_its_keys_wait_for_it() -> None:
    cluster = Lone(50)
    stable = cluster.model().replicas[0].worker
    cluster.alive = []
    commands = cluster.wait(4_000)
    assert "rollout_bypassed" not in [one.kind for one in decisions(commands)], stable
    assert cluster.shares() == {"stable": 5_000, "canary": 5_000}


def test_fewer_replicas_than_its_share_needs_are_better_than_none() -> None:
    """It waits for all that it needs, unless those that answer meanwhile die as well."""
    cluster = Lone(50)
    cluster.lose(cluster.victim)
    rollout = cluster.model().rollouts["canary"]
    fewer = Seen(ready=1, wanted=2, given_up=False, stable_ready=1)
    assert bypass(rollout, fewer, cluster.now_ms) is None
    back = bypass(rollout, structs.replace(fewer, stable_ready=0), cluster.now_ms)
    assert back is not None
    assert not back[0].bypassed


def test_while_the_model_takes_it_over_the_old_replicas_answer() -> None:
    cluster = Lone(100, workers=3, hold_ms=2_000)
    while cluster.model().rollouts["canary"].phase == "serving":
        cluster.tell(answered(100))
    assert cluster.model().rollouts["canary"].phase == "adopting"
    assert cluster.lose(cluster.victim) == ["rollout_bypassed"]
    assert cluster.shares() == {"stable": SHARES, "canary": 0}
    assert cluster.route.variants[0].version == "1.0.0", "these are who answers"
    cluster.make_ready()
    cluster.release()
    cluster.wait(500, tuple(cluster.alive))
    assert cluster.shares() == {"stable": SHARES}
    assert cluster.route.variants[0].version == "2.0.0"
    assert cluster.model().rollout_history[-1].ending == "completed"


def test_a_paused_one_is_bypassed_as_well_and_nobody_promotes_it() -> None:
    cluster = Lone(50)
    cluster.append(RolloutOrder("churn", "pause", actor="ada"))
    assert cluster.lose(cluster.victim) == ["rollout_bypassed"]
    [said] = decisions(cluster.append(RolloutOrder("churn", "promote", actor="ada")), "rollout_ignored")
    assert "2.0.0 lost its replicas" in said.reason
    cluster.append(RolloutOrder("churn", "abort", actor="ada"))
    assert cluster.shares() == {"stable": SHARES}


def test_a_replica_that_fails_is_bypassed_until_it_is_given_up() -> None:
    cluster = Lone(50)
    for number in range(5):
        for replica in list(cluster.model(UNIT).replicas):
            cluster.append(
                ReplicaFailed(replica.worker, "i0", UNIT, "2.0.0", replica.placement_epoch, "engine_died", "SIGSEGV")
            )
        cluster.wait(10_000, tuple(cluster.alive))
        assert cluster.shares()["stable"] == SHARES, number
    assert cluster.rollout_decisions()[-2:] == ["rollout_bypassed", "rollout_rolled_back"]


def test_other_variants_keep_their_keys() -> None:
    cluster = Lone(50, workers=3)
    cluster.append(RolloutOrder("churn", "abort", actor="ada"))
    cluster.wait(6_000, tuple(cluster.alive))
    cluster.drain_unit(UNIT)
    for variant, version in (("b", "3.0.0"), ("c", "4.0.0")):
        cluster.compare(variant, version)
    before = cluster.chosen()
    [victim] = cluster.model("churn.B").replicas
    cluster.lose(victim.worker)
    now = cluster.chosen()
    assert {key: "stable" if name == "b" else name for key, name in before.items()} == now


def test_content_rules_send_nobody_there_and_those_for_the_stable_version_hold() -> None:
    pins = [{"by": "tenant", "equals": "beta"}, {"by": "tenant", "equals": "old", "to": "stable"}]
    cluster = Lone(50, pins=pins)
    before = cluster.route.rules
    assert [rule.equals for rule in before] == ["beta", "old"]
    cluster.lose(cluster.victim)
    assert [rule.equals for rule in cluster.route.rules] == ["old"]
    cluster.join(cluster.victim)
    cluster.wait(500, tuple(cluster.alive))
    cluster.make_ready(UNIT)
    assert cluster.route.rules == before
