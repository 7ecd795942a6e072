"""Shares of a model's replicas: they add up, follow the load, relieve the hot and come to rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.shares import apportion
from scheduler.traffic import SHARES, ReplicaReport, TrafficState, _with_floor, direct, least_share


def report(name: str, p99_ms: int = 50, queue: int = 0, utilisation: int = 50, at_s: int = 1) -> ReplicaReport:
    return ReplicaReport(name, at_s * 1000, p99_ms, queue, utilisation * 100)


def rounds(count: int, *reports: ReplicaReport, state: TrafficState | None = None) -> TrafficState:
    state = state or TrafficState()
    for _ in range(count):
        again = [msgspec.structs.replace(one, at_ms=state.seen_ms + 1000) for one in reports]
        state, _ = direct(state, again)
    return state


def shares(state: TrafficState) -> dict[str, int]:
    return {name: replica.share for name, replica in state.replicas.items()}


def test_equal_replicas_share_equally() -> None:
    state = rounds(1, report("c"), report("a"), report("b"))
    assert shares(state) == {"a": 3334, "b": 3333, "c": 3333}


def test_a_hot_replica_gives_30_percent_to_the_others_in_proportion() -> None:
    state = rounds(3, report("a"), report("b"), report("c"))
    state, decision = direct(state, [report("a", 50, 51, 86, 4), report("b", at_s=4), report("c", at_s=4)])
    assert decision.shares == {"a": 3334 - 1000, "b": 3833, "c": 3833}
    assert decision.reason == (
        "a: device at 86 % with 51 queued (limits 85 % and 50), so 1000 of its 3334 go to others."
    )


@pytest.mark.parametrize(("queue", "utilisation"), [(50, 100), (1000, 85)])
def test_at_the_limits_nothing_is_relieved(queue: int, utilisation: int) -> None:
    even = rounds(3, report("a"), report("b"))
    _, decision = direct(even, [report("a", 50, queue, utilisation, 4), report("b", at_s=4)])
    assert "limits" not in decision.reason


def test_while_it_stays_hot_it_gives_again_every_15_seconds() -> None:
    state = rounds(1, report("a"), report("b"))
    given_away: list[int] = []
    for second in range(2, 30):
        state, decision = direct(state, [report("a", 50, 200, 99, second), report("b", 50, 0, 30, second)])
        given_away += [second] if "limits" in decision.reason else []
    assert given_away == [2, 17]
    assert shares(state)["a"] < 5000 * 0.7**2 + 1


def test_no_more_is_moved_than_the_others_have_room_for() -> None:
    state = rounds(1, report("a", utilisation=80), report("b", utilisation=80))
    _, decision = direct(state, [report("a", 50, 200, 99, 2), report("b", 50, 0, 80, 2)])
    assert decision.shares == {"a": 5000 - 312, "b": 5000 + 312}, "5,000 are 80 %, so 85 % are 5,312"


def test_while_all_are_hot_the_longest_queue_gives_way_to_the_others() -> None:
    state = rounds(3, report("a"), report("b"), report("c"))
    crowd = [report("a", 50, 2_600, 100), report("b", 50, 300, 100), report("c", 50, 300, 100)]
    after = shares(rounds(40, *crowd, state=state))
    assert after["a"] < shares(state)["a"] // 2
    assert sum(after.values()) == SHARES


def test_nobody_gives_while_all_are_hot() -> None:
    state = rounds(3, report("a", utilisation=95), report("b", utilisation=95))
    hot = rounds(5, report("a", 50, 80, 95), report("b", 50, 80, 95), state=state)
    assert shares(hot) == shares(state)


def test_a_slower_replica_ends_with_less_and_gets_there_in_steps() -> None:
    state = rounds(1, report("a"), report("b"))
    seen: list[int] = []
    for _ in range(90):
        state = rounds(1, report("a", 50), report("b", 150), state=state)
        seen.append(shares(state)["b"])
    assert seen == sorted(seen, reverse=True)
    assert 2500 <= seen[-1] <= 3125, "a third of the speed is a quarter of the traffic"
    assert max(a - b for a, b in pairwise(seen)) <= 200


def test_a_new_replica_starts_small_and_one_that_left_is_spread() -> None:
    state = rounds(5, report("a"), report("b"))
    state, joined = direct(state, [report("a", at_s=6), report("b", at_s=6), report("c", 0, 0, 0, 6)])
    assert joined.reason.startswith("c joined.")
    assert joined.shares["c"] <= 100 + 4000 // 16
    state = rounds(90, report("a"), report("b"), report("c"), state=state)
    assert shares(state)["c"] > 2800
    state, left = direct(state, [report("a", at_s=60), report("b", at_s=60)])
    assert sum(left.shares.values()) == SHARES
    assert abs(left.shares["a"] - left.shares["b"]) < 400
    state, none = direct(state, [])
    assert (none.shares, none.changed, none.reason) == ({}, True, "No replica is ready.")


def test_two_reports_of_one_replica_are_refused() -> None:
    with pytest.raises(ValueError, match="Two reports"):
        direct(TrafficState(), [report("a"), report("a")])


# ---------------------------------------------------------------- whatever is reported

reports_of_a_round = st.dictionaries(
    st.sampled_from("abcdefg"),
    st.tuples(st.integers(0, 100_000), st.integers(0, 500), st.integers(0, 100)),
    min_size=1,
)


@given(st.lists(reports_of_a_round, min_size=1, max_size=12))
def test_shares_always_add_up_and_none_is_lost(history: list[dict[str, tuple[int, int, int]]]) -> None:
    state = TrafficState()
    for second, values in enumerate(history, 1):
        reports = [report(name, *value, at_s=second) for name, value in values.items()]
        before = state
        state, decision = direct(before, reports)
        assert sum(decision.shares.values()) == SHARES
        assert list(decision.shares) == sorted(values)
        assert min(decision.shares.values()) >= least_share(len(values))
        assert decision.changed == (decision.shares != shares(before))
        assert direct(before, list(reversed(reports))) == (state, decision), "order is no input"
        again = msgspec.json.decode(msgspec.json.encode(state), type=TrafficState)
        assert again == state


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=64), st.integers(0, 10_000))
def test_apportioned_shares_add_up_and_are_within_one(weights: list[float], total: int) -> None:
    found = apportion(weights, total)
    assert sum(found) == total
    whole = sum(weights)
    if whole > 1e-6:
        assert all(abs(share - weight / whole * total) < 1 + 1e-6 for share, weight in zip(found, weights, strict=True))


def test_64_replicas_all_keep_something() -> None:
    assert min(shares(rounds(50, *[report(f"r{n:02}", 1 + 40 * n) for n in range(64)])).values()) >= least_share(64) > 0


# ---------------------------------------------------------------- closed loop


def closed_loop(service_ms: dict[str, float], rate: Callable[[int], float], seconds: int) -> list[dict[str, int]]:
    """Each replica is a queue of its own that gets its share of Poisson arrivals; returns the shares by second."""
    chance = random.Random(7)
    backlog = dict.fromkeys(service_ms, 0.0)
    state = TrafficState()
    history: list[dict[str, int]] = []
    for second in range(1, seconds + 1):
        reports: list[ReplicaReport] = []
        for name, each_ms in service_ms.items():
            share = state.replicas[name].share / SHARES if name in state.replicas else 1 / len(service_ms)
            mean = rate(second) * share
            arrivals = max(round(chance.gauss(mean, mean**0.5)), 0)
            work = backlog[name] + arrivals * each_ms
            backlog[name] = max(work - 1000, 0.0)
            used = min(work / 1000, 1.0)
            waits = backlog[name] + each_ms * used / max(1 - used, 0.05) / 2
            at_end = round(backlog[name] / each_ms)
            reports.append(ReplicaReport(name, second * 1000, round(3 * each_ms + waits), at_end, round(used * 10_000)))
        state, _ = direct(state, reports)
        history.append(shares(state))
    return history


def turns(series: list[int], least: int) -> int:
    """Reversals of direction by more than `least`."""
    count, direction, extreme = 0, 0, series[0]
    for value in series:
        if direction >= 0 and value < extreme - least:
            count, direction, extreme = count + (direction > 0), -1, value
        elif direction <= 0 and value > extreme + least:
            count, direction, extreme = count + (direction < 0), 1, value
        elif (value - extreme) * direction > 0:
            extreme = value
    return count


MIXED = {"a": 10.0, "b": 10.0, "c": 20.0, "d": 30.0}
"""Together 283 requests a second."""


@pytest.mark.parametrize("used", [0.4, 0.7, 0.85])
def test_unequal_replicas_settle_and_stay(used: float) -> None:
    history = closed_loop(MIXED, lambda _: used * 283, 900)
    for name in MIXED:
        assert turns([shares[name] for shares in history[100:]], 500) <= 2, name
    last = history[-1]
    assert last["a"] > last["c"] > last["d"]


def test_a_step_in_load_moves_shares_a_bounded_number_of_times() -> None:
    history = closed_loop(MIXED, lambda second: 100 if second < 300 else 230, 900)
    for name in MIXED:
        assert turns([shares[name] for shares in history], 500) <= 4, name


def test_at_95_percent_reliefs_are_all_that_moves() -> None:
    history = closed_loop(MIXED, lambda _: 0.95 * 283, 900)
    for name in MIXED:
        assert turns([shares[name] for shares in history], 500) <= 900 / 15, name


def test_an_overloaded_fleet_does_not_swing() -> None:
    history = closed_loop(MIXED, lambda _: 320, 400)
    for name in MIXED:
        assert turns([shares[name] for shares in history[60:]], 700) <= 4, name


@given(st.lists(st.floats(0, 1e6), max_size=12), st.integers(0, 800))
def test_a_floor_that_holds_anyway_changes_no_share(wanted: list[float], least: int) -> None:
    found = _with_floor(wanted, least)
    assert sum(found) == (SHARES if wanted else 0)
    assert min(found, default=least) >= least
    plain = apportion(wanted, SHARES)
    assert found == plain or min(plain) < least
