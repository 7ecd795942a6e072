"""From the declaration to the first answer: every step with its time, and the decision that tells the story."""

from __future__ import annotations

from scheduler.life import life_of, life_words
from sie_stream.control import InstanceRow, ReplicaAnswered, ReplicaReady
from tests.unit.scheduler.kit import Cluster, decisions, joined, kinds, spec_json


def loading() -> Cluster:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json())
    return cluster


def ready(cluster: Cluster, *, waited_ms: int, engine_start_ms: int, load_ms: int, warmup_ms: int) -> None:
    replica = cluster.model().replicas[0]
    cluster.now_ms += waited_ms + engine_start_ms + load_ms + warmup_ms
    cluster.append(
        ReplicaReady(
            *("w0", "a", "churn", "1.0.0", replica.placement_epoch, replica.memory_bytes, load_ms, warmup_ms),
            waited_ms=waited_ms,
            engine_start_ms=engine_start_ms,
        )
    )


def answer(cluster: Cluster) -> list[str]:
    epoch = cluster.model().replicas[0].placement_epoch
    return kinds(cluster.append(ReplicaAnswered("w0", "a", "churn", "1.0.0", epoch)))


def test_the_first_answer_tells_what_took_how_long() -> None:
    cluster = loading()
    ready(cluster, waited_ms=30, engine_start_ms=700, load_ms=100, warmup_ms=20)
    cluster.now_ms += 40
    epoch = cluster.model().replicas[0].placement_epoch
    [told] = decisions(cluster.append(ReplicaAnswered("w0", "a", "churn", "1.0.0", epoch)), "first_answer")
    timings_ms = cluster.row("instances", cluster.model().instance, InstanceRow).timings_ms
    took = {step.step: step.took_ms for step in life_of(timings_ms)}
    assert took["load_started"] == 700
    assert took["loaded"] == 100
    assert took["ready"] == 20
    assert took["first_answer"] == 40
    assert sum(took.values()) == told.took_ms == timings_ms["first_answer"] - timings_ms["applied"]
    assert life_words(timings_ms) in told.reason


def test_it_is_told_once_for_a_version_and_again_for_the_next() -> None:
    cluster = loading()
    ready(cluster, waited_ms=0, engine_start_ms=0, load_ms=1, warmup_ms=1)
    assert answer(cluster) == ["first_answer"]
    assert answer(cluster) == []
    cluster.apply(spec_json(version="2.0.0"))
    assert "first_answer" not in cluster.model().timings_ms


def test_a_report_of_a_replica_that_is_gone_or_lies_about_time_does_no_harm() -> None:
    cluster = loading()
    ignored = cluster.machine.state.facts_ignored
    cluster.append(ReplicaAnswered("w0", "of before", "churn", "1.0.0", 1))
    cluster.append(ReplicaAnswered("w0", "a", "nobody", "1.0.0", 1))
    assert cluster.machine.state.facts_ignored == ignored + 2
    replica = cluster.model().replicas[0]
    cluster.append(
        ReplicaReady("w0", "a", "churn", "1.0.0", replica.placement_epoch, 1, -5, 1 << 60, engine_start_ms=-1)
    )
    times = [step.after_ms for step in life_of(cluster.model().timings_ms)]
    assert times == sorted(times)
    assert times[0] == 0
