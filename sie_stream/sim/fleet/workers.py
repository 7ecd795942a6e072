"""Simulated worker hosts and what they say of themselves when they join."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from sie_stream.control import Device, WorkerJoined
from sie_stream.sim.fleet.policy import offered_mb
from sie_stream.sim.fleet.scenario import Fleet
from sie_stream.topology.records import Gpu, GpuTopology, Link

PRODUCT = "NVIDIA A100-SXM4-80GB"
MIB = 1 << 20
SOCKETS = 2


class SimWorker(Struct):
    """One worker host, in its present life."""

    name: str
    server: int
    devices: list[int]
    """Numbers in the fleet, of those that work."""
    life: int = 0
    up: bool = False
    paused: bool = False
    lost: tuple[int, ...] = ()
    """Devices that it reported gone in its present life."""
    loads_until_ms: float = 0.0
    """It loads one replica after another."""

    incarnation: str = ""
    """Name of its present life."""

    def begin_life(self) -> None:
        self.life += 1
        self.incarnation = f"{self.name}-{self.life}"
        self.up, self.paused, self.lost, self.loads_until_ms = True, False, (), 0.0


def workers_of(fleet: Fleet) -> list[SimWorker]:
    if fleet.workers == "per-gpu":
        return [
            SimWorker(f"w{server:03d}-{gpu}", server, [server * fleet.gpus + gpu])
            for server in range(fleet.servers)
            for gpu in range(fleet.gpus)
        ]
    return [
        SimWorker(f"w{server:03d}", server, [server * fleet.gpus + gpu for gpu in range(fleet.gpus)])
        for server in range(fleet.servers)
    ]


def joined(worker: SimWorker, fleet: Fleet) -> WorkerJoined:
    """Devices are called cuda:N, N being the place in the server."""
    memory = offered_mb(fleet) * MIB
    return WorkerJoined(
        worker=worker.name,
        incarnation=worker.incarnation,
        host=f"server-{worker.server:03d}",
        pid=1,
        devices=tuple(Device(device_name(number, fleet), "cuda", memory) for number in worker.devices),
        backends=("torch", "sglang", "onnx", "vllm"),
        versions={"cuda": "12.4", "torch": "2.13.0", "sglang": "0.5.3"},
        labels={"gpu": "a100"},
        topology=server_topology(worker.server, fleet),
    )


def device_name(number: int, fleet: Fleet) -> str:
    return f"cuda:{number % fleet.gpus}"


def device_number(worker: SimWorker, name: str, fleet: Fleet) -> int:
    return worker.server * fleet.gpus + int(name.removeprefix("cuda:"))


def server_topology(server: int, fleet: Fleet) -> msgspec.Raw:
    """All GPUs of a server on one NVSwitch, as in a DGX A100."""
    gpus = tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{server:03d}-{index}",
            product=PRODUCT,
            memory_bytes=fleet.memory_mb * MIB,
            pci_bus_id=f"0000:{index + 1:02x}:00.0",
            numa_node=index * SOCKETS // fleet.gpus,
            socket=index * SOCKETS // fleet.gpus,
        )
        for index in range(fleet.gpus)
    )
    links = tuple(
        Link(f"GPU{one}", f"GPU{other}", "NV", 12) for one in range(fleet.gpus) for other in range(one + 1, fleet.gpus)
    )
    return msgspec.Raw(msgspec.json.encode(GpuTopology(gpus=gpus, links=links)))
