"""`python -m processors.metrics.main --port 9464`: results and telemetry as metrics for Prometheus at /metrics."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from processors.edge.prometheus import Exporter
from processors.edge.service import LogWatcher, kafka_ports, serve
from processors.metrics.host import MetricsHost
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.logs import configure_logs
from sie_stream.edge.stop import EXIT_CONFIG, StopFlag
from sie_stream.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="processors.metrics.main", description=__doc__)
    parser.add_argument("--id", default="0", help="its name in logs")
    parser.add_argument("--port", type=int, default=9464, help="0: any free one; the log says which")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at; 0.0.0.0: all")
    options = parser.parse_args(arguments)
    member = f"metrics-{options.id}"
    log = configure_logs("metrics", member)
    stop = StopFlag.on_signals()
    hosts: list[MetricsHost] = []
    try:
        settings = load_settings()
        exporter = Exporter(options.host, options.port)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG

    def make() -> MetricsHost:
        transactional_id = f"{settings.topic_prefix}{member}"  # never used: it only reads
        hosts.append(
            MetricsHost(settings, kafka_ports(settings, transactional_id, member), exporter.publish, LogWatcher(log))
        )
        return hosts[0]

    def counts() -> Mapping[str, object]:
        if not hosts:
            return {}
        return {
            "results": hosts[0].results,
            "samples": hosts[0].samples,
            "undecodable": hosts[0].undecodable,
            "implausible": hosts[0].implausible,
        }

    log.info("serving", host=options.host, port=exporter.port)
    try:
        return serve(make, stop, log, {"component": "metrics", "id": member, "port": exporter.port}, counts)
    finally:
        exporter.close()


if __name__ == "__main__":
    sys.exit(main())
