"""Replicas that span several devices: placed near, moved, drained, undone and lost as one, on real machine shapes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw, structs

from scheduler.limits import RETRIES_MAX
from scheduler.places import device_places
from scheduler.state import from_bytes, to_bytes
from sie_stream.cli.explain import explained
from sie_stream.cli.fleet import servers
from sie_stream.control import (
    Device,
    DeviceLost,
    DrainWorker,
    InstanceRow,
    PlacementRow,
    ReplicaFailed,
    SchedulerCommand,
    UndoDecision,
    WorkerExited,
    WorkerJoined,
)
from sie_stream.topology.records import Link
from sie_stream.topology.tree import TreeNode, topology_tree
from tests.unit.scheduler.kit import INSTANCE, MIB, Cluster, decisions, joined, kinds, spec_json
from tests.unit.topology.machines import topology

GIB_MB = 1_024
CUDA_MB = 80 * GIB_MB


def on(machine: str, worker: str = "w0", incarnation: str = "a", host: str = "", devices: str = "") -> WorkerJoined:
    """A worker with all GPUs of one of the machines in tests/fixtures/topology, or those with these indices."""
    server = topology(machine)
    names = [gpu.device for gpu in server.gpus if not devices or str(gpu.index) in devices]
    return structs.replace(
        joined(worker, incarnation),
        host=host or worker,
        devices=tuple(Device(name, "cuda", CUDA_MB * MIB) for name in names),
        topology=Raw(msgspec.json.encode(server)),
    )


def cluster_of(*workers: WorkerJoined) -> Cluster:
    cluster = Cluster()
    cluster.lead()
    for worker in workers:
        cluster.append(worker)
    return cluster


def spec(name: str = "churn", size: int = 2, memory_gb: int = 100, **fields: Any) -> bytes:
    return spec_json(name, memory_mb=memory_gb * GIB_MB, tensor_parallel_size=size, **fields)


def seats(cluster: Cluster, name: str = "churn") -> list[tuple[str, ...]]:
    return [replica.seat for replica in cluster.model(name).replicas]


def why(commands: list[SchedulerCommand]) -> str:
    (refused,) = decisions(commands, "replica_unplaceable")
    return " ".join(refused.rejected)


def test_a_group_is_one_island_and_each_device_gets_its_share() -> None:
    cluster = cluster_of(on("dgx-a100"))
    (placed,) = decisions(cluster.apply(spec(size=4, memory_gb=202)), "replica_placed")
    assert seats(cluster) == [("w0", "cuda:0", "cuda:1", "cuda:2", "cuda:3")]
    assert placed.chosen["device"] == "cuda:0+cuda:1+cuda:2+cuda:3"
    share = -(-202 * GIB_MB * MIB // 4)
    assert [(change.device, change.after_bytes) for change in placed.memory] == [
        (f"cuda:{number}", share) for number in range(4)
    ]
    (row,) = cluster.row("instances", INSTANCE, InstanceRow).replicas
    assert (row.device, row.devices, row.memory_bytes) == ("cuda:0", ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), share)
    (order,) = cluster.placement().replicas
    assert order.devices == row.devices
    assert (order.launch.tensor_parallel, order.launch.memory_bytes) == (4, share)


def test_bridges_over_pairs_hold_pairs_and_a_wider_group_has_to_be_allowed() -> None:
    cluster = cluster_of(on("a100-pcie-4"))
    cluster.apply(spec("one", memory_gb=100))
    cluster.apply(spec("two", memory_gb=100))
    assert {frozenset(seat[1:]) for name in ("one", "two") for seat in seats(cluster, name)} == {
        frozenset({"cuda:0", "cuda:1"}),
        frozenset({"cuda:2", "cuda:3"}),
    }
    sentence = why(cluster.apply(spec("wide", size=4, memory_gb=8)))
    assert "its NVLink island has 2" in sentence
    cluster.apply(spec("wide", size=4, memory_gb=8, tensor_parallel_over="numa"))
    assert "its NUMA node has 2" in cluster.model("wide").message
    cluster.apply(spec("wide", size=4, memory_gb=8, tensor_parallel_over="any"))
    assert seats(cluster, "wide") == [("w0", "cuda:0", "cuda:1", "cuda:2", "cuda:3")]


def test_without_nvlink_the_nearest_are_taken() -> None:
    cluster = cluster_of(on("l40s-4"))
    assert "over NVLink, this has none" in why(cluster.apply(spec()))
    cluster.apply(spec(tensor_parallel_over="numa"))
    (seat,) = seats(cluster)
    nodes = {gpu.device: gpu.numa_node for gpu in topology("l40s-4").gpus}
    assert len({nodes[name] for name in seat[1:]}) == 1


def test_a_worker_with_several_cpu_devices_is_an_island() -> None:
    cluster = cluster_of(joined("w0", "a", devices=2), joined("w1", "b", devices=3))
    cluster.apply(spec_json(memory_mb=2_400, tensor_parallel_size=3))
    assert seats(cluster) == [("w1", "cpu0", "cpu1", "cpu2")]
    cluster.apply(spec_json("four", memory_mb=40, tensor_parallel_size=4))
    assert "needs 4 devices, its worker has 3" in cluster.model("four").message


def test_single_devices_are_taken_where_an_island_is_broken_already() -> None:
    """Of two servers with eight linked GPUs each: the whole one stays whole for a group, also when spreading."""
    cluster = cluster_of(on("dgx-a100"), on("dgx-a100", "w1", "b"))
    for number in range(8):
        cluster.apply(spec(f"m{number}", size=1, memory_gb=10))
    assert {seat[0] for number in range(8) for seat in seats(cluster, f"m{number}")} == {"w0"}
    cluster.apply(spec("big", size=8, memory_gb=600))
    assert seats(cluster, "big")[0][0] == "w1"


def test_one_lost_device_loses_the_replica_and_the_group_goes_elsewhere() -> None:
    cluster = cluster_of(on("a100-pcie-4"))
    cluster.apply(spec())
    cluster.make_ready()
    (before,) = seats(cluster)
    commands = cluster.append(DeviceLost("w0", "a", before[2], "XID 79"))
    (lost,) = decisions(commands, "device_lost")
    assert [move.source for move in lost.moves] == [f"w0/{before[1]}+{before[2]}"]
    assert {change.device: change.after_bytes for change in lost.memory} == dict.fromkeys(before[1:], 0)
    (after,) = seats(cluster)
    assert not set(before[1:]) & set(after[1:]), "the other island"
    other = "cuda:0" if "cuda:0" not in before else "cuda:2"
    commands = cluster.append(DeviceLost("w0", "a", other, "XID 79"))
    assert "needs 2 devices, its NVLink island has 1" in why(commands)


def test_a_drain_and_an_undo_move_the_whole_group() -> None:
    cluster = cluster_of(on("dgx-a100"), on("dgx-a100", "w1", "b"))
    cluster.apply(spec(size=4, memory_gb=300))
    cluster.make_ready()
    (home,) = seats(cluster)
    assert home[0] == "w0"
    commands = cluster.append(WorkerExited("w0", "a", -9, "up"))
    (lost,) = decisions(commands, "worker_lost")
    cluster.fence(commands)
    cluster.wait(500, (("w1", "b"),))
    cluster.make_ready()
    assert [seat[0] for seat in seats(cluster)] == ["w1"]
    cluster.append(on("dgx-a100", incarnation="c"))
    (restored,) = decisions(cluster.append(UndoDecision(lost.decision, "ann")), "placement_restored")
    assert restored.moves[0].target == "w0/" + "+".join(home[1:])
    cluster.make_ready()
    cluster.release()
    assert seats(cluster) == [home]
    cluster.append(DrainWorker("w0", "ann"))
    cluster.make_ready()
    cluster.release()
    assert [(seat[0], len(seat)) for seat in seats(cluster)] == [("w1", 5)]


def test_undo_says_when_the_devices_are_not_near_any_more() -> None:
    """The bridges were put over other pairs while the server was down."""
    cluster = cluster_of(on("a100-pcie-4"), on("dgx-a100", "w1", "b"))
    cluster.apply(spec(node_selector={}))
    cluster.make_ready()
    (home,) = seats(cluster)
    assert home == ("w0", "cuda:0", "cuda:1")
    commands = cluster.append(WorkerExited("w0", "a", -9, "up"))
    (lost,) = decisions(commands, "worker_lost")
    cluster.fence(commands)
    cluster.wait(500, (("w1", "b"),))
    cluster.make_ready()
    server = topology("a100-pcie-4")
    links = tuple(structs.replace(link, kind="SYS", nvlinks=0) for link in server.links if link.kind == "NV")
    crossed = structs.replace(server, links=(*links, Link("GPU0", "GPU2", "NV", 4), Link("GPU1", "GPU3", "NV", 4)))
    cluster.append(structs.replace(on("a100-pcie-4", incarnation="c"), topology=Raw(msgspec.json.encode(crossed))))
    (refused,) = decisions(cluster.append(UndoDecision(lost.decision, "ann")))
    assert refused.kind == "undo_refused"
    assert "w0/cuda:0+cuda:1: they are not near enough to each other (tensor_parallel_over nvlink)" in refused.reason


def test_what_a_worker_cannot_run_is_tried_and_given_up_with_its_words() -> None:
    cluster = cluster_of(on("dgx-a100"))
    cluster.apply(spec())
    for _ in range(RETRIES_MAX + 1):
        (replica,) = cluster.model().replicas
        failed = ReplicaFailed(
            "w0", "a", "churn", "1.0.0", replica.placement_epoch, "tensor_parallel_unsupported", "no."
        )
        cluster.append(failed)
        cluster.wait(60_000, (("w0", "a"),))
    assert cluster.model().replicas == []
    assert "tensor_parallel_unsupported" in cluster.model().message
    assert len(cluster.model().failed_on) == 2 * (RETRIES_MAX + 1), "each time on other devices"


def test_kv_heads_that_do_not_divide_are_refused_and_the_architecture_counts() -> None:
    llama = {"num_parameters": 8_030_261_248, "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}
    cluster = cluster_of(on("dgx-a100"))
    text = {"service_type": "text-generation", "max_seq_len": 131_072, "input_schema": None}
    fields: dict[str, Any] = {**text, "backend": {"name": "torch", "config": llama}}
    (no,) = decisions(cluster.apply(spec(size=3, memory_gb=1, **fields)), "model_rejected")
    assert "8 KV heads" in no.reason
    cluster.apply(spec(size=2, memory_gb=1, **fields))
    share = cluster.model().launch.memory_bytes
    weights, kv = 8_030_261_248 * 2 // 2, 2 * 32 * 8 * 128 * 2 * 131_072 // 2
    assert weights + kv < share < weights + kv + weights // 10 + (1 << 30)


def test_models_on_one_trunk_share_an_island() -> None:
    trunk: dict[str, Any] = {"source": {"uri": "/models/base"}, "shared_kv_cache": True}
    cluster = cluster_of(on("a100-pcie-4"))
    cluster.apply(spec("prefill", memory_gb=100, **trunk))
    cluster.apply(spec("other", size=1, memory_gb=4))
    cluster.apply(spec("decode", size=1, memory_gb=10, **trunk))
    island = set(seats(cluster, "prefill")[0][1:])
    assert set(seats(cluster, "decode")[0][1:]) <= island, "though the other island is emptier"
    cluster.apply(spec("full", size=1, memory_gb=30, **trunk))
    assert seats(cluster, "full"), "apart rather than not at all"


def test_it_survives_a_snapshot_and_is_explained_and_drawn() -> None:
    cluster = cluster_of(on("dgx-a100"))
    cluster.apply(spec(size=2, memory_gb=100))
    cluster.make_ready()
    state = from_bytes(to_bytes(cluster.machine.state))
    assert state is not None
    assert to_bytes(state) == to_bytes(cluster.machine.state)
    (found,) = explained(state, "churn", cluster.settings)
    assert "stays on w0/cuda:0+cuda:1 (2 devices of NVLink island 0 on w0)" in found["sentence"]
    assert [one["verdict"] for one in found["devices"]][:3] == ["chosen", "chosen", "costlier"]
    drawn = [node for node in walk(topology_tree(servers(state))) if node.kind == "resident"]
    assert [node.detail for node in drawn] == ["ready, one replica across cuda:0+cuda:1"] * 2


def walk(nodes: tuple[TreeNode, ...]) -> list[TreeNode]:
    return [found for node in nodes for found in (node, *walk(node.children))]


@pytest.mark.parametrize("text", [b"[]", b'{"gpus": 3}', b"[" * 100_000 + b"]" * 100_000, b'{"gpus": [{"index": 1}]}'])
def test_a_topology_that_is_none_says_nothing(text: bytes) -> None:
    assert device_places(Raw(text)) == {}


def test_records_of_before_the_field_are_read() -> None:
    cluster = cluster_of(joined("w0", "a"))
    cluster.apply(spec_json())
    row = msgspec.json.decode(msgspec.json.encode(cluster.placement()))
    assert row["replicas"][0].pop("devices") == ["cpu0"]
    assert row["replicas"][0]["launch"].pop("tensor_parallel") == 1
    (old,) = msgspec.json.decode(msgspec.json.encode(row), type=PlacementRow).replicas
    assert (old.device, old.devices, old.launch.tensor_parallel) == ("cpu0", (), 1)


def test_the_same_log_gives_the_same_state_with_groups() -> None:
    cluster = cluster_of(on("dgx-a100"), on("a100-pcie-4", "w1", "b"))
    for number in range(6):
        cluster.apply(spec(f"m{number}", size=1 + number % 3, memory_gb=30, tensor_parallel_over="any"))
    again = Cluster()
    commands = [command for _, _, record in cluster.log for command in again.append(record)]
    assert to_bytes(again.machine.state) == to_bytes(cluster.machine.state)
    assert kinds(commands) == kinds(cluster.commands)
