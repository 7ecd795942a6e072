"""`python -m processors.outcomes.main --id 0`: statistics of what variants answer, while something is rolled out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from processors.edge.service import LogWatcher, kafka_ports, serve
from processors.outcomes.host import OutcomesHost
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.logs import configure_logs
from sie_stream.edge.priority import lower_priority
from sie_stream.edge.stop import EXIT_CONFIG, StopFlag
from sie_stream.errors import ConfigError

NICE = 10
"""Statistics can wait for what answers requests. If they never get a turn, the rollout is held, not promoted."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="processors.outcomes.main", description=__doc__)
    parser.add_argument("--id", default="0", help="its name; several may run, every window counts once")
    member = f"outcomes-{parser.parse_args(arguments).id}"
    log = configure_logs("outcomes", member)
    stop = StopFlag.on_signals()
    lower_priority(NICE)
    try:
        settings = load_settings()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    hosts: list[OutcomesHost] = []

    def make() -> OutcomesHost:
        transactional_id = f"{settings.topic_prefix}{member}"  # never used: it writes only facts
        ports = kafka_ports(settings, transactional_id, member)
        hosts.append(OutcomesHost(settings, ports, member, LogWatcher(log)))
        return hosts[0]

    def counts() -> Mapping[str, object]:
        return {"windows": hosts[0].reported, "undecodable": hosts[0].undecodable} if hosts else {}

    return serve(make, stop, log, {"component": "outcomes", "id": member}, counts)


if __name__ == "__main__":
    sys.exit(main())
