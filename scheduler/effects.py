"""What the scheduler does to the world besides writing: fence workers, make topics. Outcomes are facts for sie.cluster.

A side effect without an outcome (a crash, an error of Kafka) is asked for again by the fold at a later tick, so nothing
here retries for long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sie_stream.control import ClusterRecord, EnsureTopic, FenceWorker, TopicEnsured, TopicFailed, WorkerFenced
from sie_stream.errors import LogError
from sie_stream.ids import LANES
from sie_stream.ports import Clock, TopicAdmin, TopicSpec
from sie_stream.settings import Settings
from topics.catalog import work_topic

Notice = Callable[[str, dict[str, str | int]], None]
"""Tells an observer (event, fields); decides nothing."""


class Fencer(Protocol):
    def fence(self, transactional_id: str) -> None:
        """Take the id with init_transactions and let it go, so that its owner can never commit again.

        Raises LogError when that did not work.
        """
        ...


class SideEffects(Protocol):
    def submit(self, fences: Sequence[FenceWorker], topics: Sequence[EnsureTopic]) -> None:
        """Start these. Must not block for long."""
        ...

    def outcomes(self) -> list[ClusterRecord]:
        """What came of earlier ones, in the order it happened; each outcome once."""
        ...

    def pending(self) -> int:
        """How many are under way."""
        ...

    def close(self) -> None: ...


def fence_worker(
    command: FenceWorker, fencer: Fencer, settings: Settings, clock: Clock, notice: Notice
) -> list[ClusterRecord]:
    """The outcome of one fence; nothing when it failed."""
    started_ms = clock.monotonic_ms()
    try:
        fencer.fence(settings.topics.worker_transactional_id(command.worker))
    except LogError as error:
        notice("fence_failed", {"worker": command.worker, "incarnation": command.incarnation, "error": str(error)})
        return []
    return [WorkerFenced(command.worker, command.incarnation, int(clock.monotonic_ms() - started_ms))]


def ensure_topics(commands: Sequence[EnsureTopic], admin: TopicAdmin, settings: Settings) -> list[ClusterRecord]:
    """Make all these topics in one request; one by one when that fails, so that a bad one does not hold up the rest."""
    if not commands:
        return []
    try:
        admin.ensure([_topic(command, settings) for command in commands])
    except LogError as error:
        if len(commands) == 1:
            return [TopicFailed(commands[0].model, commands[0].topic, str(error))]
        return [outcome for command in commands for outcome in ensure_topics([command], admin, settings)]
    return [TopicEnsured(command.model, command.topic, command.partitions) for command in commands]


def _topic(command: EnsureTopic, settings: Settings) -> TopicSpec:
    return work_topic(settings, command.model, command.partitions // LANES)


class InlineEffects:
    """Carries side effects out where they are submitted: for the simulator and for tests."""

    def __init__(self, fencer: Fencer, admin: TopicAdmin, settings: Settings, clock: Clock, notice: Notice) -> None:
        self._fencer = fencer
        self._admin = admin
        self._settings = settings
        self._clock = clock
        self._notice = notice
        self._outcomes: list[ClusterRecord] = []

    def submit(self, fences: Sequence[FenceWorker], topics: Sequence[EnsureTopic]) -> None:
        for command in fences:
            self._outcomes += fence_worker(command, self._fencer, self._settings, self._clock, self._notice)
        self._outcomes += ensure_topics(topics, self._admin, self._settings)

    def outcomes(self) -> list[ClusterRecord]:
        done, self._outcomes = self._outcomes, []
        return done

    def pending(self) -> int:
        return len(self._outcomes)

    def close(self) -> None:
        return
