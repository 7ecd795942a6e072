"""Where an embedded broker lives: its ports, and who occupies a data folder."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import msgspec
import psutil

from sie_stream.edge.kafka_jars import BrokerFailed

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the kernel's ephemeral ports: a client that retries while the broker restarts must not be given its port."""


class Tenant(msgspec.Struct, frozen=True):
    """broker.json: the broker that last ran on a data folder."""

    pid: int
    starter_pid: int
    port: int
    controller_port: int


def read_tenant(data_dir: Path) -> Tenant | None:
    try:
        return msgspec.json.decode((data_dir / "broker.json").read_bytes(), type=Tenant)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_tenant(data_dir: Path, tenant: Tenant) -> None:
    (data_dir / "broker.json").write_bytes(msgspec.json.encode(tenant))


def evict(tenant: Tenant, data_dir: Path) -> None:
    """End a broker whose starter died without stopping it; refuse when its starter still lives."""
    try:
        process = psutil.Process(tenant.pid)
        if f"-Dsie.broker.data={data_dir}" not in process.cmdline():
            return
        if process.ppid() == tenant.starter_pid:
            raise BrokerFailed(
                f"a broker (pid {tenant.pid}, started by pid {tenant.starter_pid}) already runs on {data_dir}: "
                "use it, stop it, or choose another data folder."
            )
        process.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(timeout=10)
            return
        process.kill()
        process.wait(timeout=10)
    except psutil.NoSuchProcess:
        return


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: TIME_WAIT is no obstacle
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port(other_than: int = 0) -> int:
    chance = random.SystemRandom()
    for _ in range(200):
        port = chance.choice(PORTS)
        if port != other_than and is_free(port):
            return port
    raise BrokerFailed(f"no free port between {PORTS.start} and {PORTS.stop} on {HOST}.")


def accepts(port: int) -> bool:
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True
