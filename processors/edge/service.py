"""Runs a host as a process: Kafka clients, logs, the ready line, a clean stop, the exit code when fenced."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from processors.turns import Ports
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.kafka_log import KafkaGroupReader, KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.stop import EXIT_CONFIG, EXIT_FAILED, EXIT_FENCED, StopFlag
from sie_stream.errors import ConfigError, Fenced, SieError
from sie_stream.settings import Settings

COUNTS_EVERY_S = 30.0
GC_THRESHOLD = 50_000
"""A batch makes thousands of records that hold no cycles; looking for some each time costs a tenth of the time."""


class Host(Protocol):
    def start(self) -> None: ...

    def turn(self) -> int: ...

    def close(self) -> None: ...


class LogWatcher:
    """Implements processors.turns.Watcher: every event is a line of the log."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log

    def event(self, name: str, **facts: object) -> None:
        self._log.info(name, **facts)


def kafka_ports(settings: Settings, transactional_id: str, member: str, record_bytes_max: int = 0) -> Ports:
    """Ports over real Kafka. `member` makes memberships static, so a restart takes its partitions over at once.
    `record_bytes_max`: of what is written; 0: as the settings have it.

    Raises ConfigError when nothing says where Kafka is.
    """
    bootstrap = settings.bootstrap_servers
    if not bootstrap:
        raise ConfigError("bootstrap_servers is empty: set SIE_STREAM_BOOTSTRAP_SERVERS, or use `sie-stream up`")
    overrides = settings.client_overrides
    return Ports(
        make_reader=lambda group: KafkaReader(bootstrap, group, overrides),
        make_latest_reader=lambda group: KafkaReader(
            bootstrap, group, {**overrides, "isolation.level": "read_uncommitted"}
        ),
        make_group_reader=lambda group: KafkaGroupReader(bootstrap, group, member, overrides),
        writer=KafkaTransactionalWriter(
            bootstrap,
            transactional_id,
            settings.transaction_timeout_ms,
            overrides,
            record_bytes_max or settings.record_bytes_max,
        ),
        make_plain_writer=lambda: KafkaPlainWriter(bootstrap, overrides),
        clock=SystemClock(),
    )


def serve(
    make: Callable[[], Host],
    stop: StopFlag,
    log: structlog.stdlib.BoundLogger,
    ready: Mapping[str, object],
    counts: Callable[[], Mapping[str, object]],
) -> int:
    """Run a host until it is asked to stop. Returns the exit code of the process."""
    try:
        host = make()
        try:
            host.start()
            gc.freeze()  # what start() made lives as long as the process
            gc.set_threshold(GC_THRESHOLD)
            sys.stdout.write(json.dumps({"event": "ready", "pid": os.getpid(), **ready}) + "\n")
            sys.stdout.flush()
            _turns(host, stop, log, counts)
        finally:
            host.close()
    except Fenced as fenced:
        log.warning("fenced", error=str(fenced))
        return EXIT_FENCED
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    except SieError as error:
        log.error("stopped", kind=type(error).__name__, error=str(error), exc_info=True)
        return EXIT_FAILED
    log.info("stopped_cleanly", **counts())
    return 0


def _turns(
    host: Host, stop: StopFlag, log: structlog.stdlib.BoundLogger, counts: Callable[[], Mapping[str, object]]
) -> None:
    said: Mapping[str, object] = {}
    say_at = time.monotonic() + COUNTS_EVERY_S
    while not stop:
        host.turn()
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + COUNTS_EVERY_S
            now = counts()
            if now != said:
                log.info("counts", **now)
            said = now
