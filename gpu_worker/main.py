"""`python -m gpu_worker.main --id w0`: a worker process. Loads what the scheduler places on it and answers its work.

Exit codes: 0 clean stop, 75 fenced by a newer incarnation or by the scheduler, 78 wrong settings, 1 anything else.
A supervisor starts a new incarnation in every case but the first.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import secrets
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import structlog
from msgspec import Raw

from gpu_worker.backends.base import backend_names
from gpu_worker.committer import TransactionRunner
from gpu_worker.edge.cgroup import EngineGroups
from gpu_worker.edge.commit_thread import ThreadCommitter
from gpu_worker.edge.device_arena import DeviceArena
from gpu_worker.edge.devices import find_devices, find_topology
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.edge.gpu_health import GpuHealth
from gpu_worker.edge.image_exchange import ImageExchange
from gpu_worker.edge.observer import LogObserver
from gpu_worker.edge.stage2 import Stage2Store
from gpu_worker.edge.telemetry import TelemetryObserver
from gpu_worker.edge.work_reader import WorkReader, fetch_wait_ms
from gpu_worker.engine_port import EngineKey
from gpu_worker.facts import Identity
from gpu_worker.host import WorkerHost
from gpu_worker.isolation import engine_limits
from gpu_worker.machine import WorkerMachine
from gpu_worker.managed import MIB, host_bytes
from gpu_worker.outcomes import Outcomes
from gpu_worker.switching import memory_samples
from gpu_worker.telemetry import Telemetry
from sie_stream.deadline import Deadline
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.kafka_log import KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.keyring import Keyring
from sie_stream.edge.logs import configure_logs
from sie_stream.edge.stop import EXIT_CONFIG, EXIT_FAILED, EXIT_FENCED, StopFlag
from sie_stream.errors import ConfigError, Fenced, SieError, did_you_mean
from sie_stream.privacy.vault import Vault
from sie_stream.settings import TIERS, Settings
from sie_stream.topology.records import GpuTopology
from sie_stream.worker_marks import parse_labels, parse_taints

SWITCH_INTERVAL_S = 0.001
"""The commit thread gets its turn this soon while the loop is busy (default 5 ms, several times per commit)."""
GC_THRESHOLDS = (20_000, 20, 20)
STOP_BUDGET_MS = 10_000
FLUSH_MS = 2_000
LIBRARIES = ("sie-stream", "confluent-kafka", "msgspec", "scikit-learn", "onnxruntime", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    log = configure_logs("worker", options.id)
    stop = StopFlag.on_signals()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        settings = load_settings({} if options.memory_mb is None else {"cpu_memory_mb": options.memory_mb})
        if not settings.bootstrap_servers:
            raise ConfigError("bootstrap_servers is empty: set SIE_STREAM_BOOTSTRAP_SERVERS, or use `sie-stream up`")
        identity = make_identity(options, settings, find_topology(log))
        prestart = known_backends("setting prestart_engines", settings.prestart_engines, identity.backends)
        spares = known_backends("setting spare_engines", settings.spare_engines, identity.backends)
        vault = _vault(settings, log) if settings.pii_keys else None
        process = WorkerProcess(settings, identity, log, vault, prestart, spares)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    try:
        return process.run(stop)
    except Fenced as fenced:
        log.warning("fenced", incarnation=identity.incarnation, error=str(fenced))
        return EXIT_FENCED
    except SieError as error:
        log.error("stopped", kind=type(error).__name__, error=str(error), exc_info=True)
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_worker.main", description=__doc__)
    parser.add_argument(
        "--id", required=True, help="name of the worker; a second process of that name fences the first"
    )
    parser.add_argument("--incarnation", default="", help="unique name of this life of the process (made if absent)")
    parser.add_argument("--memory-mb", type=int, default=None, help="declared memory of the cpu device")
    parser.add_argument("--tier", choices=TIERS, default=None, help="default: setting worker_tier")
    parser.add_argument("--backends", default="", help="comma-separated; default: all that are installed")
    return parser


def make_identity(options: argparse.Namespace, settings: Settings, topology: GpuTopology) -> Identity:
    """Raises ConfigError for a backend nobody registered."""
    known = backend_names()
    backends = known_backends("--backends", options.backends, known) or known
    made = f"{options.id}-{SystemClock().now_ms():x}-{secrets.token_hex(3)}"
    return Identity(
        worker=options.id,
        incarnation=options.incarnation or made,
        host=socket.gethostname(),
        pid=os.getpid(),
        devices=find_devices(settings.cpu_memory_mb if not settings.device_memory_mb else host_bytes(settings) // MIB),
        backends=tuple(backends),
        versions=_versions(),
        labels=parse_labels(settings.worker_labels),
        taints=parse_taints(settings.worker_taints),
        tier=settings.worker_tier if options.tier is None else options.tier,
        topology=Raw(msgspec.json.encode(topology)),
    )


def known_backends(field: str, names: str, known: Sequence[str]) -> tuple[str, ...]:
    """Of names separated by commas. Raises ConfigError for one that this worker does not have."""
    found = tuple(dict.fromkeys(name for name in map(str.strip, names.split(",")) if name))
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{field}: {name!r} is not installed here. Installed: {', '.join(known)}.{did_you_mean(name, known)}"
            )
    return found


def _vault(settings: Settings, log: structlog.stdlib.BoundLogger) -> Vault:
    """Raises ConfigError for a key ring that cannot be used."""
    ring = Keyring(Path(settings.pii_keys), lambda why: log.warning("key_refused", why=why))
    return Vault(ring, settings.topics.keys)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def device_arenas(settings: Settings, identity: Identity) -> dict[str, DeviceArena]:
    """Of the devices with a budget. Raises ConfigError when the machine has not so much memory."""
    size, folder = settings.device_memory_mb * MIB, Path(settings.state_dir) / "images"
    return {device.device: DeviceArena(size, folder) for device in identity.devices if size and device.kind == "cpu"}


def calm_garbage_collector() -> None:
    """Records and items form no cycles: collecting every 700 allocations costs 10 % of the hot path for nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


