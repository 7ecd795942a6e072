"""Versions on trial run in engine processes of their own."""

from __future__ import annotations

from msgspec import structs

from gpu_worker.engine_port import EngineKey
from gpu_worker.sim.engine import EngineScript
from sie_stream.control import TRIAL, EngineLost
from tests.unit.worker.rig import DEVICE, Rig, World, work_item


def test_a_version_on_trial_ends_its_own_engine_and_its_engine_ends_with_it() -> None:
    world = World()
    rig = Rig(world, script=EngineScript(kills={"t0"}))
    world.place(world.add_model("m"))
    world.place(world.add_model("m.CANARY", version="2", domain=TRIAL))
    rig.run(100)
    world.give("m", [1])
    world.give("m.CANARY", [1])
    world.send(work_item("r0"), work_item("t0", "m.CANARY", version="2"), work_item("r1"))
    rig.run(20)
    assert {"r0", "r1"} <= set(world.results())
    rig.run(680)
    serving, trial = EngineKey(DEVICE, "sim"), EngineKey(DEVICE, "sim", TRIAL)
    engines = rig.machine.state.engines
    assert set(engines) == {serving, trial}
    lost = [one for one in world.reports(EngineLost) if isinstance(one, EngineLost)]
    assert {(one.domain, *(loaded.model for loaded in one.models)) for one in lost} == {(TRIAL, "m.CANARY")}
    world.publish(structs.replace(world.rows["m.CANARY"], replicas=(), partitions=()))
    rig.run(500)
    assert (engines[serving].running, engines[trial].running) == (True, False)
