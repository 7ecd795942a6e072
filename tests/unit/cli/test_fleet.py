"""The scheduler's state as the topology tree and the explanation of a placement want it."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw, structs

from scheduler.limits import RETRIES_MAX
from sie_stream.cli.explain import explained, kv_side, nothing_more
from sie_stream.cli.fleet import servers, topologies
from sie_stream.cli.top import Board
from sie_stream.control import CordonWorker, DeleteModel
from sie_stream.errors import ConfigError
from sie_stream.kv_sharing import Place, kv_sharing
from sie_stream.settings import Settings
from sie_stream.telemetry import DeviceSample, ModelSample
from sie_stream.topology.records import CpuDevice, GpuTopology
from sie_stream.topology.tree import topology_tree
from sie_stream.trunks import adapted, trunk_of
from tests.unit.scheduler.kit import MIB, Cluster, fail, joined, spec_json


def cluster() -> Cluster:
    """Two workers on one machine with one NUMA node; a model on the first."""
    made = Cluster()
    made.lead()
    topology = Raw(msgspec.json.encode(GpuTopology(cpus=(CpuDevice(0, 0, "0-7", 64_000 * MIB),))))
    for worker in ("w0", "w1"):
        fact = joined(worker, f"{worker}-a")
        devices = (structs.replace(fact.devices[0], device="cpu:0"),)
        made.append(structs.replace(fact, topology=topology, devices=devices))
    made.apply(spec_json())
    made.make_ready()
    return made


def test_workers_of_one_machine_show_their_declared_part_of_it_and_what_lives_there() -> None:
    made = cluster()
    made.append(CordonWorker("w1", "ana"))
    trees = topology_tree(servers(made.machine.state))
    assert [tree.name for tree in trees] == ["w0 on host", "w1 on host cordoned"]
    assert [(tree.memory_bytes, tree.used_bytes) for tree in trees] == [(1_000 * MIB, 100 * MIB), (1_000 * MIB, 0)]
    node = trees[0].children[0]
    assert node.name == "socket 0, NUMA 0"
    assert [child.name for child in node.children] == ["cpu:0"]
    assert node.children[0].children[0].name == "churn@1.0.0"


def test_the_capability_matrix_sees_declared_sizes() -> None:
    assert [cpu.memory_bytes for one in topologies(cluster().machine.state) for cpu in one.cpus] == [1_000 * MIB] * 2


def test_a_placement_is_explained_device_by_device() -> None:
    (replica,) = explained(cluster().machine.state, "churn", Settings())
    verdicts = {device["worker"]: device["verdict"] for device in replica["devices"]}
    assert verdicts == {"w0": "chosen", "w1": "costlier"}
    assert "stays on w0/cpu:0" in replica["sentence"]


def test_a_missing_replica_says_what_forbids_each_device() -> None:
    made = cluster()
    made.apply(spec_json("far", node_selector={"zone": "us"}))
    (replica,) = explained(made.machine.state, "far", Settings())
    assert replica["place"] is None
    assert {device["constraint"] for device in replica["devices"]} == {"node_selector"}


def test_what_is_being_deleted_lacks_no_replica() -> None:
    made = cluster()
    made.apply(spec_json("risk", replicas={"min": 5, "max": 5}))
    made.make_ready("risk")
    assert not nothing_more(made.model("risk"))
    made.append(DeleteModel("risk"))
    found = explained(made.machine.state, "risk", Settings())
    assert [replica["sentence"] for replica in found if "has no place" in replica["sentence"]] == []
    assert nothing_more(made.model("risk")) == "risk is being deleted: nothing is placed for it any more."


def test_what_was_given_up_is_not_said_to_go_anywhere() -> None:
    made = cluster()
    made.apply(spec_json("risk"))
    for attempt in range(RETRIES_MAX + 1):
        fail(made, "risk")
        made.wait(1_000 * 2**attempt, (("w0", "w0-a"), ("w1", "w1-a")))
    assert explained(made.machine.state, "risk", Settings()) == []
    assert "risk was given up: " in nothing_more(made.model("risk"))
    assert "weights_missing" in nothing_more(made.model("risk"))


def test_a_model_that_sleeps_says_so_and_where_it_would_go_is_not_asked() -> None:
    made = cluster()
    made.apply(spec_json("risk", replicas={"min": 0, "max": 1}))
    made.make_ready("risk")
    made.wait(90_000, (("w0", "w0-a"), ("w1", "w1-a")))
    made.release("risk")
    assert not made.model("risk").replicas
    assert explained(made.machine.state, "risk", Settings()) == []
    assert nothing_more(made.model("risk")) == "risk sleeps: it has no replica until the next request wakes it."


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'churn'"):
        explained(cluster().machine.state, "chrun", Settings())


def test_a_worker_out_of_service_is_explained_too_and_what_serves_there_is_kept() -> None:
    made = cluster()
    made.append(CordonWorker("w0", "ana"))
    made.append(CordonWorker("w1", "ana"))
    (replica,) = explained(made.machine.state, "churn", Settings())
    assert {device["worker"]: device["constraint"] or device["verdict"] for device in replica["devices"]} == {
        "w0": "chosen",
        "w1": "cordon",
    }


def test_kv_sharing_is_explained_from_the_declarations_and_what_workers_tell_of_the_present_version() -> None:
    made = cluster()
    config = {"kind": "text_generation", "threads": 2, "repeatable": True}
    made.apply(spec_json("chat", backend={"name": "torch", "config": config}))
    made.apply(spec_json("support", lora={"base": "chat", "rank": 16}))
    trunk = trunk_of("sha256:w", b"{}", b"{}", "float32, dense, fast", "16 tokens")
    board = Board()
    for at_ms, worker in ((1_000, "w1"), (90_000, "w0")):
        models = [ModelSample("chat", version, 1, 1, trunk=trunk) for version in ("1.0.0", "0.9.0")]
        board.add(DeviceSample(worker, f"{worker}-a", "cpu:0", at_ms, 1_000, 0, 1 << 30, (), tuple(models)))
    side = kv_side(made.model("chat"), board, 91_000)
    assert side.trunks == ((Place("w0", "cpu:0"), trunk),), "w1 has not been heard of for long"
    assert side.decoder
    assert side.arithmetic == "float32, dense, repeatable"
    adapter = kv_side(made.model("support"), board, 91_000)
    assert adapter.trunks == ()
    assert [one.what for one in kv_sharing(side, adapter).differences] == ["engine", "adapter"]


def test_an_activated_adapter_that_is_loaded_is_said_to_share_up_to_its_invocation() -> None:
    made = cluster()
    config = {"kind": "text_generation"}
    made.apply(spec_json("chat", backend={"name": "torch", "config": config}))
    over = {"name": "torch", "config": config | {"base": "/models/chat"}}
    for name in ("judge", "plain"):
        made.apply(spec_json(name, backend=over, lora={"base": "chat", "rank": 16}))
    trunk = trunk_of("sha256:w", b"{}", b"{}", "float32, dense, fast", "16 tokens")
    trunks = {"chat": trunk, "judge": adapted(trunk, "sha256:j", [7]), "plain": adapted(trunk, "sha256:p")}
    board = Board()
    models = [ModelSample(name, "1.0.0", 1, 1, trunk=one) for name, one in trunks.items()]
    board.add(DeviceSample("w0", "w0-a", "cpu:0", 90_000, 1_000, 0, 1 << 30, (), tuple(models)))
    chat, judge, plain = (kv_side(made.model(name), board, 91_000) for name in trunks)
    assert "of the tokens before an invocation of judge" in kv_sharing(chat, judge).sentence
    refused = kv_sharing(chat, plain)
    assert refused.sentence == "chat and plain share no keys and values, because of: adapter."
    [difference] = refused.differences
    assert (difference.first, difference.second) == ("none", "sha256:p")
