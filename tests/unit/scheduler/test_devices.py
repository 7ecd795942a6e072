"""A device is lost while its worker lives: replicas go elsewhere by release, not by fence, and it says why."""

from __future__ import annotations

import pytest

from scheduler.state import from_bytes, to_bytes
from sie_stream.control import DeviceBack, DeviceLost, FenceWorker
from tests.unit.scheduler.kit import Cluster, decisions, joined, kinds, spec_json

XID = "XID 79: the GPU has fallen off the bus"


def two_devices() -> tuple[Cluster, str]:
    """churn serves on one device of w0, the only worker with two."""
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a", devices=2))
    cluster.apply(spec_json(memory_mb=600))
    cluster.make_ready()
    return cluster, cluster.model().replicas[0].device


def test_the_replica_goes_to_another_device_and_the_chain_says_why() -> None:
    cluster, device = two_devices()
    offset = len(cluster.log)
    commands = cluster.append(DeviceLost("w0", "a", device, XID))
    assert kinds(commands)[:2] == ["device_lost", "replica_placed"]
    (lost,) = decisions(commands, "device_lost")
    (placed,) = decisions(commands, "replica_placed")
    assert XID in lost.reason
    assert [(m.source, m.target) for m in lost.moves] == [(f"w0/{device}", "")]
    assert (lost.memory[0].before_bytes, lost.memory[0].after_bytes) == (600 << 20, 0)
    assert placed.facts[0].offset == offset
    assert placed.chosen["device"] != device
    assert not any(isinstance(command, FenceWorker) for command in commands)
    assert all(p.state == "releasing" for p in cluster.model().partitions), "the worker is alive and is asked"
    assert cluster.release() == 3
    cluster.make_ready()
    assert cluster.owners()


def test_without_room_it_waits_and_the_later_placement_names_the_loss() -> None:
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json())
    cluster.make_ready()
    offset = len(cluster.log)
    assert "replica_unplaceable" in kinds(cluster.append(DeviceLost("w0", "a", "cpu0", XID)))
    commands = cluster.append(DeviceBack("w0", "a", "cpu0"))
    (back,) = decisions(commands, "device_back")
    assert [fact.offset for fact in back.facts] == [offset + 1, offset]
    (placed,) = decisions(commands, "replica_placed")
    assert (offset, "DeviceLost") in [(fact.offset, fact.kind) for fact in placed.facts]


def test_it_survives_a_snapshot_and_ends_with_the_incarnation() -> None:
    cluster, device = two_devices()
    cluster.append(DeviceLost("w0", "a", device, XID))
    loaded = from_bytes(to_bytes(cluster.machine.state))
    assert loaded is not None
    assert list(loaded.workers["w0"].lost_devices) == [device]
    cluster.append(joined("w0", "b", devices=2))
    assert not cluster.machine.state.workers["w0"].lost_devices


@pytest.mark.parametrize(
    "record",
    [
        DeviceLost("nobody", "a", "cpu0", XID),
        DeviceLost("w0", "old", "cpu0", XID),
        DeviceLost("w0", "a", "cpu9", "x" * 100_000),
        DeviceBack("w0", "a", "cpu0"),
        DeviceBack("w0", "a", ""),
    ],
)
def test_what_nobody_can_have_lost_is_ignored(record: DeviceLost | DeviceBack) -> None:
    cluster, _ = two_devices()
    assert kinds(cluster.append(record)) == []


def test_a_cause_of_any_length_fits_into_the_decision() -> None:
    cluster, device = two_devices()
    (lost,) = decisions(cluster.append(DeviceLost("w0", "a", device, "x" * 1_000_000)), "device_lost")
    assert len(lost.reason) < 8_000
    assert kinds(cluster.append(DeviceLost("w0", "a", device, "again"))) == []
