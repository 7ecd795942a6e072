"""`python -m processors.egress.main --id 0`: shared Stage 2 of pooled models. Several may run, each with its own id."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from processors.edge.service import LogWatcher, kafka_ports, serve
from processors.egress.host import EgressHost
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.logs import configure_logs
from sie_stream.edge.stop import EXIT_CONFIG, StopFlag
from sie_stream.edge.tokenizer import TokenizerStore
from sie_stream.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="processors.egress.main", description=__doc__)
    parser.add_argument("--id", default="0", help="its name; a second one of the same name fences the first")
    member = f"egress-{parser.parse_args(arguments).id}"
    log = configure_logs("egress", member)
    stop = StopFlag.on_signals()
    try:
        settings = load_settings()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    hosts: list[EgressHost] = []

    def make() -> EgressHost:
        transactional_id = settings.topics.egress_transactional_id(member.removeprefix("egress-"))
        ports = kafka_ports(settings, transactional_id, member)
        hosts.append(EgressHost(settings, ports, TokenizerStore().get, LogWatcher(log)))
        return hosts[0]

    def counts() -> Mapping[str, object]:
        if not hosts:
            return {}
        counters = hosts[0].machine.counts
        return {name: getattr(counters, name) for name in counters.__struct_fields__}

    return serve(make, stop, log, {"component": "egress", "id": member}, counts)


if __name__ == "__main__":
    sys.exit(main())
