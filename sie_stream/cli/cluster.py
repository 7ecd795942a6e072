"""Starting and stopping the processes of one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemas.codec import encode_cluster
from sie_stream.cli.topics import register_schemas
from sie_stream.control import WorkerExited
from sie_stream.deadline import Deadline
from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker
from sie_stream.edge.broker_home import HOST, is_free
from sie_stream.edge.connection import Connection
from sie_stream.edge.env_settings import settings_environment
from sie_stream.edge.java import Compiler
from sie_stream.edge.kafka_reach import refuse_unreachable
from sie_stream.edge.supervisor import Child, ProcessFailed, ProcessSpec, RunState, Supervisor, log_tail
from sie_stream.errors import ConfigError, LogError
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from topics.catalog import system_topics
from topics.edge.admin import KafkaAdmin

STOP_ORDER = ("bridge", "ingress", "worker", "egress", "outcomes", "metrics", "scheduler")
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
Say = Callable[[str], None]
Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Layout:
    """How many processes of each kind run here."""

    workers: int = 2
    ingress: int = 1
    egress: int = 1
    schedulers: int = 1
    compiler: Compiler = "quick"
    """Of the embedded broker."""
    tiers: tuple[str, ...] = ()
    """Of the workers, in turn; none: as the settings say."""
    metrics_port: int = 0
    """Where Prometheus finds metrics; 0: nowhere."""

    def processes(self) -> list[ProcessSpec]:
        specs = [ProcessSpec(f"scheduler-{n}", "scheduler.main") for n in range(self.schedulers)]
        specs += [ProcessSpec(f"worker-{n}", "gpu_worker.main", self._worker(n)) for n in range(self.workers)]
        specs += [ProcessSpec(f"ingress-{n}", "processors.ingress.main", ("--id", str(n))) for n in range(self.ingress)]
        specs += [ProcessSpec(f"egress-{n}", "processors.egress.main", ("--id", str(n))) for n in range(self.egress)]
        specs.append(ProcessSpec("outcomes-0", "processors.outcomes.main"))
        if self.metrics_port:
            specs.append(ProcessSpec("metrics-0", "processors.metrics.main", ("--port", str(self.metrics_port))))
        return [*specs, ProcessSpec("bridge-0", "processors.bridge.main")]

    def _worker(self, number: int) -> tuple[str, ...]:
        tier = ("--tier", self.tiers[number % len(self.tiers)]) if self.tiers else ()
        return ("--id", f"worker-{number}", "--incarnation", "{incarnation}", *tier)


class Cluster:
    """A running set of processes, with its own broker unless settings name a Kafka. Always `stop()` it."""

    def __init__(
        self, settings: Settings, layout: Layout, say: Say = lambda _text: None, check: Check = lambda: None
    ) -> None:
        """`check` is called while the start waits; it raises Interrupted when the start is to be given up."""
        self.state_dir = Path(settings.state_dir).absolute()
        self.layout = layout
        self._say = say
        self._check = check
        self.broker: EmbeddedBroker | None = None
        self.settings = settings
        self.supervisor: Supervisor | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Broker, topics, schemas, processes. Raises ProcessFailed, ConfigError or LogError saying what to do."""
        refuse_if_running(self.state_dir)
        self._start_broker()
        self.connection = Connection(self.settings)
        self._say("topics and schemas")
        KafkaAdmin.of(self.settings).ensure(system_topics(self.settings))
        register_schemas(self.connection)
        self._reports = self.connection.plain_writer()
        self._start_processes()

    def _start_broker(self) -> None:
        if self.settings.bootstrap_servers:
            refuse_unreachable(self.settings.bootstrap_servers)
            return
        self._say("broker: Apache Kafka (embedded)")
        config = BrokerConfig(
            data_dir=self.state_dir / "broker",
            java_home=self.settings.java_home or None,
            cache_dir=Path(self.settings.kafka_dir) if self.settings.kafka_dir else None,
            compiler=self.layout.compiler,
            heap_mb=self.settings.broker_heap_mb or None,
        )
        self.broker = EmbeddedBroker.start(config, Deadline.after(time.monotonic_ns() // 1_000_000, 120_000))
        self.settings = msgspec.structs.replace(self.settings, bootstrap_servers=self.broker.bootstrap_servers)

    def _start_processes(self) -> None:
        child_settings = msgspec.structs.replace(self.settings, state_dir=str(self.state_dir))
        self.environment = settings_environment(child_settings)
        self.supervisor = Supervisor(self.state_dir / "logs", self.environment, self._report_exit)
        for spec in self.layout.processes():
            self._check()
            self._say(spec.name)
            self.supervisor.start(spec)
        self.save_state(ready=False)
        self.supervisor.wait_ready(READY_TIMEOUT_S, self._check)
        self.save_state(ready=True)

    def save_state(self, *, ready: bool) -> None:
        assert self.supervisor is not None
        RunState(
            supervisor_pid=os.getpid(),
            bootstrap_servers=self.settings.bootstrap_servers,
            broker_pid=self.broker.pid if self.broker else None,
            processes={
                name: {
                    "pid": child.pid,
                    "incarnation": child.incarnation,
                    "restarts": child.restarts,
                    "log": str(child.log_path),
                }
                for name, child in self.supervisor.children.items()
            },
            environment=self.environment,
            ready=ready,
        ).save(self.state_dir)

    def _report_exit(self, child: Child, code: int) -> None:
        """A dead worker is news for the scheduler; anything else just restarts."""
        self._say(f"{child.spec.name} ended (code {code}), restarting")
        if child.spec.module != "gpu_worker.main":
            return
        fact = WorkerExited(child.spec.name, child.incarnation, code, reporter=f"supervisor:{os.getpid()}")
        try:
            self._reports.write(
                [LogWrite(self.settings.topics.cluster, encode_cluster(fact), key=child.spec.name.encode())]
            )
            self._reports.flush(1_000)
        except LogError as error:  # the scheduler's heartbeat timeout covers it
            self._say(f"could not report the exit of {child.spec.name}: {error}")

    def watch(self) -> None:
        """One look at broker and children: restarts what died and keeps the state file true."""
        assert self.supervisor is not None
        before = [child.pid for child in self.supervisor.children.values()]
        self.supervisor.watch()
        if before != [child.pid for child in self.supervisor.children.values()]:
            self.save_state(ready=True)
        if self.broker is not None and not self.broker.alive:
            self._say("broker ended, restarting")
            self.broker.restart()

    def stop(self) -> None:
        """Workers commit what they finished, then the broker goes. Safe to call at any time."""
        if self.supervisor is not None:
            killed = self.supervisor.stop(STOP_ORDER, STOP_TIMEOUT_S)
            for name in killed:
                self._say(f"{name} did not stop in time and was killed")
        if self.broker is not None:
            self.broker.stop()
        running = RunState.load(self.state_dir)
        if running is not None and running.supervisor_pid == os.getpid():  # never that of an `up` that refused us
            RunState.clear(self.state_dir)


def refuse_if_running(state_dir: Path) -> None:
    """Raises ConfigError when an `up` already runs on this state folder."""
    running = RunState.load(state_dir)
    if running is not None:
        raise ConfigError(
            f"already running here (pid {running.supervisor_pid}, state in {state_dir}). "
            "Stop it with `sie-stream down`, or set SIE_STREAM_STATE_DIR to another folder."
        )


def refuse_taken_port(port: int) -> None:
    """Raises ConfigError when metrics cannot be served at this port of this machine; 0: they are not."""
    if port and not is_free(port):
        raise ConfigError(
            f"--metrics-port {port}: {HOST}:{port} is taken, or may not be used. "
            "Choose another port, or 0 for no metrics."
        )


def start_detached(arguments: list[str], state_dir: Path, timeout_s: float = 300.0) -> RunState:
    """Run `sie-stream up` in the background; returns once it is ready. Raises ProcessFailed with the end of its log."""
    refuse_if_running(state_dir)
    state_dir.mkdir(parents=True, exist_ok=True)
    log_path = state_dir / "up.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sie_stream.cli.main", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ProcessFailed(f"`up` ended with code {process.returncode}:\n{log_tail(log_path)}")
        state = RunState.load(state_dir)
        if state is not None and state.ready:
            return state
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    raise ProcessFailed(f"`up` was not ready after {timeout_s:.0f} s:\n{log_tail(log_path)}")
