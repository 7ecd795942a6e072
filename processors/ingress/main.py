"""`python -m processors.ingress.main --id 0`: decode, dedupe, validate, route. Several may run, each with an own id."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

import msgspec

from processors.edge.service import LogWatcher, kafka_ports, serve
from processors.ingress.edge.contents import reference_reader
from processors.ingress.host import IngressHost
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.logs import configure_logs
from sie_stream.edge.stop import EXIT_CONFIG, StopFlag
from sie_stream.edge.tokenizer import TokenizerStore
from sie_stream.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="processors.ingress.main", description=__doc__)
    parser.add_argument("--id", default="0", help="its name; a second one of the same name fences the first")
    member = f"ingress-{parser.parse_args(arguments).id}"
    log = configure_logs("ingress", member)
    stop = StopFlag.on_signals()
    try:
        settings = load_settings()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    hosts: list[IngressHost] = []

    def make() -> IngressHost:
        transactional_id = settings.topics.ingress_transactional_id(member.removeprefix("ingress-"))
        ports = kafka_ports(settings, transactional_id, member, settings.work_bytes_max)
        contents = reference_reader(settings, ports.clock)
        hosts.append(IngressHost(settings, ports, TokenizerStore(), LogWatcher(log), member, contents))
        return hosts[0]

    def counts() -> Mapping[str, object]:
        if not hosts:
            return {}
        machine = hosts[0].machine
        cache = {f"tokens_{name}": value for name, value in _fields(machine.routes.token_cache.counts).items()}
        return {**_fields(machine.counts), **cache, "remembered": len(machine.window)}

    return serve(make, stop, log, {"component": "ingress", "id": member}, counts)


def _fields(counters: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(counters, name) for name in counters.__struct_fields__}


if __name__ == "__main__":
    sys.exit(main())
