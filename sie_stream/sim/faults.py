"""What goes wrong in a world, and when. All chance comes from the world's one generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from sie_stream.errors import FatalLogError, Retriable, TransactionAborted
from sie_stream.ids import TopicNames
from sie_stream.sim.scenario import (
    BrokerErrors,
    Delete,
    Drain,
    Evict,
    Fault,
    Hold,
    JoinLeave,
    Kill,
    KillEngine,
    LoseDevice,
    NewVersion,
    Pause,
    Role,
    Scenario,
    SlowCalls,
    SlowEngine,
    Span,
    Stop,
    Twin,
)
from sie_stream.sim.world import EXIT_KILLED, Killed, Lane, Process, World

TRANSACTIONAL = ("write", "send_offsets", "commit", "abort")
PASSING = ("poll", "committed", "offsets", "metadata", "plain_write")
"""Calls that may raise Retriable: reads, and plain writes."""
STRIKE_AT: tuple[tuple[str, str], ...] = (
    ("before", "write"),
    ("before", "write"),
    ("before", "send_offsets"),
    ("before", "send_offsets"),
    ("after", "send_offsets"),
    ("before", "commit"),
    ("after", "commit"),
    ("before", "commit"),
    ("after", "commit"),
    ("before", "poll"),
    ("before", "committed"),
    ("before", "plain_write"),
    ("before", "init"),
    ("after", "init"),
)
PATIENCE_MS = 1_000
"""When the call never comes, the blow falls between two turns."""


@dataclass(slots=True)
class Armed:
    """A blow that waits for a certain call of one process. `pause_ms` 0: it kills."""

    when: str
    operation: str
    pause_ms: int


class Faults:
    """Implements world.Strikes, and schedules everything else that a scenario asks for."""

    def __init__(self, world: World, scenario: Scenario, names: TopicNames) -> None:
        self.world = world
        self.names = names
        self.heal_at_ms = world.start_ms + scenario.heal_at_ms
        self.slow_until_ms: dict[str, tuple[int, float]] = {}
        """Worker -> (until when, by what factor) its engines run slower."""
        self.lost_until_ms: dict[str, int] = {}
        """Worker -> until when its first device is gone."""
        self.kill_engine: Callable[[Process], None] = lambda process: None
        self.new_version: Callable[[], None] = lambda: None
        self.delete: Callable[[int | None], None] = lambda for_ms: None
        """For how long; None: for good."""
        self.drain: Callable[[Process, int], None] = lambda worker, for_ms: None
        self.counts: dict[str, int] = {}
        self._errors = BrokerErrors()
        self._slow_calls = SlowCalls(0.0)
        self._armed: dict[Process, Armed] = {}
        self._extra = 0
        for fault in scenario.faults:
            if world.random.random() >= scenario.swarm:
                self._begin(fault)

    @property
    def healed(self) -> bool:
        return self.world.clock.now_ms() >= self.heal_at_ms

    def _begin(self, fault: Fault) -> None:
        match fault:
            case BrokerErrors():
                self._errors = fault
            case SlowCalls():
                self._slow_calls = fault
            case _:
                self._again(fault)

    def _again(self, fault: Fault) -> None:
        """Let a fault that comes now and then come once more, unless the world is healed by then."""
        assert not isinstance(fault, (BrokerErrors, SlowCalls))
        at_ms = self.world.clock.now_ms() + self.world.between(fault.every_ms)
        if at_ms < self.heal_at_ms:
            self.world.at(at_ms, lambda: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        self._again(fault)
        match fault:
            case Kill() | Pause():
                self._hit(fault)
            case Stop():
                self._stop(fault)
            case JoinLeave():
                self._join(fault)
            case Twin():
                self._twin(fault)
            case Evict():
                self._evict(fault)
            case Hold():
                self._hold(fault)
            case SlowEngine():
                self._slow_engine(fault)
            case LoseDevice():
                self._lose_device(fault)
            case KillEngine():
                self._kill_engine()
            case NewVersion():
                self._count("new_version")
                self.new_version()
            case Delete():
                self._count("delete")
                self.delete(None if self._chance(fault.for_good) else self._before_heal(fault.for_ms))
            case Drain():
                self._drain(fault)
            case BrokerErrors() | SlowCalls():
                raise AssertionError(f"{fault} is not a single event")
            case _:
                assert_never(fault)

    def _lose_device(self, fault: LoseDevice) -> None:
        worker = self._victim("worker")
        if worker is not None:
            self._count("lose_device")
            until_ms = self.world.clock.now_ms() + self._before_heal(fault.for_ms)
            self.lost_until_ms[worker.name] = max(until_ms, self.lost_until_ms.get(worker.name, 0))

    def lost_device(self, worker: str) -> bool:
        return self.world.clock.now_ms() < self.lost_until_ms.get(worker, 0)

    def _drain(self, fault: Drain) -> None:
        worker = self._victim("worker")
        if worker is not None:
            self._count("drain")
            self.drain(worker, self._before_heal(fault.for_ms))

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _victim(self, role: Role) -> Process | None:
        candidates = [process for process in self.world.alive(role) if process not in self._armed]
        return self.world.random.choice(candidates) if candidates else None

    def _before_heal(self, span: Span) -> int:
        """A duration out of `span` that ends when the world is healed, at the latest."""
        return max(1, min(self.world.between(span), self.heal_at_ms - self.world.clock.now_ms()))

    # ------------------------------------------------------------ processes

    def _hit(self, fault: Kill | Pause) -> None:
        process = self._victim(fault.target)
        if process is None:
            return
        pause_ms = self._before_heal(fault.for_ms) if isinstance(fault, Pause) else 0
        if isinstance(fault, Kill):
            process.restart_ms = fault.restart_ms if process.restart_ms is not None else None
        if self.world.random.random() >= fault.in_call:
            self._blow(process, pause_ms)
            return
        when, operation = self.world.random.choice(STRIKE_AT)
        self._armed[process] = armed = Armed(when, operation, pause_ms)
        self.world.after(PATIENCE_MS, lambda: self._lose_patience(process, armed))

    def _lose_patience(self, process: Process, armed: Armed) -> None:
        if self._armed.get(process) is armed:
            del self._armed[process]
            if not self.healed:
                self._blow(process, armed.pause_ms)

    def _blow(self, process: Process, pause_ms: int) -> None:
        if not process.alive:
            return
        name = f"{process.name}/{process.incarnation}"
        if pause_ms:
            self._count(f"pause_{process.role}")
            self.world.note(f"pause {name} for {pause_ms} ms")
            self.world.freeze(process, self.world.clock.now_ms() + pause_ms)
        else:
            self._count(f"kill_{process.role}")
            self.world.note(f"kill {name}")
            self.world.end(process, EXIT_KILLED)

    def _stop(self, fault: Stop) -> None:
        process = self._victim(fault.target)
        if process is not None and process.body is not None:
            self._count(f"stop_{process.role}")
            self.world.note(f"stop {process.name}/{process.incarnation}")
            process.restart_ms = fault.restart_ms if process.restart_ms is not None else None
            process.body.ask_to_stop()

    def _join(self, fault: JoinLeave) -> None:
        self._extra += 1
        self._count(f"join_{fault.target}")
        process = self.world.spawn(fault.target, f"{fault.target}-extra{self._extra}", restart_ms=None)
        name = process.name

        def leave() -> None:
            now = self.world.processes[name]
            if now.alive and now.body is not None:
                self.world.note(f"stop {now.name}/{now.incarnation}")
                now.body.ask_to_stop()

        self.world.after(self._before_heal(fault.stay_ms), leave)

    def _twin(self, fault: Twin) -> None:
        process = self._victim(fault.target)
        if process is not None and process.restart_ms is not None:
            self._count(f"twin_{process.role}")
            self.world.note(f"a twin of {process.name}/{process.incarnation}")
            self.world.spawn(process.role, process.name, process.restart_ms)

    # ------------------------------------------------------------ broker and engines

    def _evict(self, fault: Evict) -> None:
        self._count("evict")
        group = self.names.ingress_group if fault.target == "ingress" else self.names.egress_group
        self.world.note(f"evict a member of {group}")
        self.world.log.evict(group, self.world.random.randrange(8))

    def _hold(self, fault: Hold) -> None:
        held = (self.names.requests, self.names.outputs)
        prefix = self.names.work("")
        places = [
            partition.place
            for topic, partitions in self.world.log.cluster.topics.items()
            if topic in held or topic.startswith(prefix)
            for partition in partitions
        ]
        if not places:
            return
        self._count("hold")
        place = self.world.random.choice(places)
        for_ms = self._before_heal(fault.for_ms)
        self.world.note(f"hold {place.topic}[{place.partition}] for {for_ms} ms")
        self.world.log.hold(place, self.world.clock.now_ms() + for_ms)

    def _slow_engine(self, fault: SlowEngine) -> None:
        process = self._victim("worker")
        if process is None:
            return
        self._count("slow_engine")
        for_ms = self._before_heal(fault.for_ms)
        self.world.note(f"slow engines of {process.name} for {for_ms} ms")
        self.slow_until_ms[process.name] = (self.world.clock.now_ms() + for_ms, fault.factor)

    def slowness(self, worker: str) -> float:
        until_ms, factor = self.slow_until_ms.get(worker, (0, 1.0))
        return factor if self.world.clock.now_ms() < until_ms else 1.0

    def _kill_engine(self) -> None:
        process = self._victim("worker")
        if process is not None:
            self._count("kill_engine")
            self.world.note(f"kill the engines of {process.name}/{process.incarnation}")
            self.kill_engine(process)

    # ------------------------------------------------------------ calls

    def before(self, lane: Lane, operation: str) -> None:
        if lane.process in self._armed:
            self._meet(lane, "before", operation)
        if self.healed:
            return
        if operation in TRANSACTIONAL:
            self._trouble_in_transaction(lane, operation)
        elif operation in PASSING and self._chance(self._errors.retriable):
            self._count("retriable")
            raise Retriable(f"simulated trouble: {operation}")

    def after(self, lane: Lane, operation: str) -> None:
        if lane.process in self._armed:
            self._meet(lane, "after", operation)
        if operation == "commit" and not self.healed and self._chance(self._errors.unknown / 2):
            self._count("commit_answer_lost")
            raise FatalLogError("simulated trouble: the outcome of the commit is unknown (it was done)")

    def _chance(self, share: float) -> bool:
        return share > 0 and self.world.random.random() < share

    def _meet(self, lane: Lane, when: str, operation: str) -> None:
        armed = self._armed[lane.process]
        if armed.when != when or armed.operation != operation:
            return
        del self._armed[lane.process]
        if self.healed:
            return
        self._count(f"in_{operation}")
        self.world.note(f"{when} {operation} of {lane.client}:")
        self._blow(lane.process, armed.pause_ms)
        if not lane.process.alive:
            raise Killed
        self.world.block(lane, armed.pause_ms)

    def _trouble_in_transaction(self, lane: Lane, operation: str) -> None:
        if self._chance(self._slow_calls.share):
            self._count("slow_call")
            self.world.block(lane, self.world.between(self._slow_calls.for_ms))
        if operation == "abort":
            return
        if self._chance(self._errors.aborted):
            self._count("aborted")
            raise TransactionAborted(f"simulated trouble: {operation}")
        if operation == "commit" and self._chance(self._errors.unknown / 2):
            self._count("commit_request_lost")
            raise FatalLogError("simulated trouble: the outcome of the commit is unknown (it was not done)")
