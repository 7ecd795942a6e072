"""A replica that needs several devices, on a worker whose backends use one."""

from __future__ import annotations

from sie_stream.control import PlacementRow, ReplicaFailed, ReplicaPlacement, ReplicaReady
from tests.unit.worker.rig import DEVICE, INCARNATION, Rig, World


def test_a_replica_that_spans_devices_is_refused_at_once_and_plainly() -> None:
    world = World()
    rig = Rig(world)
    launch = world.add_model("wide", tensor_parallel=2)
    replica = ReplicaPlacement("w0", INCARNATION, DEVICE, world.next_epoch(), launch, (DEVICE, "cpu:1"))
    world.publish(PlacementRow("wide", world.rows["wide"].topic, (replica,), ()))
    world.place(world.add_model("good"))
    rig.run(200)
    (failed,) = world.reports(ReplicaFailed)
    assert isinstance(failed, ReplicaFailed)
    assert (failed.model, failed.code) == ("wide", "tensor_parallel_unsupported")
    assert f"spans {DEVICE}, cpu:1" in failed.message
    assert "set tensor_parallel_size to 1" in failed.message
    assert len(world.reports(ReplicaReady)) == 1, "the others load"
    world.publish(PlacementRow("wide", world.rows["wide"].topic, (), ()))
    rig.run(200)
    assert len(world.reports(ReplicaFailed)) == 1
