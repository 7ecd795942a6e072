"""Whether anything listens where Kafka should be: told in seconds, before a client tries and tries again."""

from __future__ import annotations

import re
import socket
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from sie_stream.errors import ConfigError

PATIENCE_S = 3.0
"""A broker that starts again is back within this time."""
PAUSE_S = 0.2
CONNECT_S = 1.0
DEFAULT_PORT = 9092
_ADDRESS = re.compile(r"(?:\w+://)?(?:\[(?P<six>[^]]+)]|(?P<host>[^:\[\]]+))(?::(?P<port>\d+))?")


class NoBroker(ConfigError):
    """Nothing listens at any of the bootstrap servers."""

    code = "no_broker"


def addresses(bootstrap_servers: str) -> list[tuple[str, int]]:
    """(host, port) of each of `bootstrap.servers`, e.g. "kafka-1:9092,SSL://[::1]:9093". Raises ConfigError."""
    found: list[tuple[str, int]] = []
    for one in filter(None, (part.strip() for part in bootstrap_servers.split(","))):
        match = _ADDRESS.fullmatch(one)
        if match is None:
            raise ConfigError(f"bootstrap_servers: {one!r} is no address: allowed is HOST:PORT, several with commas")
        found.append((match["six"] or match["host"], int(match["port"] or DEFAULT_PORT)))
    return found


def refuse_unreachable(bootstrap_servers: str, patience_s: float = PATIENCE_S) -> None:
    """One connection to the first address that takes it. Raises NoBroker when none does within `patience_s`."""
    places = addresses(bootstrap_servers)
    deadline = time.monotonic() + patience_s
    while not _any_accepts(places):
        if time.monotonic() >= deadline:
            raise NoBroker(
                f"no Kafka broker answers at {bootstrap_servers}. Is the address right (--bootstrap-servers, "
                "SIE_STREAM_BOOTSTRAP_SERVERS), and does Kafka run there? `sie-stream doctor` looks."
            )
        time.sleep(PAUSE_S)


def _any_accepts(places: list[tuple[str, int]]) -> bool:
    if len(places) == 1:
        return _accepts(places[0])
    pool = ThreadPoolExecutor(max(1, len(places)))
    try:
        left = {pool.submit(_accepts, place) for place in places}
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            if any(future.result() for future in done):
                return True
    finally:
        pool.shutdown(wait=False)
    return False


def _accepts(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
