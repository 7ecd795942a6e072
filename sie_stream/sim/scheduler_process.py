"""A scheduler of a world: standby and host of production, and side effects in a lane of their own."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.effects import InlineEffects
from scheduler.guard import GuardedMachine
from scheduler.host import SchedulerHost
from scheduler.standby import Standby
from schemas.codec import encode_decision
from sie_stream.control import (
    ClusterRecord,
    EnsureTopic,
    FenceWorker,
    RecordDecision,
)
from sie_stream.records import LogRecord
from sie_stream.settings import Settings
from sie_stream.sim.parts import Parts
from sie_stream.sim.world import Lane, World

EFFECT_MS = (5, 200)
SCHEDULER_WAIT_MS = (2, 40)


class SimFencer:
    """Takes a transactional id and lets it go."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def fence(self, transactional_id: str) -> None:
        self._lane.world.log.transactional_writer(transactional_id, client=self._lane.client).init()


class LaneEffects:
    """Implements SideEffects: they take their time, beside the loop."""

    def __init__(self, inline: InlineEffects, lane: Lane) -> None:
        self._inline = inline
        self._lane = lane
        self._under_way = 0

    def submit(self, fences: Sequence[FenceWorker], topics: Sequence[EnsureTopic]) -> None:
        for fence in fences:
            self._later([fence], [])
        if topics:
            self._later([], topics)

    def _later(self, fences: Sequence[FenceWorker], topics: Sequence[EnsureTopic]) -> None:
        self._under_way += 1
        self._lane.later(self._lane.world.between(EFFECT_MS), lambda: self._run(fences, topics))

    def _run(self, fences: Sequence[FenceWorker], topics: Sequence[EnsureTopic]) -> None:
        self._lane.world.note(f"{self._lane.client}: {fences or len(topics)}")
        self._inline.submit(fences, topics)
        self._under_way -= 1

    def outcomes(self) -> list[ClusterRecord]:
        return self._inline.outcomes()

    def pending(self) -> int:
        return self._under_way + self._inline.pending()

    def close(self) -> None:
        self._inline.close()


class SchedulerBody:
    """Stands by, then leads."""

    host_type = SchedulerHost

    def __init__(self, world: World, lane: Lane, parts: Parts) -> None:
        settings = parts.settings
        self._world = world
        self._lane = lane
        self._settings = settings
        self._reader = world.log.reader(settings.topics.scheduler_group, lane.client)
        self._standby = Standby(settings, self._reader, world.clock)
        self._host: SchedulerHost | None = None
        self._stopping = False

    def start(self) -> None:
        self._standby.start()

    def turn(self) -> float | None:
        if self._host is not None:
            if self._stopping:
                self._host.stop()
                return None
            self._host.turn()
        elif self._stopping:
            return None
        elif self._standby.turn():
            self._standby.stop()
            self._lead()
        return self._world.between(SCHEDULER_WAIT_MS)

    def _lead(self) -> None:
        world, lane, settings = self._world, self._lane, self._settings
        log, client = world.log, lane.client
        effects_lane = world.lane(lane.process, "effects")
        inline = InlineEffects(SimFencer(effects_lane), log.admin(), settings, log.clock, self._notice)
        self._host = self.host_type(
            settings,
            f"{lane.process.name}/{lane.process.incarnation}",
            self._reader,
            log.transactional_writer(
                settings.topics.scheduler_transactional_id, settings.transaction_timeout_ms, client=client
            ),
            log.plain_writer(client=client),
            LaneEffects(inline, effects_lane),
            log.clock,
            self._notice,
        )
        self._host.start()

    def ask_to_stop(self) -> None:
        self._stopping = True

    def _notice(self, event: str, fields: dict[str, str | int]) -> None:
        self._world.note(f"{self._lane.client}: {event} {fields}")


def refold(settings: Settings, records: Sequence[tuple[LogRecord, ClusterRecord]]) -> list[tuple[str, bytes]]:
    """What a fresh scheduler decides about these records."""
    machine = GuardedMachine(settings)
    return [
        (command.decision.decision, encode_decision(command.decision))
        for record, fact in records
        for command in machine.step(record.offset, record.timestamp_ms, fact)
        if isinstance(command, RecordDecision)
    ]
