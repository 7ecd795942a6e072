"""Versions that are only compared: what stops them, what is told of them, and how they end."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Raw

from scheduler.rollout import RolloutState
from sie_stream.commands import RolloutOrder, StartRollout
from sie_stream.control import EnsureTopic, TopicEnsured
from sie_stream.decisions import Decision
from sie_stream.rollout_records import VariantStats
from tests.unit.scheduler.kit import decisions, spec_json
from tests.unit.scheduler.rolling import QUICK, Rolling, answered

OTHER_SCORES = answered(200, score=0.9)


def start(cluster: Rolling, version: str = "2.0.0", variant: str = "b", **rollout: Any) -> Decision:
    """Compare a version at 20 % of the keys; what was said of its start."""
    command = StartRollout(Raw(spec_json(version=version, rollout={**QUICK, **rollout})), variant, 2_000, "ada")
    commands = cluster.append(command)
    for one in commands:
        if isinstance(one, EnsureTopic):
            cluster.append(TopicEnsured(one.model, one.topic, one.partitions))
    cluster.make_ready(f"churn.{variant.upper()}")
    return decisions(commands, "rollout_started")[0]


def under_way(cluster: Rolling, variant: str = "b") -> RolloutState:
    return cluster.model().rollouts[variant]


def test_scores_of_a_compared_version_may_differ_and_that_is_told_once() -> None:
    cluster = Rolling()
    started = start(cluster)
    assert "how far its scores drift (KS and PSI) is told, and stops nothing" in started.reason
    said = cluster.windows(8, new=OTHER_SCORES)
    assert said.count("rollout_differs") == 1
    assert cluster.shares() == {"stable": 8_000, "b": 2_000}
    verdicts = {gate.gate: gate.verdict for gate in under_way(cluster).gates}
    assert (verdicts["ks:score"], verdicts["psi:score"], verdicts["error_rate"]) == ("differs", "differs", "pass")
    [told] = decisions(cluster.commands, "rollout_differs")
    assert told.reason.startswith("Its answers are not those of 1.0.0: ks:score 1 (allowed 0.1;")


@pytest.mark.parametrize(
    ("stats", "gate"),
    [
        (answered(80, failed=20), "error_rate"),
        (answered(200, ms=80.0), "p99_vs_stable_ms"),
        (answered(150, failed=50, violations=50), "schema_violations"),
    ],
)
def test_errors_slowness_and_wrong_forms_stop_a_compared_version(stats: VariantStats, gate: str) -> None:
    cluster = Rolling()
    start(cluster)
    assert "rollout_rolled_back" in cluster.windows(12, new=stats)
    assert gate in cluster.model().rollout_history[-1].why


@pytest.mark.parametrize("gates", [{"ks_max": 0.1}, {"psi_max": 0.2}])
def test_a_drift_gate_that_is_declared_stops_a_compared_version(gates: dict[str, float]) -> None:
    """Also one that says what the default of a version that takes over is."""
    cluster = Rolling()
    start(cluster, gates=gates)
    assert "rollout_rolled_back" in cluster.windows(2, new=OTHER_SCORES)


def test_a_compared_shadow_that_differs_gets_its_share() -> None:
    cluster = Rolling()
    start(cluster, shadow=True)
    cluster.windows(3, new=OTHER_SCORES)
    assert cluster.shares() == {"stable": 8_000, "b": 2_000}
    steps = [one for one in cluster.rollout_decisions() if one != "rollout_differs"]
    assert steps == ["rollout_started", "rollout_shadowing", "rollout_step"]
    [step] = decisions(cluster.commands, "rollout_step")
    assert " > 0.1" in step.reason, "it does not say that they were within their limit"


def test_a_version_that_takes_over_is_stopped_by_drift_as_ever() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready("churn.CANARY")
    assert "rollout_rolled_back" in cluster.windows(2, new=OTHER_SCORES)


def test_one_of_two_that_differ_is_promoted_to_its_end() -> None:
    cluster = Rolling()
    start(cluster)
    start(cluster, "3.0.0", "c")
    cluster.windows(2, new=OTHER_SCORES)
    cluster.append(RolloutOrder("churn", "abort", "c", "ada"))
    cluster.append(RolloutOrder("churn", "promote", "b", "ada"))
    assert under_way(cluster).phase == "adopting"
    assert "rollout_rolled_back" not in cluster.windows(2, new=OTHER_SCORES)
    cluster.make_ready()
    cluster.release()
    cluster.windows(1, new=OTHER_SCORES)
    assert [(one.version, one.ending) for one in cluster.model().rollout_history] == [
        ("3.0.0", "aborted"),
        ("2.0.0", "completed"),
    ]


def test_what_cannot_be_is_told_in_the_words_of_the_command_line() -> None:
    cluster = Rolling()
    start(cluster)
    [refused] = decisions(cluster.append(StartRollout(Raw(spec_json(version="4.0.0")), "d", 9_000, "ada")))
    assert refused.reason == "--share 90: at most 80 % of the keys are left to give."
    [unknown] = decisions(cluster.append(RolloutOrder("churn", "pause", actor="ada")))
    assert unknown.reason == "No rollout of variant 'canary' is under way; these are: b (--variant b)."
    cluster.append(RolloutOrder("churn", "abort", "b", "ada"))
    [none] = decisions(cluster.append(RolloutOrder("churn", "pause", actor="ada")))
    assert none.reason == "No rollout of variant 'canary' is under way."
