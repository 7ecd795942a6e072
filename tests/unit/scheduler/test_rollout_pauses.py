"""A rollout whose traffic is sparse holds and goes on all the time: that is told now and then, not each time."""

from __future__ import annotations

from scheduler.rollout import STATS_LOST_MS, TOLD_AGAIN_MS
from sie_stream.rollout_records import VariantWindow
from tests.unit.scheduler.rolling import ALIVE, QUICK, UNIT, WINDOW_MS, Rolling, answered

PAUSE_MS = STATS_LOST_MS + 8_000


def rolling(**rollout: object) -> Rolling:
    cluster = Rolling()
    cluster.roll(rollout={**QUICK, **rollout})
    cluster.make_ready(UNIT)
    return cluster


def sparse(cluster: Rolling, pauses: int) -> list[str]:
    """Answers, then none for longer than statistics may be missing. The kinds of decisions meanwhile."""
    before = len(cluster.rollout_decisions())
    for _ in range(pauses):
        cluster.windows(1)
        cluster.wait(PAUSE_MS, ALIVE)
    return cluster.rollout_decisions()[before:]


def test_sparse_traffic_writes_one_pair_of_decisions_and_not_one_for_each_pause() -> None:
    cluster = rolling(samples_min=10_000)
    assert sparse(cluster, 10) == ["rollout_held", "rollout_goes_on"]
    held = cluster.model().rollouts["canary"]
    assert held.holding.startswith("no statistics"), "what it waits for now is in its state, and so in its row"


def test_it_is_told_again_after_a_long_time_while_it_pauses_still() -> None:
    cluster = rolling(samples_min=10_000)
    pauses = TOLD_AGAIN_MS // (PAUSE_MS + WINDOW_MS) + 2
    told = sparse(cluster, pauses)
    assert told.count("rollout_held") == 2
    cluster.wait(TOLD_AGAIN_MS + PAUSE_MS, ALIVE)
    assert cluster.rollout_decisions()[-len(told) :].count("rollout_held") == 2, "one long pause is told once"


def test_a_pause_that_began_silently_is_told_when_it_does_not_end() -> None:
    cluster = rolling(samples_min=10_000)
    assert sparse(cluster, 3)[-1] == "rollout_goes_on", "the pause that is on now was not told"
    cluster.wait(TOLD_AGAIN_MS, ALIVE)
    assert cluster.rollout_decisions()[-1] == "rollout_held"
    assert "rollout_goes_on" in cluster.windows(1), "and so its end is told, too"


def test_a_new_version_that_answers_now_and_then_is_told_as_silent_once() -> None:
    """Between its answers it is silent; with each of them its gates are unsure, which is not told at all."""
    cluster = rolling(samples_min=1)
    told = len(cluster.rollout_decisions())
    for _ in range(8):
        cluster.windows(1, new=answered(1))
        stable_only(cluster, PAUSE_MS // WINDOW_MS)
    assert cluster.rollout_decisions()[told:].count("rollout_held") <= 1


def stable_only(cluster: Rolling, windows: int) -> None:
    for _ in range(windows):
        start_ms = cluster.now_ms
        cluster.wait(WINDOW_MS, ALIVE)
        cluster.append(VariantWindow("churn", "stable", "1.0.0", start_ms, cluster.now_ms, True, answered(40)))
