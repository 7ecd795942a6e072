"""What a worker says about its devices."""

from __future__ import annotations

from gpu_worker.facts import DeviceFailed, DeviceMended, SendReports, TimePassed
from sie_stream.control import DeviceBack, DeviceLost, WorkerJoined
from tests.unit.worker.rig import DEVICE, Rig, World


def test_a_device_that_fails_is_reported_after_the_worker_has_joined() -> None:
    rig = Rig(World())
    changes = (DeviceFailed(DEVICE, "XID 79"), DeviceMended(DEVICE))
    commands = rig.machine.decide([TimePassed(now_ms=1_000, at_ms=0.0), *changes])
    reports = [report for command in commands if isinstance(command, SendReports) for report in command.reports]
    assert [type(report) for report in reports[:3]] == [WorkerJoined, DeviceLost, DeviceBack]
    assert reports[1] == DeviceLost(rig.identity.worker, rig.identity.incarnation, DEVICE, "XID 79")
