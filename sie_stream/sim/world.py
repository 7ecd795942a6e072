"""A world: virtual time, processes that live and die in it, and the one source of chance. A seed makes it whole.

Everything that happens is an event of a lane. A lane is one thread of a process and runs the very same host code as
production; its calls to the log pass through `before` and `after`, where faults strike. A call that takes long (a slow
broker, a process stopped in the middle of it) runs the rest of the world inside the call until it returns, so hosts
need no threads and no knowledge of being simulated. The only thing this cannot show is a call that returns before
another one that started later inside it.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sie_stream.errors import Fenced, SieError
from sie_stream.sim.clock import SimClock
from sie_stream.sim.log import SimLog
from sie_stream.sim.scenario import Role, Span

EXIT_CLEAN = 0
EXIT_FAILED = 1
EXIT_FENCED = 75
EXIT_KILLED = -9

DEPTH_MAX = 6
"""How deep calls that take long may nest."""
REQUEUE_MS = 3
TAIL = 60
"""Lines of the trace that are kept for the report of a failure."""


class Killed(BaseException):
    """Ends the lane of a dead process wherever it is. Not an Exception: no host may catch it."""


class Violation(AssertionError):
    """A checker found something that must never be."""


class Body(Protocol):
    """What a process does. Made anew for every incarnation."""

    def start(self) -> None: ...

    def turn(self) -> float | None:
        """Milliseconds until the next turn; None: the process has ended cleanly."""
        ...

    def ask_to_stop(self) -> None:
        """SIGTERM."""
        ...


class Process:
    """One incarnation."""

    def __init__(self, role: Role, name: str, incarnation: str) -> None:
        self.role: Role = role
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.frozen_until_ms = 0
        self.lanes: list[Lane] = []
        self.body: Body | None = None
        self.restart_ms: Span | None = (100, 1_500)
        """None: it is not to come back."""


class Lane:
    """One thread of a process. `client` is the name its calls to the log carry."""

    def __init__(self, world: World, process: Process, client: str) -> None:
        self.world = world
        self.process = process
        self.client = client
        self.busy = False

    def later(self, after_ms: float, action: Callable[[], None]) -> None:
        self.world.at(self.world.clock.now_ms() + max(1, round(after_ms)), action, self)


class Strikes(Protocol):
    """Where faults strike: called around every call to the log that a process makes."""

    def before(self, lane: Lane, operation: str) -> None: ...

    def after(self, lane: Lane, operation: str) -> None: ...


class World:
    """Everything there is. `make` builds the processes; checkers and faults are plugged in by their owners."""

    def __init__(self, seed: int, make: Callable[[World, Lane], Body], trace: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.clock = SimClock()
        self.start_ms = self.clock.now_ms()
        self.log = SimLog(self.clock)
        self.log.cluster.before = self._before
        self.log.cluster.after = self._after
        self.processes: dict[str, Process] = {}
        """The newest incarnation of every process, dead or alive."""
        self.strikes: Strikes | None = None
        self.calling = ""
        """Client whose call to the log is under way."""
        self.process_ended: Callable[[Process, int], None] = lambda process, code: None
        self.exits: dict[int, int] = {}
        self._make = make
        self._lanes: dict[str, Lane] = {}
        self._events: list[tuple[int, int, Lane | None, Callable[[], None]]] = []
        self._sequence = 0
        self._depth = 0
        self._incarnations = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.tail: deque[str] = deque(maxlen=None if trace else TAIL)

    # ------------------------------------------------------------ time

    @property
    def elapsed_ms(self) -> int:
        return self.clock.now_ms() - self.start_ms

    def between(self, span: Span) -> int:
        return self.random.randint(*span)

    def at(self, at_ms: int, action: Callable[[], None], lane: Lane | None = None) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (at_ms, self._sequence, lane, action))

    def after(self, after_ms: int, action: Callable[[], None]) -> None:
        self.at(self.clock.now_ms() + after_ms, action)

    def run(self, until_ms: int, done: Callable[[], bool] = lambda: False) -> None:
        """Let things happen until `until_ms` (clock time), or until `done`."""
        events = self._events
        while events and events[0][0] <= until_ms and not done():
            at_ms, _, lane, action = heapq.heappop(events)
            self.clock.advance_to(at_ms)
            if lane is None:
                action()
            else:
                self._run_in(lane, action)
        if not done():
            self.clock.advance_to(until_ms)

    # ------------------------------------------------------------ processes

    def spawn(self, role: Role, name: str, restart_ms: Span | None = (100, 1_500)) -> Process:
        """Start a process, or its next incarnation."""
        self._incarnations += 1
        process = Process(role, name, f"i{self._incarnations}")
        process.restart_ms = restart_ms
        self.processes[name] = process
        lane = self.lane(process)
        self.note(f"start {lane.client}")

        def start() -> None:
            process.body = self._make(self, lane)
            process.body.start()
            lane.later(1, turn)

        def turn() -> None:
            assert process.body is not None
            wait_ms = process.body.turn()
            if wait_ms is None:
                self.end(process, EXIT_CLEAN)
            else:
                lane.later(wait_ms, turn)

        lane.later(1, start)
        return process

    def lane(self, process: Process, thread: str = "") -> Lane:
        client = f"{process.name}/{process.incarnation}{'.' + thread if thread else ''}"
        lane = self._lanes[client] = Lane(self, process, client)
        process.lanes.append(lane)
        return lane

    def end(self, process: Process, exit_code: int) -> None:
        """The process is gone: it does nothing any more, wherever it was."""
        if not process.alive:
            return
        process.alive = False
        self.exits[exit_code] = self.exits.get(exit_code, 0) + 1
        self.note(f"end {process.name}/{process.incarnation} code {exit_code}")
        self.process_ended(process, exit_code)
        if process.restart_ms is not None and self.processes.get(process.name) is process:
            restart_ms = process.restart_ms
            self.after(self.between(restart_ms), lambda: self._restart(process, restart_ms))

    def _restart(self, process: Process, restart_ms: Span) -> None:
        if self.processes.get(process.name) is process:
            self.spawn(process.role, process.name, restart_ms)

    def alive(self, role: Role) -> list[Process]:
        return [process for process in self.processes.values() if process.role == role and process.alive]

    def freeze(self, process: Process, until_ms: int) -> None:
        process.frozen_until_ms = max(process.frozen_until_ms, until_ms)

    # ------------------------------------------------------------ lanes

    def _run_in(self, lane: Lane, action: Callable[[], None]) -> None:
        process = lane.process
        if not process.alive:
            return
        now_ms = self.clock.now_ms()
        if lane.busy or now_ms < process.frozen_until_ms:
            self.at(max(now_ms + REQUEUE_MS, process.frozen_until_ms), action, lane)
            return
        self._hash.update(b"%d %s\n" % (now_ms - self.start_ms, lane.client.encode()))
        lane.busy = True
        try:
            action()
        except Killed:
            assert not process.alive, f"{lane.client} was ended without being dead"
        except Fenced as error:
            self.note(f"fenced {lane.client}: {error}")
            self.end(process, EXIT_FENCED)
        except SieError as error:
            self.note(f"crash {lane.client}: {type(error).__name__}: {error}")
            self.end(process, EXIT_FAILED)
        finally:
            lane.busy = False

    def block(self, lane: Lane, for_ms: int) -> None:
        """The call that `lane` is in takes this long; the others go on meanwhile."""
        if self._depth >= DEPTH_MAX:
            return
        self._depth += 1
        try:
            self.run(self.clock.now_ms() + for_ms)
        finally:
            self._depth -= 1
        if not lane.process.alive:
            raise Killed

    def _before(self, operation: str, client: str) -> None:
        lane = self._lanes.get(client)
        if lane is None:
            return
        if not lane.process.alive:
            raise Killed
        if self.strikes is not None:
            self.strikes.before(lane, operation)
        self.calling = client

    def _after(self, operation: str, client: str) -> None:
        lane = self._lanes.get(client)
        if lane is not None and self.strikes is not None:
            self.strikes.after(lane, operation)

    # ------------------------------------------------------------ trace

    def note(self, line: str) -> None:
        """One line of what happened; part of the digest."""
        line = f"{self.elapsed_ms:>7} {line}"
        self._hash.update(line.encode())
        self.tail.append(line)

    def digest(self) -> str:
        """Fingerprint of every turn, fault and record of this world."""
        whole = self._hash.copy()
        whole.update(self.log.digest().encode())
        return whole.hexdigest()
