"""What a worker says about an engine process that ended."""

from __future__ import annotations

from gpu_worker.engine_ends import SUSPECTS_MAX
from gpu_worker.sim.engine import EngineScript
from sie_stream.control import EngineLost, ReplicaFailed, ReplicaReady
from sie_stream.settings import Settings
from tests.unit.worker.rig import DEVICE, Rig, World, serving, work_item


def deaths(world: World) -> list[EngineLost]:
    return [one for one in world.reports(EngineLost) if isinstance(one, EngineLost)]


def test_an_engine_killed_from_outside_is_told_and_that_its_model_is_back() -> None:
    world, rig = serving(EngineScript(batch_ms=10.0))
    world.send(*[work_item(f"r{n}") for n in range(40)])
    rig.run(15)
    rig.engines.kill(next(iter(rig.machine.state.engines)), "SIGKILL (out of memory)")
    rig.run_until(lambda: len(world.results()) == 40)
    (lost,) = deaths(world)
    assert (lost.device, lost.backend, lost.cause) == (DEVICE, "sim", "SIGKILL (out of memory)")
    assert [one.model for one in lost.models] == ["m"]
    assert lost.requests == len(lost.suspects) > 0
    assert lost.given_up == ()
    first, again = [one for one in world.reports(ReplicaReady) if isinstance(one, ReplicaReady)]
    assert first.placement_epoch == again.placement_epoch == lost.models[0].placement_epoch
    assert again.waited_ms < 100, "since the engine ended, not since the replica was placed"


def test_a_batch_that_runs_too_long_is_the_cause() -> None:
    world, rig = serving(EngineScript(hangs={"bad"}), Settings(engine_batch_timeout_ms=500))
    world.send(work_item("bad"))
    rig.run_until(lambda: deaths(world))
    assert "engine_batch_timeout_ms" in deaths(world)[0].cause


def test_a_report_names_no_more_suspects_than_fit() -> None:
    world, rig = serving(EngineScript(hangs={"r0"}), Settings(engine_batch_timeout_ms=500), batch_max=200)
    world.send(*[work_item(f"r{n}") for n in range(200)])
    rig.run_until(lambda: deaths(world))
    lost = deaths(world)[0]
    assert (lost.requests, len(lost.suspects)) == (200, SUSPECTS_MAX)


def test_the_request_that_kills_the_engine_is_named_when_it_is_given_up() -> None:
    world, rig = serving(EngineScript(kills={"bad"}))
    world.send(work_item("a"), work_item("bad"), work_item("b"))
    rig.run_until(lambda: len(world.results()) == 3)
    assert len(deaths(world)) >= 2
    assert all("bad" in one.suspects for one in deaths(world))
    assert [one.given_up for one in deaths(world)[:-1]] == [()] * (len(deaths(world)) - 1)
    assert deaths(world)[-1].given_up == ("bad",)


def test_a_model_whose_load_kills_the_engine_is_named_when_it_fails() -> None:
    world = World()
    rig = Rig(world, script=EngineScript(kills_loading={"m"}))
    world.place(world.add_model("m"))
    rig.run_until(lambda: world.reports(ReplicaFailed), 30_000)
    assert [(one.suspects, one.given_up) for one in deaths(world)[-2:]] == [
        (("load:m",), ()),
        (("load:m",), ("load:m",)),
    ]
