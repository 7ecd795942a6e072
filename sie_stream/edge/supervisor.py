"""Runs the processes of one machine: starts them, watches them, starts them again when they die.

It decides nothing about models or partitions. When a worker process ends, its owner says so on sie.cluster
(WorkerExited), which saves the scheduler the wait for missed heartbeats; it still fences before it reassigns.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sie_stream.edge.orphans import stop_with_parent
from sie_stream.edge.stop import EXIT_CONFIG, EXIT_FENCED
from sie_stream.errors import SieError

RESTART_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0)
READY_MARKS = (b'"ready"', b'"standby"')
"""What a process writes once it does its work, or stands by to do it."""
START_ENDS_MAX = 3
"""So often may a process end while everything starts before the start is given up."""
HEALTHY_AFTER_S = 20.0
"""A process that lived this long starts its backoff again at zero."""


class ProcessFailed(SieError):
    """A process did not become ready; the message carries the end of its log."""

    code = "process_failed"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: `python -m module *arguments`, called `name` in logs and tables.

    `{incarnation}` in an argument becomes the name of this life of the process.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class Child:
    """A running (or restarting) process."""

    spec: ProcessSpec
    log_path: Path
    process: subprocess.Popen[bytes]
    incarnation: str
    started_at: float
    log_offset: int = 0
    restarts: int = 0
    exits_in_a_row: int = 0
    restart_at: float | None = None
    ready: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid


ExitReport = Callable[[Child, int], None]


@dataclass(slots=True)
class Supervisor:
    """Owns the children. `on_exit` is told of every unexpected exit, before the restart."""

    logs_dir: Path
    environment: Mapping[str, str]
    on_exit: ExitReport
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, spec: ProcessSpec) -> Child:
        assert spec.name not in self.children, spec.name
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        log_path = self.logs_dir / f"{spec.name}.log"
        # What an earlier run left in this log says nothing of this process.
        earlier = log_path.stat().st_size if log_path.exists() else 0
        child = Child(spec, log_path, *self._spawn(spec, log_path), started_at=time.monotonic(), log_offset=earlier)
        self.children[spec.name] = child
        return child

    def _spawn(self, spec: ProcessSpec, log_path: Path) -> tuple[subprocess.Popen[bytes], str]:
        incarnation = f"{spec.name}-{time.time_ns() // 1_000_000:x}-{os.urandom(2).hex()}"
        arguments = [argument.format(incarnation=incarnation) for argument in spec.arguments]
        command = [sys.executable, "-m", spec.module, *arguments]
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,  # the terminal's Ctrl-C is ours to pass on, in order
                preexec_fn=stop_with_parent,  # noqa: PLW1509 - one system call, no Python locks
            )
        return process, incarnation

    def wait_ready(self, timeout_s: float, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until every child has written its ready line. Raises ProcessFailed naming the first that did not.

        A child that ends meanwhile starts again, as it would later: Kafka may stand still for longer than a call waits.
        Wrong settings, or one that keeps ending, fail the start, also when it had been ready.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._refuse_the_hopeless()
            self.watch()
            waiting = [child for child in self.children.values() if not self._is_ready(child)]
            if not waiting:
                return
            if time.monotonic() > deadline:
                names = ", ".join(child.spec.name for child in waiting)
                raise ProcessFailed(
                    f"not ready after {timeout_s:.0f} s: {names}.\n"
                    f"End of {waiting[0].log_path}:\n{log_tail(waiting[0].log_path)}"
                )
            tick()
            time.sleep(0.05)

    def _refuse_the_hopeless(self) -> None:
        """Two of a kind started at once fence each other: the one that lost the race stands by in its next life."""
        for child in self.children.values():
            code = child.process.poll()
            if code is None or code == EXIT_FENCED or child.restart_at is not None:
                continue
            if code == EXIT_CONFIG or child.restarts + 1 >= START_ENDS_MAX:
                when = "after it was ready" if child.ready else "before it was ready"
                again = f", {child.restarts + 1} times" if child.restarts else ""
                raise ProcessFailed(
                    f"{child.spec.name} ended with code {code} {when}{again}.\n"
                    f"End of {child.log_path}:\n{log_tail(child.log_path)}"
                )

    def _is_ready(self, child: Child) -> bool:
        if child.restart_at is not None:
            return False  # what it wrote, an earlier life wrote
        if not child.ready:
            with child.log_path.open("rb") as log:
                log.seek(child.log_offset)
                text = log.read()
            child.ready = any(mark in text for mark in READY_MARKS)
        return child.ready

    def watch(self) -> None:
        """One look at every child: report the dead, restart those whose backoff has passed. Call it often."""
        now = time.monotonic()
        for child in self.children.values():
            if child.restart_at is None:
                code = child.process.poll()
                if code is not None:
                    self._note_exit(child, code, now)
            if child.restart_at is not None and now >= child.restart_at:
                self._restart(child, now)

    def _note_exit(self, child: Child, code: int, now: float) -> None:
        lived = now - child.started_at
        child.exits_in_a_row = 0 if lived > HEALTHY_AFTER_S else child.exits_in_a_row + 1
        backoff = RESTART_BACKOFF_S[min(child.exits_in_a_row, len(RESTART_BACKOFF_S) - 1)]
        child.restart_at = now + backoff
        self.on_exit(child, code)

    def _restart(self, child: Child, now: float) -> None:
        child.log_offset = child.log_path.stat().st_size
        child.process, child.incarnation = self._spawn(child.spec, child.log_path)
        child.started_at = now
        child.restart_at = None
        child.restarts += 1
        child.ready = False

    def stop(self, order: Sequence[str], timeout_s: float) -> list[str]:
        """SIGTERM in the given order (name prefixes), then SIGKILL what is left. Returns who had to be killed."""
        killed: list[str] = []
        deadline = time.monotonic() + timeout_s
        for prefix in order:
            group = [child for name, child in self.children.items() if name.startswith(prefix)]
            for child in group:
                if child.process.poll() is None:
                    child.process.send_signal(signal.SIGTERM)
            for child in group:
                try:
                    child.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.process.kill()
                    child.process.wait()
                    killed.append(child.spec.name)
        return killed


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log file."""
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


@dataclass(frozen=True, slots=True)
class RunState:
    """What `up` leaves in the state directory for other commands to find."""

    supervisor_pid: int
    bootstrap_servers: str
    broker_pid: int | None
    processes: dict[str, dict[str, str | int]]
    environment: dict[str, str]
    ready: bool = False

    def save(self, state_dir: Path) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        target = state_dir / "run.json"
        text = json.dumps({name: getattr(self, name) for name in self.__slots__}, indent=1)
        scratch = target.with_suffix(".tmp")
        scratch.write_text(text)
        scratch.replace(target)

    @classmethod
    def load(cls, state_dir: Path) -> RunState | None:
        """The state left by a running `up`; None when none runs (a stale file is ignored)."""
        path = state_dir / "run.json"
        if not path.exists():
            return None
        state = cls(**json.loads(path.read_text()))
        return state if process_alive(state.supervisor_pid) else None

    @staticmethod
    def clear(state_dir: Path) -> None:
        (state_dir / "run.json").unlink(missing_ok=True)


def process_alive(pid: int) -> bool:
    """True when a process with this id exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")
