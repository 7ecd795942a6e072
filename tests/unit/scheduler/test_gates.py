"""Gates: chance is no breach, and a fault is one, whatever the number of samples."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from scheduler.gates import is_sane, judge, ks_distance
from scheduler.latency_gates import LatencyWindow, blocks
from scheduler.verdicts import GateLimits, binomial_tail
from sie_stream.drift import psi_of
from sie_stream.rollout_records import Sketch, VariantStats
from sie_stream.sketch import above, added, bucket_of, quantile, sketch_of, value_of
from tests.examples import rounds

PARTS = 5


def stats(
    seed: int, count: int, *, mean: float = 0.4, spread: float = 0.1, ms: float = 20.0, failed: int = 0
) -> VariantStats:
    chance = random.Random(seed)
    return VariantStats(
        ok=count,
        failed=failed,
        busy_us=count * 100,
        latency=sketch_of(ms * chance.lognormvariate(0, 0.3) for _ in range(count)),
        scores={"score": sketch_of(min(1.0, max(0.0, chance.gauss(mean, spread))) for _ in range(count))},
    )


def verdicts(new: VariantStats, old: VariantStats, limits: GateLimits | None = None) -> dict[str, str]:
    """Of statistics that came in PARTS windows of the same kind."""
    windows = [
        LatencyWindow(part, _part(new.latency, part), _part(old.latency, part)) for part in range(PARTS) if new.latency
    ]
    return {result.gate: result.verdict for result in judge(new, old, limits or GateLimits(), windows)}


def _part(sketch: Sketch, part: int) -> Sketch:
    """Every PARTS-th of the samples."""
    samples = [bucket for bucket, count in sorted(sketch.items()) for _ in range(count)][part::PARTS]
    return dict(sorted(Counter(samples).items()))


@pytest.mark.parametrize("count", [30, 300, 3_000])
def test_the_same_version_is_not_rolled_back(count: int) -> None:
    for seed in range(rounds(40)):
        found = verdicts(stats(seed, count), stats(1_000 + seed, 4 * count))
        assert "breach" not in found.values(), (seed, found)


def test_a_subtle_score_bug_is_drift() -> None:
    found = verdicts(stats(1, 600, mean=0.45), stats(2, 2_400))
    assert found["ks:score"] == "breach"
    assert found["error_rate"] == found["p99_vs_stable_ms"] == "pass"


def test_few_samples_of_a_drift_are_unsure() -> None:
    found = verdicts(stats(1, 12, mean=0.45), stats(2, 2_400))
    assert "breach" not in found.values()


def test_a_slow_path_breaches_p99_though_the_median_is_the_same() -> None:
    slow = VariantStats(ok=500, latency=added(stats(1, 470).latency, sketch_of([200.0] * 30)))
    assert verdicts(slow, stats(2, 2_000))["p99_vs_stable_ms"] == "breach"
    assert quantile(slow.latency, 0.5) == pytest.approx(20.0, rel=0.1)


def test_a_handful_of_answers_of_the_stable_version_is_no_p99_to_compare_with() -> None:
    """It had no keys, and then for a second those of a worker that died: that they were quick says nothing."""
    busy = VariantStats(ok=500, latency=added(stats(1, 470).latency, sketch_of([200.0] * 30)))
    few = VariantStats(ok=3, latency=sketch_of([20.0, 25.0, 30.0]))
    [found] = [
        one
        for one in judge(
            busy, few, GateLimits(), [LatencyWindow(part, _part(busy.latency, part)) for part in range(PARTS)]
        )
        if one.gate == "p99_vs_stable_ms"
    ]
    assert found.verdict == "unsure"
    assert "of the stable version 3 answers are known" in found.detail


def test_one_slow_answer_of_fifty_is_chance() -> None:
    slow = VariantStats(ok=50, latency=added(stats(1, 49).latency, sketch_of([200.0])))
    assert verdicts(slow, stats(2, 2_000))["p99_vs_stable_ms"] == "unsure"


def test_one_stall_is_no_breach_and_a_slow_path_beside_it_is() -> None:
    quick, stalled, slow = sketch_of([20.0] * 200), sketch_of([20.0] * 120 + [900.0] * 80), sketch_of([50.0] * 200)
    old = VariantStats(ok=1_000, latency=sketch_of([20.0] * 1_000))

    def verdict(*news: Sketch) -> str:
        windows = [LatencyWindow(number, new, quick) for number, new in enumerate(news)]
        new = VariantStats(ok=200 * len(news), latency={})
        return {one.gate: one.verdict for one in judge(new, old, GateLimits(), windows)}["p99_vs_stable_ms"]

    assert verdict(quick, stalled, stalled, quick) == "unsure"
    assert verdict(slow, slow) == "unsure", "two windows may be one stall"
    assert verdict(slow, slow, slow) == "breach"
    assert verdict(quick, stalled, slow, slow, slow) == "breach"
    assert verdict(quick, quick, quick) == "pass"


def test_what_slows_the_stable_version_too_is_no_breach() -> None:
    slow = sketch_of([80.0] * 200)
    old = VariantStats(ok=2_000, latency=sketch_of([20.0] * 2_000))
    new = VariantStats(ok=800)
    both = [LatencyWindow(number, slow, slow) for number in range(4)]
    assert [one.verdict for one in judge(new, old, GateLimits(p99_sla_ms=50), both)][2:] == ["pass", "pass"]
    alone = [LatencyWindow(number, slow) for number in range(5)]
    assert judge(new, old, GateLimits(), alone[:4])[2].verdict == "unsure"
    assert judge(new, old, GateLimits(), alone)[2].verdict == "breach"
    assert judge(new, old, GateLimits(), alone, slowest_ms=90.0)[2].verdict == "pass", "it was as slow once"


def test_blocks_join_small_windows() -> None:
    assert blocks([(0, 600), (1, 60), (2, 60), (0, 20)]) == [(0, 600), (3, 140)]
    assert blocks([(1, 2)] * 6) == [(1, 2)] * 6


@pytest.mark.parametrize(("failed", "of", "verdict"), [(0, 200, "pass"), (3, 200, "unsure"), (12, 200, "breach")])
def test_error_rate_accounts_for_the_number_of_samples(failed: int, of: int, verdict: str) -> None:
    assert verdicts(stats(1, of - failed, failed=failed), stats(2, 1_000))["error_rate"] == verdict


def test_an_error_rate_that_the_old_version_has_too_is_no_breach() -> None:
    assert verdicts(stats(1, 180, failed=20), stats(2, 900, failed=100))["error_rate"] == "pass"


def test_sla_and_cost() -> None:
    limits = GateLimits(p99_sla_ms=10, cost_ratio_max=1.5)
    assert verdicts(stats(1, 300), VariantStats(), limits)["p99_sla_ms"] == "breach"
    assert verdicts(stats(1, 300, ms=60.0), stats(2, 300), limits)["p99_sla_ms"] == "breach"
    assert verdicts(stats(1, 300), stats(2, 300), limits)["p99_sla_ms"] == "pass", "the old one keeps it neither"
    dear = VariantStats(ok=2_000, busy_us=2_000 * 300, latency=stats(3, 10).latency)
    assert verdicts(dear, stats(2, 2_000), limits)["cost"] == "breach"


def test_labels_are_categories_and_free_text_is_not() -> None:
    old = VariantStats(ok=1_000, labels={"label": {"yes": 500, "no": 500}})
    new = VariantStats(ok=200, labels={"label": {"yes": 180, "no": 20}})
    assert verdicts(new, old)["psi:label"] == "breach"
    texts = VariantStats(ok=20, labels={"label": {f"t{number}": 1 for number in range(20)}})
    assert "psi:label" not in verdicts(texts, old)


def test_binomial_tail_is_exact() -> None:
    assert binomial_tail(2, 2, 0.5) == pytest.approx(0.25)
    assert binomial_tail(3, 10, 0.1) == pytest.approx(0.0701908264, rel=1e-6)
    assert binomial_tail(1, 1_000_000, 0.0) == 0.0


def test_sketches_add_up_and_stay_within_their_error() -> None:
    values = [random.Random(5).uniform(-3, 3) for _ in range(2_000)]
    assert added(sketch_of(values[:700]), sketch_of(values[700:])) == sketch_of(values)
    for value in (1e-12, 0.003, 0.5, 123.4, -77.0):
        assert value_of(bucket_of(value)) == pytest.approx(value, rel=0.026, abs=1e-9)
    assert above(sketch_of([1.0, 2.0, 3.0]), 1.5) == 2
    assert ks_distance({1: 10}, {2: 10}) == 1.0
    assert psi_of([(5, 5), (5, 5)]) == 0.0


@pytest.mark.parametrize(
    "hostile",
    [
        VariantStats(ok=-1),
        VariantStats(ok=1 << 50),
        VariantStats(ok=1, scores={"x": {}}),
        VariantStats(ok=1, latency={5: 0}),
        VariantStats(ok=1, latency={99_999: 1}),
        VariantStats(failed=1, schema_violations=2),
    ],
)
def test_what_cannot_be_is_not_judged(hostile: VariantStats) -> None:
    assert not is_sane(hostile)
