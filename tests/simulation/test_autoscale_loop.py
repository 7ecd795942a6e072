"""Elastic replicas in a closed loop, in virtual time: no oscillation, the SLA comes back, bounds hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from scheduler.autoscale import ScalePolicy, idle_ms, window_ms
from sie_stream.spec.model import Tag
from tests.unit.scheduler.day import in_time, lived, shopping_day
from tests.unit.scheduler.folded_day import folded_day
from tests.unit.scheduler.kit import decisions
from tests.unit.scheduler.queueing import Run, Station, closed_loop, ramp, sine, step_load

COLD_STARTS_S = (1, 10, 60)
SERVICE_MS = 200
PLAIN = ScalePolicy("m", 1, 24, 1_000)
"""A replica answers 5 requests a second; `closed_loop` checks the bounds in every second."""


def run(rate: Callable[[float], float], cold_s: int, seconds: int, start: int) -> Run:
    return closed_loop(PLAIN, Station(rate, SERVICE_MS, cold_s * 1000), seconds, start)


@pytest.mark.parametrize("cold_s", COLD_STARTS_S)
def test_a_step_is_followed_once_and_the_sla_comes_back(cold_s: int) -> None:
    """5 to 40 requests/s: 1 to 8 busy replicas. Nothing can be better before the first replica is there."""
    found = run(step_load(5, 40, 120), cold_s, 900, start=3)
    assert found.recovered_s(120) <= 30 + 2.5 * cold_s
    assert found.turns() <= 1
    assert len(found.decisions) <= 6
    assert 11 <= found.wanted[-1] <= 18
    assert found.decisions[0].at_ms <= 124_000, "two observations to be sure, and one to decide"


@pytest.mark.parametrize("cold_s", COLD_STARTS_S)
def test_a_step_down_is_followed_after_the_window_without_harm(cold_s: int) -> None:
    found = run(step_load(40, 5, 120), cold_s, 1_500, start=13)
    down = [decision for decision in found.decisions if decision.at_ms > 120_000]
    assert {decision.rule for decision in down} == {"shrink"}
    assert down[0].at_ms >= 120_000 + window_ms(cold_s * 1000) - 60_000
    assert found.wanted[-1] <= 3
    assert found.share_in_time() >= 0.99


@pytest.mark.parametrize("cold_s", COLD_STARTS_S)
def test_a_ramp_is_seen_ahead(cold_s: int) -> None:
    """5 to 40 requests/s in ten minutes."""
    found = run(ramp(5, 40, 60, 660), cold_s, 900, start=3)
    assert found.turns() == 0
    assert found.share_in_time() >= 0.99


@pytest.mark.parametrize("cold_s", COLD_STARTS_S)
def test_a_sine_is_followed_at_most_once_up_and_down_a_period(cold_s: int) -> None:
    """5 to 35 requests/s, three periods of ten minutes."""
    found = run(sine(20, 15, 600), cold_s, 1_800, start=6)
    assert found.turns() <= 6
    assert found.share_in_time(150) >= 0.99, "after the first rise, which began at once"


@pytest.mark.parametrize("cold_s", COLD_STARTS_S)
def test_a_spike_is_left_behind(cold_s: int) -> None:
    """Half a minute of 60 requests/s instead of 5."""
    found = run(step_load(5, 60, 120, 150), cold_s, 1_500, start=3)
    assert found.turns() <= 1
    assert found.recovered_s(120) <= 40 + 1.5 * cold_s
    assert found.wanted[-1] <= 5
    assert len(found.decisions) <= 9


@pytest.mark.parametrize("tags", [(), ("high-sla",)])
def test_a_steady_load_of_random_arrivals_moves_nothing_to_and_fro(tags: tuple[Tag, ...]) -> None:
    policy = ScalePolicy("m", 1, 20, 1_000, None, tags)
    found = closed_loop(policy, Station(step_load(20, 20, 0), SERVICE_MS, 10_000), 2_400, start=7)
    assert found.turns() <= 1
    assert len(found.decisions) <= 3


@pytest.mark.parametrize("period_s", [6, 20, 40])
def test_swings_faster_than_the_window_are_ridden_out(period_s: int) -> None:
    """Square waves between 2 and 38 requests/s."""
    found = run(lambda t: 38 if t % period_s < period_s / 2 else 2, 10, 900, start=8)
    assert found.turns() <= 1, "of 22 to 150 periods"
    assert found.turns(since_s=300) == 0
    assert len(found.decisions) <= 4
    assert found.share_in_time(60) >= 0.99


def test_lost_replicas_are_on_their_way_back_and_no_reason_for_more() -> None:
    station = Station(step_load(20, 20, 0), SERVICE_MS, 10_000)
    found = closed_loop(PLAIN, station, 600, start=7, lost={200: 3})
    assert not [decision for decision in found.decisions if 200_000 <= decision.at_ms <= 211_000]
    assert found.recovered_s(200) <= 60
    assert found.turns() <= 1


@pytest.mark.parametrize("declared_ms", [20, 2_000])
def test_a_wrong_declaration_is_unlearned(declared_ms: int) -> None:
    station = Station(step_load(20, 20, 0), SERVICE_MS, 10_000, declared_ms=declared_ms)
    found = closed_loop(PLAIN, station, 900, start=2)
    assert 6 <= found.wanted[-1] <= 8
    assert found.turns() <= 1
    assert found.recovered_s(0) <= 120


# ---------------------------------------------------------------- to zero and back


def rare(t: float) -> float:
    """Ten seconds of one request a second, every ten minutes."""
    return 1.0 if t % 600 < 10 else 0.0


def zero_and_back(warm_s: int | None) -> Run:
    policy = ScalePolicy("m", 0, 4, None, None, ("batch-job",))
    station = Station(rare, SERVICE_MS, 20_000, None if warm_s is None else warm_s * 1000, seed=3)
    return closed_loop(policy, station, 1_500, start=1)


def first_answer_ms(run: Run, since_s: int) -> float:
    return next(second[0] for second in run.station.latencies[since_s:] if second)


def test_an_idle_batch_model_goes_to_zero_and_comes_back_for_the_first_request() -> None:
    found = zero_and_back(None)
    rules = [(decision.rule, decision.wanted) for decision in found.decisions]
    assert rules == [("to_zero", 0), ("from_zero", 1), ("to_zero", 0), ("from_zero", 1), ("to_zero", 0)]
    left, came = found.decisions[0].at_ms, found.decisions[1].at_ms
    assert idle_ms(20_000) <= left <= idle_ms(20_000) + 15_000
    assert 600_000 <= came <= 605_000
    answered = sum(len(second) for second in found.station.latencies)
    assert answered == found.station.arrived > 10, "who waits for the cold start is answered"
    assert 19_000 <= first_answer_ms(found, 600) <= 22_000


def test_the_warm_pool_shortens_the_cold_start() -> None:
    cold, warm = zero_and_back(None), zero_and_back(2)
    assert first_answer_ms(warm, 600) <= first_answer_ms(cold, 600) - 15_000
    assert [d.rule for d in warm.decisions].count("from_zero") >= 2


# ---------------------------------------------------------------- a day


def test_a_double_peak_day_keeps_high_sla_in_time() -> None:
    """24 hours of 180 s: peaks that rise twenty times as fast as real ones, with cold starts of 5 and 20 s."""
    cluster = lived(shopping_day(180), 24 * 180)
    for name in ("chat", "rank"):
        in_sla, requests = in_time(cluster.members[name])
        assert requests > 15_000
        assert in_sla >= 0.9997 * requests, name
    report = cluster.members["report"]
    assert report.station.replica_ms > 0
    kinds = {step.kind for step in cluster.steps}
    assert {"move", "give_up", "get_back"} <= kinds
    assert len(cluster.steps) <= 24, "two peaks, each stepped aside for and taken back in steps"
    gave = [step for step in cluster.steps if step.kind == "give_up"]
    assert all(step.model == "report" for step in gave)


def test_without_yielding_the_same_day_breaks_the_sla() -> None:
    """The scenario is hard enough to mean something."""
    cluster = lived(shopping_day(60, yields=False), 24 * 60)
    in_sla, requests = in_time(cluster.members["chat"])
    assert in_sla < 0.9 * requests


def test_the_scheduler_itself_keeps_high_sla_in_time_on_that_day() -> None:
    """The same day of 24 x 300 s through SchedulerMachine, which looks at loads every five seconds only."""
    day = folded_day(300).live(24 * 300)
    members = {member.name: member for member in day.members}
    for name in ("chat", "rank"):
        in_sla, requests = members[name].in_time()
        assert requests > 80_000
        assert in_sla >= 0.9997 * requests, name
    commands = day.cluster.commands
    steps = Counter(str(decision.chosen["step"]) for decision in decisions(commands, "model_yielded"))
    back = Counter(str(decision.chosen["step"]) for decision in decisions(commands, "model_restored"))
    assert {"move", "give_up"} <= set(steps)
    assert "get_back" in back
    assert {decision.subject for decision in decisions(commands, "model_yielded")} == {"embed", "report"}
    report = members["report"]
    assert report.station.replica_ms > 0.5 * 0.85 * 10 * 24 * 300 * 1_000, "half of what it needs, at least"
    assert len(report.station.waiting) < 0.5 * report.station.arrived
