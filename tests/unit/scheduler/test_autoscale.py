"""The law that turns a load into replicas, and the decisions about it, one observation at a time."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from scheduler.autoscale import (
    ScaleDecision,
    ScalePolicy,
    ScaleState,
    decide,
    first_state,
    growth_limit,
    idle_ms,
    policy_of,
    window_ms,
)
from scheduler.demand import Demand, Load, forecast_per_s, late_share, need_of, observed
from sie_stream.spec import ModelSpec
from sie_stream.spec.model import Tag

PLAIN = ScalePolicy("m", 1, 20)
IDLE = Load(0, 1000, 0, 0, 0, 0, 1, 0, 0, None, 10_000, 200)


def load(at_s: int, **changes: Any) -> Load:
    return structs.replace(IDLE, at_ms=at_s * 1000, **changes)


def play(policy: ScalePolicy, state: ScaleState, *loads: Load) -> tuple[ScaleState, list[ScaleDecision]]:
    decisions: list[ScaleDecision] = []
    for one in loads:
        state, decision = decide(policy, state, one)
        decisions.append(decision)
    return state, decisions


def calm(per_s: float, demand: float = 200) -> Demand:
    """What is remembered after a long time at a steady rate."""
    return Demand(per_s, per_s, per_s, 0.0, demand * 200, 200)


# ---------------------------------------------------------------- the law


def erlang_c(servers: int, offered: float) -> float:
    """From its definition, with factorials."""
    top = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return top / (sum(offered**k / math.factorial(k) for k in range(servers)) + top)


@given(st.integers(1, 60), st.floats(0.01, 0.99), st.floats(0, 20))
def test_late_share_is_erlang_c_with_an_exponential_tail(servers: int, used: float, budget: float) -> None:
    offered = servers * used
    exact = erlang_c(servers, offered) * math.exp(-(servers - offered) * budget)
    assert late_share(servers, offered, budget) == pytest.approx(exact, rel=1e-2, abs=1e-12)


def test_one_server_waits_with_probability_of_its_utilisation() -> None:
    assert late_share(1, 0.7, 0) == pytest.approx(0.7)
    assert late_share(3, 3.0, 5) == 1.0


@given(st.floats(0, 100), st.floats(0.1, 50), st.sampled_from([6_000, 7_500, 9_000]))
def test_the_need_is_the_smallest_that_keeps_every_promise(offered: float, budget: float, target_bp: int) -> None:
    need = need_of(offered, target_bp, (budget, 10_000), 0, 200)
    assert need.by_target * target_bp >= (offered - 1e-6) * 10_000
    assert (need.by_target - 1) * target_bp < offered * 10_000
    if need.by_wait > int(offered) + 1:
        assert late_share(need.by_wait, offered, budget) <= 0.01 < late_share(need.by_wait - 1, offered, budget)
    more = need_of(offered * 1.1, target_bp, (budget, 10_000), 0, 200)
    assert more.replicas >= need.replicas


def test_demand_is_replica_time_per_request() -> None:
    busy = {"arrivals": 30, "completions": 30, "ready": 4, "utilisation_bp": 7_500}
    first = observed(Demand(), load(1, demand_ms=900))
    assert first.each_ms == 900, "as declared"
    demand = observed(first, load(2, **busy))
    assert 100 < demand.each_ms < 900
    for second in range(3, 60):
        demand = observed(demand, load(second, **busy))
    assert demand.each_ms == pytest.approx(100, rel=0.001), "3 replicas busy with 30 requests/s"


def test_a_ramp_is_seen_ahead_and_noise_is_not() -> None:
    demand = calm(20)
    for second in range(300):
        demand = observed(demand, load(second, arrivals=20 + 4 * (second % 2) - 2))
    assert forecast_per_s(demand, 60_000) == demand.fast_per_s
    for second in range(300):
        demand = observed(demand, load(second, arrivals=20 + second))
    assert 330 < forecast_per_s(demand, 60_000) < 390, "319 now, 379 in a minute"


def test_two_high_observations_are_a_new_level_and_one_is_not() -> None:
    once = observed(calm(10), load(1, arrivals=100))
    assert once.fast_per_s < 20
    assert observed(once, load(2, arrivals=90)).fast_per_s == 90
    assert observed(once, load(2, arrivals=10)).fast_per_s < 20


# ---------------------------------------------------------------- single decisions


def test_the_reason_has_the_numbers() -> None:
    state = structs.replace(first_state(PLAIN, 0, 4), demand=calm(30))
    _, (decision,) = play(
        PLAIN, state, load(60, arrivals=30, completions=20, ready=4, utilisation_bp=10_000, waiting=5)
    )
    assert (decision.rule, decision.before, decision.wanted) == ("grow", 4, 8)
    assert decision.reason == (
        "4 -> 8 of the 9 needed, the most for one change: 30.0 requests/s (30.0 in 10000 ms) of 200 ms keep 6.00 "
        "replicas busy: 8 at 75 % utilisation, 9 to drain the queue of 5; 1 to 20 are allowed."
    )


def test_loading_replicas_count_as_supply() -> None:
    state = structs.replace(first_state(PLAIN, 0, 2), demand=calm(30))
    busy = {"arrivals": 30, "completions": 10, "utilisation_bp": 10_000, "waiting": 50}
    state, decisions = play(
        PLAIN, state, *[load(60 + n, ready=2, loading=0 if n == 0 else 4, **busy) for n in range(10)]
    )
    assert [decision.changed for decision in decisions] == [True] + [False] * 9
    assert decisions[1].reason.startswith("Stays at 6: 2 ready and 4 loading, 1000 ms after the last change.")


def test_what_arrives_above_all_supply_does_not_wait_for_what_loads() -> None:
    """A cold start later the queue would be longer by all that came meanwhile."""
    state = structs.replace(first_state(PLAIN, 0, 2), demand=calm(30))
    busy = {"ready": 2, "completions": 10, "utilisation_bp": 10_000, "waiting": 50}
    first = load(60, loading=0, arrivals=30, **busy)
    more = [load(60 + n, loading=4, arrivals=90, **busy) for n in range(1, 12)]
    _, decisions = play(PLAIN, state, first, *more)
    grown = [decision for decision in decisions if decision.changed]
    assert [decision.before for decision in grown] == [2, 6]
    assert grown[1].wanted > 6


def test_a_change_that_never_completes_does_not_hold_for_ever() -> None:
    state = first_state(PLAIN, 0, 8)
    state, decisions = play(PLAIN, state, *[load(second, ready=3, loading=0) for second in range(1, 400)])
    assert next(decision.rule for decision in decisions if decision.changed) == "shrink"


def test_growth_is_limited_per_change_by_the_pace_of_the_cold_start() -> None:
    assert [growth_limit(1, cold_s * 1000) for cold_s in (0, 15, 60, 600)] == [5, 5, 32, 64]
    assert growth_limit(10, 1_000) == 20
    assert growth_limit(0, 1_000) == 4


def test_shrinking_waits_for_a_whole_window() -> None:
    state = structs.replace(first_state(PLAIN, 0, 8), demand=calm(1))
    quiet = {"arrivals": 1, "completions": 1, "ready": 8, "utilisation_bp": 250}
    window_s = window_ms(10_000) // 1000
    _, decisions = play(PLAIN, state, *[load(second, **quiet) for second in range(1, window_s + 3)])
    shrunk = [decision for decision in decisions if decision.changed]
    assert [(decision.at_ms // 1000, decision.before, decision.wanted) for decision in shrunk] == [(window_s + 1, 8, 4)]


def test_a_peak_within_the_window_starts_it_again() -> None:
    state = structs.replace(first_state(PLAIN, 0, 4), demand=calm(5))
    quiet = {"arrivals": 5, "completions": 5, "ready": 4, "utilisation_bp": 2_500}
    peak = {"arrivals": 15, "completions": 15, "ready": 4, "utilisation_bp": 7_500}
    loads = [load(second, **(peak if second % 40 > 30 else quiet)) for second in range(1, 600)]
    _, decisions = play(PLAIN, state, *loads)
    assert not any(decision.changed for decision in decisions)


def test_traffic_that_wanders_within_minutes_unloads_nothing() -> None:
    """Loads take seconds, so a window of only some of them would follow every wave, and pay a hand-over for each."""
    state = structs.replace(first_state(PLAIN, 0, 4), demand=calm(5))
    quiet = {"arrivals": 5, "completions": 5, "ready": 4, "utilisation_bp": 2_500}
    peak = {"arrivals": 15, "completions": 15, "ready": 4, "utilisation_bp": 7_500}
    loads = [load(second, **(peak if second % 200 > 190 else quiet)) for second in range(1, 1_200)]
    _, decisions = play(PLAIN, state, *loads)
    assert not any(decision.changed for decision in decisions)


def test_replicas_that_share_devices_are_worth_less() -> None:
    """One device's worth of work: two replicas that take turns with others, each at half its pace."""
    alone, shared = PLAIN, structs.replace(PLAIN, sharing=2)
    needs = []
    for policy in (alone, shared):
        state = structs.replace(first_state(policy, 0, 4), demand=calm(15))
        seen = load(6, arrivals=15, completions=15, ready=4, utilisation_bp=7_500)
        _, decisions = play(policy, state, seen)
        needs.append(decisions[-1].need)
    assert needs == [4, 10], "3 devices' worth at 75 %; 6 halves at 60 %, since one more is only a reserve"
    assert "2 of which share a device" in decisions[-1].reason


