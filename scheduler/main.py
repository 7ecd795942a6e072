"""`python -m scheduler.main`: a scheduler process. Stands by while another one leads, and leads when none does.

Exit codes: 0 clean stop, 75 another scheduler took over, 78 wrong settings, 1 anything else. A supervisor starts it
again in every case but the first, and it stands by.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence

import structlog

from scheduler.edge.effects_threads import ThreadedEffects
from scheduler.edge.fencer import KafkaFencer
from scheduler.host import SchedulerHost
from scheduler.standby import Standby
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.kafka_log import KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.logs import configure_logs
from sie_stream.edge.stop import EXIT_CONFIG, EXIT_FAILED, EXIT_FENCED, StopFlag
from sie_stream.errors import ConfigError, Fenced, SieError
from sie_stream.settings import Settings
from topics.catalog import system_topics
from topics.edge.admin import KafkaAdmin


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scheduler.main", description=__doc__)
    parser.add_argument("--id", default="", help="unique name of this life of the process (made if absent)")
    options = parser.parse_args(arguments)
    scheduler = options.id or f"s-{SystemClock().now_ms():x}-{secrets.token_hex(3)}"
    log = configure_logs("scheduler", scheduler)
    stop = StopFlag.on_signals()
    try:
        settings = load_settings()
        if not settings.bootstrap_servers:
            raise ConfigError("bootstrap_servers is empty: set SIE_STREAM_BOOTSTRAP_SERVERS, or use `sie-stream up`")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    try:
        SchedulerProcess(settings, scheduler, log).run(stop)
    except Fenced as fenced:
        # Losing an election is no fault: the next life of this process stands by.
        log.info("another_scheduler_leads", error=str(fenced))
        return EXIT_FENCED
    except SieError as error:
        log.error("stopped", kind=type(error).__name__, error=str(error), exc_info=True)
        return EXIT_FAILED
    return 0


class SchedulerProcess:
    """Wires one scheduler to Kafka and runs its loop."""

    def __init__(self, settings: Settings, scheduler: str, log: structlog.stdlib.BoundLogger) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._log = log
        self._clock = SystemClock()
        bootstrap, overrides = settings.bootstrap_servers, settings.client_overrides
        self._admin = KafkaAdmin(bootstrap, overrides, settings.replication_factor)
        self._reader = KafkaReader(bootstrap, settings.topics.scheduler_group, overrides)
        self._writer = KafkaTransactionalWriter(
            bootstrap,
            settings.topics.scheduler_transactional_id,
            settings.transaction_timeout_ms,
            overrides,
            settings.record_bytes_max,
        )
        self._plain = KafkaPlainWriter(bootstrap, overrides)
        fencer = KafkaFencer(bootstrap, overrides, settings.transaction_timeout_ms, settings.fence_timeout_ms)
        self._effects = ThreadedEffects(fencer, self._admin, settings, self._clock, self._notice)

    def run(self, stop: StopFlag) -> None:
        """Until asked to stop. Raises Fenced when another scheduler takes over."""
        try:
            self._admin.ensure(system_topics(self._settings))
            if self._stand_by(stop):
                self._lead(stop)
        finally:
            self._effects.close()
            self._reader.close()
            self._writer.close()
            self._plain.close()

    def _stand_by(self, stop: StopFlag) -> bool:
        """True when it is time to lead, False when asked to stop."""
        standby = Standby(self._settings, self._reader, self._clock)
        standby.start()
        waiting = False
        while not stop:
            if standby.turn():
                standby.stop()
                return True
            if not waiting:
                waiting = True
                self._say("standby")
        return False

    def _lead(self, stop: StopFlag) -> None:
        host = SchedulerHost(
            self._settings,
            self._scheduler,
            self._reader,
            self._writer,
            self._plain,
            self._effects,
            self._clock,
            self._notice,
        )
        host.start()
        self._say("ready")
        while not stop:
            host.turn()
        host.stop()

    def _say(self, event: str) -> None:
        """One line on standard output, for whoever started the process."""
        print(json.dumps({"event": event, "component": "scheduler", "scheduler": self._scheduler}), flush=True)

    def _notice(self, event: str, fields: dict[str, str | int]) -> None:
        self._log.info(event, **fields)


if __name__ == "__main__":
    sys.exit(main())
