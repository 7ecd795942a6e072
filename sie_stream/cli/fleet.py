"""The fleet as the topology tree and the capability matrix want it, from the scheduler's state."""

from __future__ import annotations

import msgspec
from msgspec import structs

from scheduler.state import ClusterState
from scheduler.worker_state import WorkerState
from sie_stream.topology.records import NUMA_UNKNOWN, CpuDevice, GpuTopology
from sie_stream.topology.tree import Resident, Server


def servers(state: ClusterState) -> tuple[Server, ...]:
    """One per live worker: workers that share a machine each have a declared part of it."""
    return tuple(_server(state, worker) for worker in state.workers.values() if worker.status == "live")


def topologies(state: ClusterState) -> tuple[GpuTopology, ...]:
    """What live workers offer, with the declared sizes of their cpu devices."""
    return tuple(_with_declared(worker) for worker in state.workers.values() if worker.status == "live")


def _server(state: ClusterState, worker: WorkerState) -> Server:
    service = state.cordons[worker.worker].phase if worker.worker in state.cordons else ""
    return Server(
        name=" ".join(part for part in (worker.worker, f"on {worker.host}", service) if part),
        topology=_with_declared(worker),
        residents=tuple(
            Resident(
                device,
                model.model,
                model.launches[replica.generation].version,
                replica.state,
                replica.memory_bytes,
                replica.devices,
            )
            for model in state.models.values()
            for replica in model.replicas
            for device in replica.spans
            if (replica.worker, replica.incarnation) == (worker.worker, worker.incarnation)
        ),
        declared=tuple((device.device, device.memory_bytes) for device in worker.devices),
    )


def _with_declared(worker: WorkerState) -> GpuTopology:
    """Only cpu devices that are offered, each with the size that the worker declares for it."""
    reported = msgspec.json.decode(worker.topology, type=GpuTopology)
    nodes = {cpu.device: cpu for cpu in reported.cpus}
    offered = [device for device in worker.devices if device.kind == "cpu"]
    unknown = CpuDevice(NUMA_UNKNOWN, NUMA_UNKNOWN, "", 0)
    cpus = tuple(
        structs.replace(nodes.get(device.device, unknown), memory_bytes=device.memory_bytes) for device in offered
    )
    return structs.replace(reported, cpus=cpus)
