"""Token deltas of answers under way: provisional records beside the transaction, numbered per attempt."""

from __future__ import annotations

from gpu_worker.sim.engine import EngineScript
from schemas.codec import decode_token_delta
from sie_stream.records import TokenDelta
from tests.unit.worker.rig import INCARNATION, World, serving, work_item


def script(**changes: object) -> EngineScript:
    return EngineScript(**{"continuous": {"m": 3}, "batch_ms": 40.0, **changes})


def deltas(world: World) -> dict[str, list[TokenDelta]]:
    found: dict[str, list[TokenDelta]] = {}
    for record in world.log.visible(world.names.tokens):
        delta = decode_token_delta(record.value)
        assert record.key == delta.request_id.encode()
        found.setdefault(delta.request_id, []).append(delta)
    return found


def test_deltas_come_before_the_result_and_begin_its_answer() -> None:
    world, rig = serving(script())
    world.send(work_item("r", stream=True), work_item("quiet"))
    rig.run(25)
    assert world.results() == {}
    assert len(deltas(world)["r"]) >= 1
    rig.run_until(lambda: len(world.results()) == 2)
    told = deltas(world)
    assert list(told) == ["r"]
    assert [delta.index for delta in told["r"]] == [0, 1, 2]
    assert {(delta.provisional, delta.incarnation, delta.attempt) for delta in told["r"]} == {(True, INCARNATION, 0)}
    outputs = world.results()["r"].outputs
    assert outputs is not None
    assert outputs.startswith("".join(delta.text for delta in told["r"]).encode())


def test_an_answer_begun_again_after_a_death_is_another_attempt_from_index_0() -> None:
    world, rig = serving(script())
    world.send(work_item("r", stream=True))
    rig.run_until(lambda: deltas(world).get("r"))
    for engine in list(rig.machine.state.engines):
        rig.engines.kill(engine)
    rig.run_until(lambda: len(world.results()) == 1)
    told = [(delta.attempt, delta.index) for delta in deltas(world)["r"]]
    assert told[0] == (0, 0)
    assert told[-3:] == [(1, 0), (1, 1), (1, 2)]


def test_a_shadow_copy_streams_nothing() -> None:
    world, rig = serving(script())
    world.send(work_item("r", stream=True, variant="~canary"))
    rig.run(200)
    assert deltas(world) == {}


def test_nothing_is_told_of_an_item_whose_partition_is_another_workers() -> None:
    world, rig = serving(script(batch_ms=4_000.0))
    world.send(work_item("r", stream=True))
    rig.run(20)
    world.take_away("m")
    rig.run(5_000)
    assert deltas(world) == {}
