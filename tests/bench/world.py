"""A broker of its own for every scenario, in a folder that is removed afterwards; and the engine on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from schemas.codec import decode_result
from sie_stream.cli.cluster import Cluster, Layout
from sie_stream.cli.declare import apply_specs, load_specs
from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker
from sie_stream.edge.java import Compiler
from sie_stream.edge.supervisor import ProcessSpec, Supervisor, log_tail
from sie_stream.ports import TopicSpec
from sie_stream.settings import Settings
from tests.bench.workload import MODEL, MODELS_DIR
from tests.waiting import within
from topics.edge.admin import KafkaAdmin

ROOT = Path(__file__).parents[2]
PARTITIONS = 4
READY_S = 90.0


class World:
    """A folder and a running broker."""

    def __init__(self, folder: Path, broker: EmbeddedBroker) -> None:
        self.folder = folder
        self.broker = broker
        self.bootstrap = broker.bootstrap_servers

    def create(self, *topics: str) -> None:
        KafkaAdmin(self.bootstrap).ensure([TopicSpec(topic, PARTITIONS, {}) for topic in topics])


@contextmanager
def world(compiler: Compiler = "quick") -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="sie-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with EmbeddedBroker.start(BrokerConfig(data_dir=folder / "broker", compiler=compiler), within(120)) as broker:
            yield World(folder, broker)


class Job:
    """A contestant's process; its output goes to a file that is shown when it dies."""

    def __init__(self, world: World, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log = world.folder / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=world.folder, env=environment
            )
        self.pid = self._process.pid

    def check(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"{self.name} ended with code {code}:\n{log_tail(self._log, 30)}")

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not listen: its work is measured already."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@contextmanager
def jobs(world: World, commands: Mapping[str, Sequence[str]]) -> Iterator[list[Job]]:
    running: list[Job] = []
    try:
        for name, command in commands.items():
            running.append(Job(world, name, command))
        yield running
    finally:
        for job in running:
            job.stop()


class Engine:
    """The processes of SIE-Stream, started by the same supervisor as `sie-stream up`."""

    def __init__(self, world: World, layout: Layout, **settings_of: Any) -> None:
        settings = Settings(bootstrap_servers=world.bootstrap, state_dir=str(world.folder / "state"), **settings_of)
        self.cluster = Cluster(settings, layout)
        self.topics = settings.topics
        self.bootstrap = world.bootstrap

    @property
    def supervisor(self) -> Supervisor:
        assert self.cluster.supervisor is not None
        return self.cluster.supervisor

    def pids(self, prefix: str) -> list[int]:
        return [child.pid for name, child in self.supervisor.children.items() if name.startswith(prefix)]

    def start(self, spec: ProcessSpec) -> None:
        self.supervisor.start(spec)
        self.supervisor.wait_ready(READY_S)

    def start_ingress(self) -> None:
        self.start(ProcessSpec("ingress-0", "processors.ingress.main", ("--id", "0")))

    def declare(self, names: Sequence[str], replicas: int = 1) -> None:
        """Copies of the one model under these names, and wait until they are ready."""
        spec, folder = load_specs(MODELS_DIR / MODEL / "model-spec.yaml")[0]
        count = spec.replicas.model_copy(update={"min": replicas, "max": replicas})
        specs = [(spec.model_copy(update={"name": name, "replicas": count}), folder) for name in names]
        apply_specs(self.cluster.connection, specs, READY_S, lambda count: None, self.cluster.watch)

    def check(self) -> None:
        """Raises when a process died: what it measured is worth nothing then."""
        for name, child in self.supervisor.children.items():
            code = child.process.poll()
            if code is not None:
                raise RuntimeError(f"{name} ended with code {code}:\n{log_tail(child.log_path, 30)}")


@contextmanager
def engine(world: World, layout: Layout, **settings_of: Any) -> Iterator[Engine]:
    made = Engine(world, layout, **settings_of)
    try:
        made.cluster.start()
        yield made
    finally:
        made.cluster.stop()


def wait(seconds: float) -> None:
    """Let time pass: what is measured is what happens meanwhile."""
    Event().wait(seconds)


def python(module: str, *arguments: str) -> list[str]:
    """A command of this environment."""
    return [sys.executable, "-m", module, *arguments]


def is_ok(value: bytes | None) -> bool:
    """Whether a record of the results topic is a scored result."""
    return decode_result(value).status == "ok"
