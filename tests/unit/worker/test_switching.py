"""A worker with a memory budget: models come to the device before they are run, and give way to each other.

The scripted engine refuses to run what is not on the device, and to give one page to two models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gpu_worker.engine_port import EngineKey
from gpu_worker.facts import Note, WorkerCommand
from gpu_worker.memory import mapper
from gpu_worker.sim.engine import EngineScript
from gpu_worker.switching import memory_samples
from processors.egress.machine import EgressMachine, OutputsPolled
from schemas.codec import decode_result
from sie_stream.control import PlacementRow, ReplicaFailed, ReplicaReady
from sie_stream.engine_facts import EngineLost
from sie_stream.errors import ConfigError
from sie_stream.ids import LANES
from sie_stream.settings import Settings, settings_from
from sie_stream.telemetry import DeviceMemorySample
from sie_stream.touches import CameIn, KeptOut, Touch, touches_in
from tests.unit.worker.rig import DEVICE, INCARNATION, Rig, World, work_item

MIB = 1024 * 1024
BUDGET = Settings(device_memory_mb=64)
ENGINE = EngineKey(DEVICE, "sim")


class Notes:
    """Implements loop.Observer."""

    def __init__(self) -> None:
        self._events: list[str] = []

    def saw(self, events: object, commands: Sequence[WorkerCommand]) -> None:
        self._events += [one.event for one in commands if isinstance(one, Note)]

    def count(self, event: str) -> int:
        return self._events.count(event)


def world_of(script: EngineScript, *models: str, settings: Settings = BUDGET, **changes: Any) -> tuple[World, Rig]:
    world = World(settings)
    rig = Rig(world, script=script)
    for model in models:
        world.place(world.add_model(model, **changes))
    rig.run(200)
    for model in models:
        world.give(model, list(range(LANES)))
    rig.run(50)
    return world, rig


def sample(rig: Rig) -> DeviceMemorySample:
    found = memory_samples(rig.machine.state)[DEVICE]
    assert found.weights_bytes + found.kv_bytes + found.workspace_bytes + found.free_bytes == found.total_bytes
    return found


def places(rig: Rig) -> dict[str, str]:
    return {one.model: one.place for one in sample(rig).models}


def switches(rig: Rig) -> dict[str, int]:
    return {one.switch_class: one.count for one in sample(rig).switches}


def answered(world: World, *ids: str) -> bool:
    return set(ids) <= {one for one, result in world.results().items() if result.status == "ok"}


def test_models_twice_as_large_as_the_device_are_all_served() -> None:
    script = EngineScript(images=dict.fromkeys("abcdef", 20 * MIB))
    world, rig = world_of(script, *"abcdef")
    assert list(places(rig).values()).count("device") == 3
    for turn in range(3):
        ids = [f"{model}{turn}" for model in "abcdef"]
        world.send(*(work_item(request_id, request_id[0]) for request_id in ids))
        rig.run_until(lambda ids=ids: answered(world, *ids))
    assert switches(rig)["host"] >= 9
    assert switches(rig)["resident"] >= 3
    host = next(one for one in sample(rig).switches if one.switch_class == "host")
    assert host.size_bytes == host.count * 20 * MIB
    assert host.ms == host.count * script.switch_ms


def test_without_a_budget_nothing_is_moved() -> None:
    world, rig = world_of(EngineScript(images={"a": 999 * MIB}), settings=Settings())
    assert memory_samples(rig.machine.state) == {}
    del world


def test_a_model_larger_than_the_device_is_refused_and_its_neighbours_serve() -> None:
    """Whatever was declared: what was loaded counts."""
    script = EngineScript(images={"a": 20 * MIB, "b": 65 * MIB, "c": 20 * MIB})
    world, rig = world_of(script, *"abc", memory_bytes=10 * MIB)
    [refused] = world.reports(ReplicaFailed)
    assert isinstance(refused, ReplicaFailed)
    assert (refused.model, refused.code) == ("b", "device_memory_exceeded")
    assert "device_memory_mb" in refused.message
    world.send(work_item("1", "a"), work_item("2", "c"))
    rig.run_until(lambda: answered(world, "1", "2"))


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_ledger_holds_what_is_used_not_what_was_declared(factor: float) -> None:
    script = EngineScript(images=dict.fromkeys("abcd", 24 * MIB))
    world, rig = world_of(script, *"abcd", memory_bytes=round(24 * MIB * factor))
    assert sample(rig).weights_bytes == 48 * MIB
    for turn in range(4):
        ids = [f"{model}{turn}" for model in "abcd"]
        world.send(*(work_item(request_id, request_id[0]) for request_id in ids))
        rig.run_until(lambda ids=ids: answered(world, *ids))
    assert sample(rig).weights_bytes == 48 * MIB


def test_weights_that_cannot_leave_count_and_stay() -> None:
    world, rig = world_of(EngineScript(images={"b": 40 * MIB, "c": 40 * MIB}), *"abc", memory_bytes=10 * MIB)
    for turn in range(3):
        ids = [f"{model}{turn}" for model in "abc"]
        world.send(*(work_item(request_id, request_id[0]) for request_id in ids))
        rig.run_until(lambda ids=ids: answered(world, *ids))
        assert places(rig)["a"] == "device"
    assert sample(rig).weights_bytes == 50 * MIB


def test_a_model_with_long_requests_is_not_taken_from_under_them() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, continuous={"a": 4}, batch_ms=900.0)
    world, rig = world_of(script, *"ab")
    world.send(work_item("a1", "a"))
    rig.run(100)
    world.send(work_item("b1", "b"))
    rig.run(300)
    world.send(work_item("a2", "a"))
    rig.run(300)
    assert places(rig)["a"] == "device"  # the turn is over, and a1 still runs: a2 has to wait
    assert [ids for _, ids in rig.engines.batches] == [("a1",)]
    rig.run_until(lambda: answered(world, "a1", "b1", "a2"))
    order = [ids[0] for _, ids in rig.engines.batches]
    assert order == ["a1", "b1", "a2"]


def test_a_model_that_is_deleted_while_it_runs_keeps_its_pages_until_it_has_answered() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, continuous={"a": 4}, batch_ms=300.0)
    world, rig = world_of(script, *"ab")
    world.send(work_item("a1", "a"))
    rig.run(50)
    row = world.rows["a"]
    world.publish(PlacementRow(row.model, row.topic, (), row.partitions))
    world.send(work_item("b1", "b"))
    rig.run(100)
    assert sample(rig).weights_bytes == 40 * MIB
    assert places(rig)["b"] == "host"
    rig.run_until(lambda: answered(world, "b1"))
    assert sample(rig).weights_bytes == 40 * MIB


def test_an_engine_that_dies_during_a_switch_leaves_its_pages_to_others() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, switch_ms=50.0)
    world, rig = world_of(script, *"ab")
    [gone] = [model for model, place in places(rig).items() if place != "device"]
    world.send(work_item("1", gone))
    rig.run_until(lambda: places(rig)[gone] == "coming")
    rig.engines.kill(ENGINE)
    rig.run(5)
    assert sample(rig).free_bytes == sample(rig).total_bytes
    world.send(work_item("2", "a"), work_item("3", "b"))
    rig.run_until(lambda: answered(world, "1", "2", "3"))


def test_suspects_too_wait_until_their_model_is_on_the_device() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, kills={"poison"})
    world, rig = world_of(script, *"ab")
    world.send(work_item("poison", "a"), work_item("a1", "a"), work_item("b1", "b"))
    rig.run_until(lambda: answered(world, "a1", "b1") and "poison" in world.results())
    assert world.results()["poison"].status == "failed"


def test_weights_that_cannot_be_read_are_told_and_the_others_serve() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, unreadable={"b"})
    world, rig = world_of(script, *"ab")
    world.send(work_item("b1", "b"), work_item("a1", "a"))
    rig.run_until(lambda: answered(world, "a1") and world.reports(ReplicaFailed))
    [failed] = world.reports(ReplicaFailed)
    assert isinstance(failed, ReplicaFailed)
    assert (failed.model, failed.code) == ("b", "switch_failed")
    rig.run(50)
    assert sample(rig).weights_bytes == 40 * MIB


def test_images_above_the_hosts_memory_go_to_the_disk() -> None:
    settings = Settings(device_memory_mb=64, host_memory_mb=50)
    script = EngineScript(images=dict.fromkeys("abcd", 20 * MIB))
    world, rig = world_of(script, *"abcd", settings=settings)
    assert sample(rig).host_used_bytes == 40 * MIB
    assert sample(rig).disk_used_bytes == 40 * MIB
    assert len(world.reports(ReplicaReady)) == 4


def test_a_disk_that_is_full_is_not_written_to_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every try writes until nothing fits any more: one for each image in a while is enough."""
    monkeypatch.setattr(mapper, "MOVE_AGAIN_MS", 2_000.0)
    script = EngineScript(images=dict.fromkeys("abcd", 20 * MIB), disk_full=True)
    seen = Notes()
    world = World(Settings(device_memory_mb=64, host_memory_mb=50))
    rig = Rig(world, INCARNATION, script, (seen,))
    for model in "abcd":
        world.place(world.add_model(model))
    rig.run(1_500)
    assert 1 <= seen.count("image_not_moved") <= 4
    rig.run(2_000)
    assert 5 <= seen.count("image_not_moved") <= 8, "it may have room again"
    script.disk_full = False
    rig.run(5_000)
    assert sample(rig).host_used_bytes == 40 * MIB


