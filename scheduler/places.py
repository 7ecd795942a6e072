"""How near the devices of a worker are to each other, out of the topology that it reported."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from sie_stream.topology.groups import islands
from sie_stream.topology.records import NUMA_UNKNOWN, GpuTopology


class DevicePlace(Struct, frozen=True):
    """`island` counts the NVLink islands of two and more of its server; empty: none."""

    island: str = ""
    numa_node: int = NUMA_UNKNOWN
    product: str = ""


NOWHERE = DevicePlace()


def device_places(topology: Raw) -> dict[str, DevicePlace]:
    """By device name. Empty for what is no GpuTopology: a record that others wrote must not stop the fold."""
    try:
        server = msgspec.json.decode(topology, type=GpuTopology)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    shared = [members for members in islands(server) if len(members) > 1]
    island_of = {index: str(number) for number, members in enumerate(shared) for index in members}
    found = {cpu.device: DevicePlace("", cpu.numa_node) for cpu in server.cpus}
    for gpu in server.gpus:
        found[gpu.device] = DevicePlace(island_of.get(gpu.index, ""), gpu.numa_node, gpu.product)
        for part in gpu.mig:
            found[part.device] = DevicePlace("", gpu.numa_node, f"{gpu.product} MIG {part.profile}")
    return found