class WorkerProcess:
    """Wires one worker to Kafka and to engine processes, and runs its loop. Raises ConfigError for engine_cgroup,
    device_memory_mb and sequence_images_host.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        log: structlog.stdlib.BoundLogger,
        vault: Vault | None,
        prestart: tuple[str, ...] = (),
        spares: tuple[str, ...] = (),
    ) -> None:
        """`prestart`: backends whose engines are started before a model asks for them. `spares`: see EngineLinks."""
        self._settings = settings
        self._prestart = prestart
        self._spares = spares
        self._vault = vault
        self._identity = identity
        self._log = log
        self._clock = SystemClock()
        folder = settings.engine_cgroup
        self._groups = EngineGroups(Path(folder), identity.worker, log) if folder else None
        self._arenas = device_arenas(settings, identity)
        self._images = (
            ImageExchange(settings.sequence_images_host, self._clock) if settings.sequence_images_mb else None
        )
        if self._images is not None:
            self._identity = msgspec.structs.replace(identity, images_at=self._images.address)

    def run(self, stop: StopFlag) -> int:
        settings, identity, clock = self._settings, self._identity, self._clock
        names, bootstrap, overrides = settings.topics, settings.bootstrap_servers, settings.client_overrides
        writer = KafkaTransactionalWriter(
            bootstrap,
            names.worker_transactional_id(identity.worker),
            settings.transaction_timeout_ms,
            overrides,
            settings.record_bytes_max,
        )
        # First of all: from here on no earlier incarnation of this worker can commit anything.
        writer.init()
        placements = KafkaReader(bootstrap, names.worker_group, overrides)
        # Reports wait for the broker as long as it takes: a lost ReplicaReady would leave a replica loading for ever.
        # But the loop, which sends the heartbeats, must not wait for a topic that somebody deleted: samples and token
        # deltas go by it, and two seconds of silence are a lost worker.
        hurried = (names.telemetry, names.tokens, names.wakeups)
        reports = KafkaPlainWriter(bootstrap, overrides, delivery_timeout_ms=0, without_waiting=hurried)
        work = WorkReader(bootstrap, names, overrides, reports, clock, fetch_wait_ms(reports, names))
        engines = self._engines()
        committer = ThreadCommitter(TransactionRunner(writer, work, clock, names.prefix), engines.wake)
        machine = WorkerMachine(identity, settings, self._outcomes())
        observer = LogObserver(self._log)
        health = GpuHealth(identity.devices, self._log)
        telemetry = TelemetryObserver(
            Telemetry(identity), reports, names.telemetry, health.samples, lambda: memory_samples(machine.state)
        )
        observers, images = (observer, telemetry), self._images
        host = WorkerHost(
            *(machine, work, placements, committer, reports, engines, clock, names, observers, health.changes, images)
        )
        if images is not None:
            images.start(engines.wake)
        health.start()
        try:
            for device in identity.devices:
                for backend in self._prestart:
                    engines.start(EngineKey(device.device, backend))
            host.run_turn()
            calm_garbage_collector()
            self._say_ready()
            while not stop:
                host.run_turn()
            self._stop(host)
            observer.tell_counts()
            reports.flush(FLUSH_MS)
        finally:
            health.close()
            if images is not None:
                images.close()
            engines.close()
        committer.close(FLUSH_MS / 1000)
        for client in (work, placements, writer, reports):
            client.close()
        self._log.info("stopped_cleanly")
        return 0

    def _outcomes(self) -> Outcomes:
        settings, identity = self._settings, self._identity
        return Outcomes(
            settings.topics,
            identity,
            settings.record_bytes_max,
            settings.deadletter_bytes_max,
            Stage2Store(settings.record_bytes_max),
            self._vault,
        )

    def _engines(self) -> EngineLinks:
        settings, identity = self._settings, self._identity
        return EngineLinks(
            settings.engine_threads,
            engine_limits(settings, identity.tier, identity.devices),
            groups=self._groups,
            arenas=self._arenas,
            kv_tier_bytes=settings.kv_tier_mb * 1024**2,
            spares=self._spares,
        )

    def _stop(self, host: WorkerHost) -> None:
        """Finish what runs, commit it, leave; what does not finish in time is left to the next owner."""
        host.request_stop()
        deadline = Deadline.after(self._clock.now_ms(), STOP_BUDGET_MS)
        while not host.finished:
            if deadline.passed(self._clock.now_ms()):
                self._log.warning("stop_budget_exceeded", budget_ms=STOP_BUDGET_MS)
                return
            host.run_turn()

    def _say_ready(self) -> None:
        ready = {
            "event": "ready",
            "component": "worker",
            "id": self._identity.worker,
            "pid": self._identity.pid,
            "incarnation": self._identity.incarnation,
        }
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