def test_an_engine_that_brings_a_model_to_the_device_without_end_is_ended() -> None:
    """Stopped, or its disk does not answer: nothing else watches it while it holds no request."""
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, stuck={"b"})
    world, rig = world_of(script, *"ab", settings=Settings(device_memory_mb=64, load_timeout_ms=1_000))
    world.send(work_item("b1", "b"))
    rig.run(900)
    assert places(rig)["b"] == "coming"
    script.stuck.clear()
    world.send(work_item("a1", "a"))
    rig.run_until(lambda: answered(world, "b1", "a1"))
    [lost] = world.reports(EngineLost)
    assert isinstance(lost, EngineLost)
    assert "bringing b to the device took longer than 1000 ms (setting load_timeout_ms)" in lost.cause


def test_settings_that_make_no_sense_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="host_memory_mb = 100 has no effect without device_memory_mb"):
        settings_from({"host_memory_mb": 100})
    with pytest.raises(ConfigError, match="device_memory_mb = 3: 0 \\(no budget\\), or 16 or more"):
        settings_from({"device_memory_mb": 3})


def told(world: World) -> dict[str, tuple[Touch, ...]]:
    """What stands beside each result, by request id."""
    records = world.log.visible(world.names.results)
    return {decode_result(record.value).request_id: touches_in(record.headers) for record in records}


