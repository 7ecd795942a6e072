"""Models whose requests run side by side: as many as the engine takes, ending in any order, blamed rightly."""

from __future__ import annotations

from gpu_worker.engine_port import EngineKey
from gpu_worker.sim.engine import EngineScript
from sie_stream.settings import Settings
from tests.unit.worker.rig import Rig, World, serving, work_item

SIDE_BY_SIDE = 3


def flying(rig: Rig) -> int:
    return sum(len(engine.outstanding) for engine in rig.machine.state.engines.values())


def script(**changes: object) -> EngineScript:
    return EngineScript(**{"continuous": {"m": SIDE_BY_SIDE}, "batch_ms": 50.0, **changes})


def sent(world: World, *names: str, priority: int = 1) -> None:
    world.send(*(work_item(name, priority=priority) for name in names))


def test_each_request_is_a_batch_of_its_own_and_the_next_starts_when_one_ends() -> None:
    world, rig = serving(script())
    sent(world, *(f"r{n}" for n in range(8)))
    rig.run(20)
    assert flying(rig) == SIDE_BY_SIDE
    rig.run_until(lambda: len(world.results()) == 8)
    assert [names for _, names in rig.engines.batches] == [(f"r{n}",) for n in range(8)]
    assert flying(rig) == 0
    started = [at for at, _ in rig.engines.batches]
    assert started[3] - started[0] >= 50
    assert world.committed("m", 1) == 8


def test_requests_that_end_out_of_order_are_committed_as_they_end() -> None:
    slow = script(batch_ms=40.0)
    world, rig = serving(slow)
    sent(world, "slow")
    rig.run(2)
    slow.batch_ms = 5.0
    sent(world, "quick")
    rig.run_until(lambda: "quick" in world.results())
    assert "slow" not in world.results()
    assert world.committed("m", 1) == 0, "the offset waits for the one before it; the metadata has the other"
    rig.run_until(lambda: len(world.results()) == 2 and world.committed("m", 1) == 2)


def test_an_urgent_request_need_not_wait_for_a_place() -> None:
    world, rig = serving(script(batch_ms=500.0))
    sent(world, "a", "b", "c", "d")
    rig.run(20)
    sent(world, "urgent", priority=0)
    rig.run(20)
    assert [names for _, names in rig.engines.batches] == [("a",), ("b",), ("c",), ("urgent",)]


def test_when_the_engine_dies_only_the_request_that_kills_it_alone_is_blamed() -> None:
    world, rig = serving(script(kills={"poison"}))
    sent(world, "a", "poison", "b", "c", "d")
    rig.run_until(lambda: len(world.results()) == 5)
    results = world.results()
    assert {name for name, result in results.items() if result.status != "ok"} == {"poison"}
    assert results["poison"].error is not None
    assert results["poison"].error.code == "poison"
    assert flying(rig) == 0


ENGINE = EngineKey("cpu:0", "sim")


def test_a_kill_from_outside_blames_nobody_and_all_go_on_side_by_side() -> None:
    world, rig = serving(script(batch_ms=500.0))
    sent(world, "a", "b", "c", "d")
    rig.run(20)
    rig.engines.kill(ENGINE)
    rig.run_until(lambda: len(world.results()) == 4)
    assert {result.status for result in world.results().values()} == {"ok"}
    first, second = rig.engines.batches[:3], rig.engines.batches[3:6]
    assert [names for _, names in second] == [names for _, names in first], "in the order they came"
    assert len({at for at, _ in second}) == 1, "side by side"
    assert rig.engines.resumed == ["a", "b", "c"]
    assert flying(rig) == 0


def test_kills_from_outside_that_do_not_end_make_suspects_of_those_that_were_there() -> None:
    world, rig = serving(script(batch_ms=500.0), Settings(engine_attempts_max=3))
    sent(world, "a", "b")
    for _ in range(2):
        rig.run_until(lambda: flying(rig) == 2)
        rig.engines.kill(ENGINE)
        rig.run_until(lambda: flying(rig) == 0)
    rig.run_until(lambda: flying(rig) == 1)
    assert rig.engines.resumed == ["a", "b"]
    rig.engines.kill(ENGINE)
    rig.run_until(lambda: len(world.results()) == 2)
    results = world.results()
    assert {name: result.status for name, result in results.items()} == {"a": "failed", "b": "ok"}
    assert rig.engines.resumed == ["a", "b"], "a suspect is computed from the beginning"


def test_a_want_of_memory_is_no_kill_from_outside() -> None:
    world, rig = serving(script(batch_ms=500.0))
    sent(world, "a", "b")
    rig.run_until(lambda: flying(rig) == 2)
    rig.engines.kill(ENGINE, "SIGKILL (out of memory)")
    rig.run_until(lambda: len(world.results()) == 2)
    assert rig.engines.resumed == []
    assert [names for _, names in rig.engines.batches] == [("a",), ("b",), ("a",), ("b",)]
    started = [at for at, _ in rig.engines.batches]
    assert started[3] - started[2] >= 500, "one after the other"


def test_an_exception_that_many_shared_blames_nobody_until_one_fails_alone() -> None:
    world, rig = serving(script(raises={"bad"}), Settings(engine_attempts_max=1))
    sent(world, "a", "b", "bad", "c")
    rig.run_until(lambda: len(world.results()) == 4)
    results = world.results()
    assert {name for name, result in results.items() if result.status != "ok"} == {"bad"}
    assert rig.engines.starts == 1, "the engine lived on"


def test_a_long_answer_is_no_hang_while_steps_are_made() -> None:
    world, rig = serving(script(batch_ms=9_000.0), Settings(engine_batch_timeout_ms=2_000))
    sent(world, "long")
    rig.run_until(lambda: len(world.results()) == 1)
    assert rig.engines.starts == 1


def test_an_engine_without_a_sign_of_progress_is_killed_and_the_culprit_found() -> None:
    world, rig = serving(script(hangs={"stuck"}), Settings(engine_batch_timeout_ms=2_000))
    sent(world, "a", "stuck", "b")
    rig.run_until(lambda: len(world.results()) == 3, 60_000)
    results = world.results()
    assert {name for name, result in results.items() if result.status != "ok"} == {"stuck"}
    assert results["stuck"].error is not None
    assert results["stuck"].error.code == "engine_timeout"


def test_what_a_lost_partition_had_in_the_engine_is_cancelled() -> None:
    world, rig = serving(script(batch_ms=60_000.0))
    sent(world, "a", "b")
    rig.run(20)
    assert flying(rig) == 2
    world.take_away("m")
    rig.run(40)
    assert flying(rig) == 0
    assert world.results() == {}


def test_the_meter_shares_the_time_between_those_that_ran_side_by_side() -> None:
    world, rig = serving(script(batch_ms=100.0))
    sent(world, "a", "b", "c")
    rig.run_until(lambda: len(world.results()) == 3)
    _, (load,), _ = rig.machine.state.meter.take(rig.machine.state.at_ms, {}, {})
    assert load.completions == 3
    assert load.busy_ms <= 200


def test_more_than_fits_is_paused_and_answered_in_time() -> None:
    settings = Settings(partition_open_max=40, worker_poll_max=20)
    world, rig = serving(script(batch_ms=6.0), settings)
    sent(world, *(f"r{n}" for n in range(200)))
    most = 0

    def done() -> bool:
        nonlocal most
        most = max(most, rig.machine.state.open_total)
        return len(world.results()) == 200

    rig.run_until(done)
    assert SIDE_BY_SIDE < most <= 40 + 20
    assert {result.status for result in world.results().values()} == {"ok"}