@pytest.mark.parametrize(("sharing", "leaves_after_s"), [(1, 300), (2, 600)])
def test_replicas_that_rest_on_shared_devices_leave_later(sharing: int, leaves_after_s: int) -> None:
    policy = structs.replace(PLAIN, sharing=sharing)
    state = structs.replace(first_state(policy, 0, 8), demand=calm(1))
    loads = [load(second, arrivals=1, completions=1, ready=8, utilisation_bp=500) for second in range(1, 700)]
    _, decisions = play(policy, state, *loads)
    shrunk = next(decision for decision in decisions if decision.changed)
    assert shrunk.at_ms == pytest.approx(1_000 * leaves_after_s, abs=5_000)


def test_bounds_come_first() -> None:
    state = first_state(PLAIN, 0, 8)
    _, (decision,) = play(structs.replace(PLAIN, replicas_max=5), state, load(1, ready=8))
    assert (decision.rule, decision.wanted, decision.reason) == ("bounds", 5, "8 -> 5: 1 to 5 replicas are allowed.")


@pytest.mark.parametrize(
    ("tags", "floor"), [((), 0), (("batch-job",), 0), (("cost-sensitive",), 0), (("high-sla",), 1), (("a/b-test",), 1)]
)
def test_who_may_go_to_zero(tags: tuple[Tag, ...], floor: int) -> None:
    policy = ScalePolicy("m", 0, 4, 500, None, tags)
    limit_s = idle_ms(10_000) // 1000
    _, decisions = play(policy, first_state(policy, 0, 1), *[load(s) for s in range(1, limit_s + 60)])
    changes = [(decision.at_ms // 1000, decision.wanted) for decision in decisions if decision.changed]
    assert changes == ([] if floor else [(limit_s, 0)])


def test_from_zero_on_the_first_request() -> None:
    policy = ScalePolicy("m", 0, 4)
    _, decisions = play(policy, first_state(policy, 0), load(1, ready=0), load(2, ready=0, waiting=1, arrivals=1))
    assert [(decision.rule, decision.wanted) for decision in decisions] == [("hold", 0), ("from_zero", 1)]
    assert decisions[1].reason.startswith("0 -> 1: 1 request waits. A cold start takes 10000 ms.")


def test_p99_above_the_sla_adds_one_and_keeps_it() -> None:
    """The law sees an engine used for 65 %; that p99 is above the SLA all the same it learns from p99."""
    policy = structs.replace(PLAIN, p99_ms=2_000)
    state = structs.replace(first_state(policy, 0, 4), demand=calm(13))
    slow = {"arrivals": 13, "completions": 13, "utilisation_bp": 6_500, "waiting": 1, "p99_ms": 2_500}
    state, decisions = play(policy, state, *[load(second, ready=4, **slow) for second in range(1, 30)])
    grown = [decision for decision in decisions if decision.changed]
    assert [(decision.rule, decision.wanted) for decision in grown] == [("sla", 5)]
    assert "p99 2500 ms is above the SLA of 2000 ms since 20000 ms" in grown[0].reason
    fine = slow | {"p99_ms": 500, "utilisation_bp": 5_200, "waiting": 0}
    state, decisions = play(policy, state, *[load(second, ready=5, **fine) for second in range(30, 500)])
    assert not any(decision.changed for decision in decisions), "it is kept for ten minutes"


def test_a_slow_answer_without_a_queue_is_not_for_lack_of_replicas() -> None:
    policy = structs.replace(PLAIN, p99_ms=2_000)
    state = structs.replace(first_state(policy, 0, 4), demand=calm(5))
    slow = {"arrivals": 5, "completions": 5, "utilisation_bp": 2_500, "p99_ms": 2_500, "ready": 4}
    _, decisions = play(policy, state, *[load(second, **slow) for second in range(1, 50)])
    assert not any(decision.changed for decision in decisions)
    assert "more replicas would not help" in decisions[-1].reason


def test_an_old_observation_changes_nothing() -> None:
    state, _ = play(PLAIN, first_state(PLAIN, 0, 1), load(10))
    again, (decision,) = play(PLAIN, state, load(9, arrivals=500))
    assert (again, decision.changed) == (state, False)


def test_the_policy_of_a_declaration() -> None:
    body = {"name": "m", "version": "1", "source": {"uri": "m"}, "min_gpu_memory_mb": 100, "tags": ["batch-job"]}
    more = {"replicas": {"min": 0, "max": 3}, "slas": {"p99_latency_ms": 50}}
    found = policy_of(ModelSpec.model_validate(body | more))
    assert found == ScalePolicy("m", 0, 3, 50, None, ("batch-job",))


@pytest.mark.parametrize(("field", "value"), [("window_ms", 0), ("arrivals", -1), ("utilisation_bp", 10_001)])
def test_impossible_observations_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"Load.{field}: {value}"):
        structs.replace(IDLE, **{field: value})


# ---------------------------------------------------------------- whatever is observed

policies = st.builds(
    lambda low, more, p99, queue, tags: ScalePolicy("m", low, max(low + more, 1), p99, queue, tags),
    st.integers(0, 3),
    st.integers(0, 10),
    st.none() | st.integers(1, 5_000),
    st.none() | st.integers(1, 5_000),
    st.sampled_from([(), ("high-sla",), ("batch-job",), ("cost-sensitive",)]),
)
observations = st.builds(
    Load,
    at_ms=st.integers(0, 120_000),
    window_ms=st.integers(1, 10_000),
    arrivals=st.integers(0, 5_000),
    completions=st.integers(0, 5_000),
    waiting=st.integers(0, 5_000),
    running=st.integers(0, 100),
    ready=st.integers(0, 15),
    loading=st.integers(0, 15),
    utilisation_bp=st.integers(0, 10_000),
    p99_ms=st.none() | st.integers(0, 100_000),
    cold_start_ms=st.integers(0, 100_000),
    demand_ms=st.integers(1, 60_000),
)


@given(policies, st.lists(observations, max_size=15), st.booleans())
def test_wanted_is_always_within_bounds_and_decisions_repeat(
    policy: ScalePolicy, history: list[Load], follow: bool
) -> None:
    """Observations are `at_ms` apart; `follow`: the replicas ready are always those that were wanted."""
    state, now = first_state(policy, 0, 1), 0
    for one in history:
        now += one.at_ms
        one = structs.replace(one, at_ms=now, ready=state.wanted if follow else one.ready)
        before = state
        state, decision = decide(policy, before, one)
        assert policy.floor <= decision.wanted <= policy.replicas_max
        assert "high-sla" not in policy.tags or decision.wanted >= 1
        assert (decision.before, decision.wanted, decision.changed) == (
            before.wanted,
            state.wanted,
            state.wanted != before.wanted,
        )
        assert decision.reason
        carried = msgspec.json.decode(msgspec.json.encode(before), type=ScaleState)
        assert carried == before
        assert decide(policy, carried, one) == (state, decision), "a snapshot decides the same"