def test_results_tell_that_their_model_came_in_from_where_and_who_gave_way() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, switch_ms=7.0)
    world, rig = world_of(script, *"ab")
    [there] = [model for model, place in places(rig).items() if place == "device"]
    out = "ab".replace(there, "")
    world.send(work_item("there", there), work_item("1", out), work_item("2", out))
    rig.run_until(lambda: answered(world, "there", "1", "2"))
    world.send(work_item("3", out))
    rig.run_until(lambda: answered(world, "3"))
    world.send(work_item("back", there))
    rig.run_until(lambda: answered(world, "back"))
    assert told(world)["there"] == told(world)["3"] == (), "nothing waited for what was there"
    [first] = told(world)["1"]
    assert told(world)["2"] == (first,)
    assert isinstance(first, CameIn)
    assert (first.worker, first.device, first.model, first.came_from) == ("w0", DEVICE, f"{out}@1", "host")
    assert (first.size_bytes, first.gave_way, first.left_for) == (40 * MIB, (f"{there}@1",), "")
    assert 7.0 <= first.took_ms < 20.0
    [back] = told(world)["back"]
    assert isinstance(back, CameIn)
    assert (back.gave_way, back.left_for) == ((f"{out}@1",), f"{out}@1")
    assert back.away_ms >= first.took_ms


