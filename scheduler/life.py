"""The life of a model from its declaration to its first answer: which step was reached when, and what took how long.

`ModelState.timings_ms` holds the times of the log (ms since the epoch) at which the generation that was applied last
reached each step for the first time. Times inside a worker are durations it measured, counted back from its report.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from scheduler.state import ModelState

STEPS: dict[str, str] = {
    "applied": "declaration accepted",
    "topic_ready": "work topic created",
    "placed": "place chosen",
    "engine_asked": "noticed by the worker, and waited for other loads there",
    "load_started": "engine process started",
    "loaded": "weights loaded",
    "ready": "warmed up",
    "assigned": "partitions given to it",
    "first_answer": "first request answered and committed",
}
"""Step -> what the time before it was spent on, in order."""


class LifeStep(Struct, frozen=True):
    step: str
    at_ms: int
    """Since the epoch, by the log's clock."""
    after_ms: int
    """Since it was applied."""
    took_ms: int
    """Since the step before it that was reached; 0 when a clock of another machine says less."""
    words: str


def life_of(timings_ms: Mapping[str, int]) -> tuple[LifeStep, ...]:
    """The steps that were reached, in order. Steps of releases before this one that are unknown here are left out."""
    steps: list[LifeStep] = []
    for name, words in STEPS.items():
        if name not in timings_ms:
            continue
        at_ms = timings_ms[name]
        first = steps[0].at_ms if steps else at_ms
        before = max((step.at_ms for step in steps), default=at_ms)
        steps.append(LifeStep(name, at_ms, at_ms - first, max(0, at_ms - before), words))
    return tuple(steps)


def life_words(timings_ms: Mapping[str, int]) -> str:
    """`topic_ready 12 ms, placed 0 ms, ...`: what each step took."""
    return ", ".join(f"{step.step} {step.took_ms} ms" for step in life_of(timings_ms)[1:])


def has_served(model: ModelState) -> bool:
    """Whether its present declaration serves, or did and will again: that no replica is ready at this moment, because
    its worker was lost, must not let a new version in without gates. Not while it sleeps, nor once it was given up.
    """
    if model.published_route is None:
        return False
    expected = model.replicas_wanted > 0 and bool(model.replicas or model.lost_workers)
    return (expected and "ready" in model.timings_ms) or any(replica.state == "ready" for replica in model.replicas)
