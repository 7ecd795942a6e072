"""`python -m processors.bridge.main`: carries requests and results to and from topics on other Kafka clusters."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from processors.bridge.host import BridgeHost, BridgePorts
from processors.bridge.links import ClusterPorts
from processors.edge.service import LogWatcher, serve
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.kafka_log import KafkaGroupReader, KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.logs import configure_logs
from sie_stream.edge.stop import EXIT_CONFIG, StopFlag
from sie_stream.errors import ConfigError
from sie_stream.settings import Settings

MEMBER = "bridge-0"
INIT_BUDGET_MS = 5_000
"""A cluster that does not answer holds the other links up for so long, every few seconds."""


def cluster_ports(settings: Settings, bootstrap: str) -> ClusterPorts:
    """Clients of one cluster; client_overrides (security and the like) apply to all of them."""
    where = bootstrap or settings.bootstrap_servers
    overrides = settings.client_overrides
    return ClusterPorts(
        make_reader=lambda group: KafkaReader(where, group, overrides),
        make_group_reader=lambda group: KafkaGroupReader(where, group, MEMBER, overrides),
        make_committer=lambda name: KafkaTransactionalWriter(
            where, name, settings.transaction_timeout_ms, overrides, init_budget_ms=INIT_BUDGET_MS
        ),
        make_plain_writer=lambda: KafkaPlainWriter(where, overrides),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="processors.bridge.main", description=__doc__).parse_args(arguments)
    log = configure_logs("bridge", MEMBER)
    stop = StopFlag.on_signals()
    try:
        settings = load_settings()
        if not settings.bootstrap_servers:
            raise ConfigError("bootstrap_servers is empty: set SIE_STREAM_BOOTSTRAP_SERVERS, or use `sie-stream up`")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    hosts: list[BridgeHost] = []

    def make() -> BridgeHost:
        ports = BridgePorts(
            cluster=lambda bootstrap: cluster_ports(settings, bootstrap),
            wait=lambda wait_ms: time.sleep(wait_ms / 1000.0),
            clock=SystemClock(),
        )
        hosts.append(BridgeHost(settings, ports, LogWatcher(log)))
        return hosts[0]

    def counts() -> Mapping[str, object]:
        return {"carried": hosts[0].carried} if hosts else {}

    return serve(make, stop, log, {"component": "bridge", "id": MEMBER}, counts)


if __name__ == "__main__":
    sys.exit(main())
