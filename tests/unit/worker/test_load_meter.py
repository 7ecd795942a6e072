"""What a worker tells about the load of its models."""

from __future__ import annotations

from gpu_worker.load_meter import EVERY_MS, LATENCIES_MAX, LoadMeter
from gpu_worker.sim.engine import EngineScript
from sie_stream.control import WorkerLoad
from sie_stream.loads import DeviceLoad, ModelLoad
from tests.unit.worker.rig import World, serving, work_item


def loads(world: World) -> list[ModelLoad]:
    return [load for report in world.reports(WorkerLoad) if isinstance(report, WorkerLoad) for load in report.models]


def test_what_was_done_is_reported_once_and_an_idle_worker_says_nothing() -> None:
    world, rig = serving()
    for number in range(5):
        world.send(work_item(f"r{number}"))
    rig.run(int(3 * EVERY_MS))
    assert [(load.model, load.arrivals, load.completions) for load in loads(world)] == [("m", 5, 5)]
    done = loads(world)[0]
    assert (done.waiting, done.running) == (0, 0)
    assert done.p99_ms is not None


def test_what_an_engine_holds_is_running_and_what_waits_for_it_waits() -> None:
    world, rig = serving(EngineScript(hangs={"stuck"}))
    world.send(work_item("stuck"))
    rig.run(50)
    world.send(*[work_item(f"r{number}") for number in range(300)])
    rig.run(int(2 * EVERY_MS))
    newest = loads(world)[-1]
    assert newest.running >= 1
    assert newest.running + newest.waiting == 301


def test_the_largest_latency_of_a_window_is_its_p99_and_memory_is_bounded() -> None:
    meter = LoadMeter()
    assert not meter.due(0.0)
    for latency_ms in range(10 * LATENCIES_MAX):
        meter.answered("m", "cpu0", 2, 0.5, latency_ms)
    window_ms, (load,), devices = meter.take(5_000.0, {}, {})
    assert window_ms == 5_000
    assert load.completions == 20 * LATENCIES_MAX
    assert load.p99_ms == LATENCIES_MAX * 99 // 100
    assert devices == (DeviceLoad("cpu0", 5_120),)
    assert meter.take(6_000.0, {}, {"m": 1})[1] == (ModelLoad("m", 0, 0, 0, 1, 0, None),)


def test_a_device_is_never_busier_than_always() -> None:
    meter = LoadMeter()
    meter.due(0.0)
    meter.answered("a", "cuda:0", 1, 1_500.0, 1)
    meter.answered("b", "cuda:0", 1, 9_000.0, 1)
    meter.answered("b", "cuda:1", 1, 500.0, 1)
    assert meter.take(2_000.0, {}, {})[2] == (DeviceLoad("cuda:0", 10_000), DeviceLoad("cuda:1", 2_500))
    assert meter.take(4_000.0, {}, {})[2] == ()
