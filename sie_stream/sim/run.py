"""Runs one world from a scenario and a seed, and says how it went."""

from __future__ import annotations

from msgspec import Struct

from sie_stream.settings import Settings, settings_from
from sie_stream.sim.checkers import Checkers
from sie_stream.sim.faults import Faults
from sie_stream.sim.parts import Parts
from sie_stream.sim.processes import BODIES, Supervisor, start_fleet
from sie_stream.sim.scenario import Scenario
from sie_stream.sim.scheduler_process import refold
from sie_stream.sim.traffic import USER_TOPICS, Traffic
from sie_stream.sim.worker_process import kill_engine
from sie_stream.sim.world import Violation, World
from topics.catalog import system_topics

LOOK_EVERY_MS = 250
LINGER_MS = 2_500
"""After everything has drained the world goes on for so long: a late duplicate would show."""
DEFAULTS = {
    "requests_partitions": 3,
    "snapshot_every_records": 120,
    "engine_batch_timeout_ms": 2_000,
    "transaction_timeout_ms": 3_000,
    "load_timeout_ms": 5_000,
    "trial_engines": "sim",
}


class Outcome(Struct, frozen=True):
    """`failure` empty: everything held."""

    scenario: str
    seed: int
    failure: str
    elapsed_ms: int
    requests: int
    transactions: int
    statuses: dict[str, int]
    faults: dict[str, int]
    marks: dict[str, int]
    exits: dict[int, int]
    digest: str
    tail: list[str]


class Run:
    """One world with everything plugged in. Tests replace parts of it before `go`."""

    def __init__(self, name: str, scenario: Scenario, seed: int, trace: bool = False) -> None:
        self.failure: Exception | None = None
        self.name = name
        self.scenario = scenario
        self.settings: Settings = settings_from({**DEFAULTS, **scenario.settings})
        self.parts = Parts(self.settings, scenario.fleet, scenario.engine, dict(BODIES))
        self.world = World(seed, self.parts.make, trace)
        names = self.settings.topics
        self.world.log.admin().ensure([*system_topics(self.settings), *USER_TOPICS])
        self.traffic = self.parts.traffic = Traffic(self.world, scenario, names)
        self.checkers = Checkers(self.world, self.traffic, names)
        self.faults = self.parts.faults = Faults(self.world, scenario, names)
        self.faults.kill_engine = kill_engine
        self.faults.new_version = self.traffic.declare_again
        self.faults.delete = self.traffic.delete
        self.faults.drain = lambda worker, for_ms: self.traffic.drain(worker.name, for_ms)
        self.world.strikes = self.faults
        self.world.process_ended = Supervisor(self.world, self.settings).process_ended
        start_fleet(self.world, scenario)

    def go(self) -> Outcome:
        failure = ""
        try:
            self._go()
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # A broken promise, or a bug in what is simulated: the seed repeats it.
            failure = f"{type(error).__name__}: {error}"
            self.failure = error
        return self._outcome(failure)

    def _go(self) -> None:
        world = self.world
        heal_at_ms = world.start_ms + self.scenario.heal_at_ms
        give_up_ms = heal_at_ms + self.scenario.drain_ms_max
        world.run(heal_at_ms)
        while undone := self.checkers.undone():
            if world.clock.now_ms() >= give_up_ms:
                raise Violation(f"not drained {self.scenario.drain_ms_max} ms after the faults ended: {undone[:4]}")
            world.run(world.clock.now_ms() + LOOK_EVERY_MS)
        world.note("drained")
        world.run(world.clock.now_ms() + LINGER_MS)
        self.checkers.at_end(lambda records: refold(self.settings, records))

    def _outcome(self, failure: str) -> Outcome:
        statuses: dict[str, int] = {}
        for result in self.checkers.terminal.values():
            statuses[result.status] = statuses.get(result.status, 0) + 1
        return Outcome(
            scenario=self.name,
            seed=self.world.seed,
            failure=failure,
            elapsed_ms=self.world.elapsed_ms,
            requests=len(self.traffic.expected),
            transactions=self.checkers.transactions,
            statuses=dict(sorted(statuses.items())),
            faults=dict(sorted(self.faults.counts.items())),
            marks=dict(sorted({**self.checkers.marks, **self.parts.moved}.items())),
            exits=dict(sorted(self.world.exits.items())),
            digest=self.world.digest(),
            tail=list(self.world.tail),
        )
