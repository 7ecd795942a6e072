"""Which rate the canary's demonstration sends at, and what it says about the stable traffic."""

from __future__ import annotations

import pytest

from sie_stream.cli.canary_rate import RATES, Tried, next_rate, rate_with_room
from sie_stream.cli.demo_canary import CanaryFailed, moved


def tried(*p90_ms: float, answered: float = 1.0) -> list[Tried]:
    return [Tried(rate, ms, answered) for rate, ms in zip(RATES, p90_ms, strict=False)]


def test_rates_are_tried_upwards_until_requests_wait_for_each_other() -> None:
    assert next_rate([]) == 100
    assert next_rate(tried(30)) == 200
    assert next_rate(tried(30, 28, 59)) == 800
    assert next_rate(tried(30, 28, 61)) is None
    assert next_rate(tried(30, 30, 30, 30, 30, 30)) is None


def test_half_of_the_highest_rate_that_was_carried_is_sent() -> None:
    assert rate_with_room(tried(30, 28, 59, 200)) == 200
    assert rate_with_room(tried(30, 30, 30, 30, 30, 30)) == 1_600


def test_a_rate_whose_answers_stay_behind_is_not_carried() -> None:
    behind = [*tried(30, 28), Tried(400, 30.0, 0.8)]
    assert next_rate(behind) is None
    assert rate_with_room(behind) == 100


def test_a_machine_that_carries_nothing_gets_half_of_the_lowest_rate() -> None:
    assert rate_with_room(tried(9_000, answered=0.3)) == 50


def test_a_machine_that_slows_down_by_itself_is_not_held_against_the_rollout() -> None:
    assert moved(40.0, 50.0, 60.0, [38.0, 45.0])["little"]
    assert moved(40.0, 43.0, 40.0, [38.0, 45.0])["little"]
    beyond = moved(40.0, 60.0, 40.0, [38.0, 45.0])
    assert not beyond["little"]
    assert "(+20.0 ms, +50%): beyond 3 ms or 10%" in beyond["words"]
    assert "by itself" not in beyond["words"]
    assert "by itself" in moved(40.0, 60.0, 40.0, [38.0, 65.0])["words"]


def test_no_answers_of_the_stable_version_are_no_p99() -> None:
    with pytest.raises(CanaryFailed):
        moved(40.0, None, 40.0, [38.0, 45.0])