def test_a_request_that_waits_for_the_turn_of_others_is_told_how_long() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, continuous={"a": 4}, batch_ms=300.0)
    world, rig = world_of(script, *"ab")
    world.send(work_item("a1", "a"))
    rig.run(50)
    world.send(work_item("b1", "b"))
    rig.run_until(lambda: answered(world, "a1", "b1"))
    [came] = told(world)["b1"]
    assert isinstance(came, CameIn)
    assert came.waited_ms > 200


def test_a_request_that_ends_before_its_model_comes_in_is_told_who_is_there() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB}, continuous={"a": 4}, batch_ms=900.0)
    world, rig = world_of(script, *"ab")
    world.send(work_item("a1", "a"))
    rig.run(50)
    world.send(work_item("b1", "b", deadline_at_ms=world.clock.now_ms() + 100))
    rig.run_until(lambda: "b1" in world.results())
    assert world.results()["b1"].status == "expired"
    [kept] = told(world)["b1"]
    assert isinstance(kept, KeptOut)
    assert (kept.model, kept.place, kept.held_by) == ("b@1", "host", ("a@1",))


def test_without_a_budget_results_have_no_headers() -> None:
    world, rig = world_of(EngineScript(), settings=Settings())
    world.place(world.add_model("a"))
    world.give("a", list(range(LANES)))
    world.send(work_item("a1", "a"))
    rig.run_until(lambda: answered(world, "a1"))
    assert [record.headers for record in world.log.visible(world.names.results)] == [()]


def test_a_pooled_answer_keeps_what_its_worker_told() -> None:
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB})
    world, rig = world_of(script, *"ab", fusion="pooled")
    [there] = [model for model, place in places(rig).items() if place == "device"]
    world.send(work_item("1", "ab".replace(there, "")))
    rig.run_until(lambda: world.log.visible(world.names.outputs))
    [raw] = world.log.visible(world.names.outputs)
    machine = EgressMachine(world.settings, lambda path, digest: pytest.fail("no text"), lambda topic: True)
    [finished] = machine.decide([OutputsPolled([raw], raw.timestamp_ms + 5)])
    assert touches_in(raw.headers)
    assert [touches_in(write.headers) for write in finished.writes] == [touches_in(raw.headers)]


def test_a_model_that_came_in_before_its_first_request_is_served() -> None:
    """Its partitions were given while it was on its way: nothing refreshes its queue afterwards."""
    world, rig = world_of(EngineScript(images={"a": 20 * MIB}, switch_ms=400.0), "a")
    assert places(rig)["a"] == "coming"
    rig.run_until(lambda: places(rig)["a"] == "device")
    world.send(work_item("a1", "a"))
    rig.run_until(lambda: answered(world, "a1"), 2_000)
    assert told(world)["a1"] == ()


def test_requests_routed_to_the_version_before_are_told_too() -> None:
    """The version that serves them now is the one that they waited for."""
    script = EngineScript(images={"a": 40 * MIB, "b": 40 * MIB})
    world, rig = world_of(script, *"ab")
    [there] = [model for model, place in places(rig).items() if place == "device"]
    out = "ab".replace(there, "")
    world.send(work_item("old", out, version="0"))
    rig.run_until(lambda: answered(world, "old"))
    [came] = told(world)["old"]
    assert isinstance(came, CameIn)
    assert came.model == f"{out}@1"
