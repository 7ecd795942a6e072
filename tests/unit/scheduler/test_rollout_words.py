"""What a rollout says when it waits or refuses an order, through the whole fold."""

from __future__ import annotations

from typing import Literal

from msgspec import structs

from sie_stream.commands import RolloutOrder
from tests.unit.scheduler.kit import decisions
from tests.unit.scheduler.rolling import UNIT, Rolling, answered


def test_pinned_answers_pass_no_step_and_stop_one_all_the_same() -> None:
    cluster = Rolling()
    cluster.roll()
    cluster.make_ready(UNIT)
    few = structs.replace(answered(90), pinned=80)
    cluster.windows(4, new=few)
    rollout = cluster.model().rollouts["canary"]
    assert rollout.step == 0
    assert rollout.holding == "too few samples of the new version: 40 of 100, beside 320 that were pinned to it"
    cluster.windows(6, new=few)
    assert cluster.model().rollouts["canary"].step == 1
    failing = structs.replace(answered(10, failed=90), pinned=90)
    assert "rollout_rolled_back" in cluster.windows(2, new=failing)


def test_what_cannot_be_done_says_why_and_what_can() -> None:
    cluster = Rolling()
    cluster.roll()

    def refused(order: Literal["pause", "resume", "promote"]) -> str:
        [answer] = decisions(cluster.append(RolloutOrder("churn", order, actor="ada")))
        assert answer.kind == "rollout_ignored"
        return answer.reason

    assert refused("promote") == (
        "No replica of 2.0.0 is ready yet, so no key can go to it. `sie-stream rollout status churn` shows when one is."
    )
    cluster.make_ready(UNIT)
    assert refused("resume") == "The rollout of 2.0.0 is not paused: it is serving."
    cluster.append(RolloutOrder("churn", "pause", actor="ada"))
    assert refused("pause") == (
        "The rollout of 2.0.0 is paused already, by ada; `sie-stream rollout resume churn` lets it go on."
    )
