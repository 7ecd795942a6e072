"""Failures of simulated worlds as chains: noticed, fenced, given away, answered there, in this order and in time."""

from __future__ import annotations

import pytest

from schemas.codec import decode_decision, decode_result
from sie_stream.auditing.failures import AnswerSearch, Failure, failures_of
from sie_stream.sim.main import load_scenario
from sie_stream.sim.run import Run

pytestmark = pytest.mark.simulation
FENCE_MS_MAX = 2_000

SEEDS = range(1, 9)
"""Of worlds: a chain may come to its end when nobody asks any more, so one world shows too little."""


def failures_in(scenario: str, seed: int) -> list[Failure]:
    run = Run(scenario, load_scenario(scenario), seed)
    outcome = run.go()
    assert not outcome.failure, outcome.failure
    log, names = run.world.log, run.settings.topics
    found = failures_of([decode_decision(record.value) for record in log.visible(names.decisions)])
    search = AnswerSearch(found)
    for record in log.visible(names.results):
        search.saw(decode_result(record.value), f"{record.topic}/{record.partition}@{record.offset}")
    return [search.added_to(failure) for failure in found]


@pytest.mark.parametrize(
    ("scenario", "kind", "then"),
    [
        ("pauses", "worker_lost", ("worker_fenced", "partitions_assigned")),
        ("worker_kills", "worker_lost", ("worker_replaced", "partitions_assigned")),
        ("device_losses", "device_lost", ("partitions_asked_back", "partitions_assigned")),
        ("engine_kills", "engine_lost", ("replica_ready", "engine_back")),
    ],
)
def test_each_kind_is_a_chain_in_order(scenario: str, kind: str, then: tuple[str, str]) -> None:
    found = [one for seed in SEEDS for one in failures_in(scenario, seed) if one.root.kind == kind]
    whole = [one for one in found if all(one.after_ms(step) is not None for step in then)]
    assert whole, "not one was followed to its end"
    for failure in whole:
        kinds = [decision.kind for decision in failure.chain]
        assert kinds.index(then[0]) < len(kinds) - 1 - kinds[::-1].index(then[1])
        fenced_ms = failure.after_ms("worker_fenced")
        if then[0] == "worker_fenced":
            assert fenced_ms is not None
            assert fenced_ms <= FENCE_MS_MAX
        if failure.first_answer_ms is not None and fenced_ms is not None:
            assert failure.first_answer_ms >= fenced_ms
    assert kind == "engine_lost" or any(one.answers for one in whole)
