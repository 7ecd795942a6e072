"""What results tell of attempts: of a request whose engine failed with it, and of nobody else."""

from __future__ import annotations

from gpu_worker.sim.engine import EngineScript
from schemas.codec import decode_result
from sie_stream.postprocess import RESULT_OVERHEAD_BYTES
from sie_stream.provenance import KEY_BYTES_MAX
from sie_stream.records import LogRecord
from sie_stream.rollout_records import PINNED, SHADOW, pinned_in
from sie_stream.settings import Settings
from sie_stream.touches import HEADER_BYTES_MAX, Retried, Touch, touches_in
from tests.unit.worker.rig import serving, work_item


def told(records: list[LogRecord]) -> dict[str, tuple[Touch, ...]]:
    return {decode_result(record.value).request_id: touches_in(record.headers) for record in records}


def test_who_was_in_an_engine_that_died_says_so() -> None:
    world, rig = serving(EngineScript(kills={"poison"}))
    world.send(work_item("poison"), work_item("beside"))
    rig.run_until(lambda: len(world.results()) == 2)
    world.send(work_item("later"))
    rig.run_until(lambda: len(world.results()) == 3)
    found = told(world.log.visible(world.names.results))
    [once] = found["beside"]
    assert isinstance(once, Retried)
    assert (once.worker, once.attempt) == ("w0", 1)
    assert once.code
    assert [one.attempt for one in found["poison"] if isinstance(one, Retried)] == [1, 2]
    assert found["later"] == ()


def test_the_largest_outputs_leave_room_for_what_is_told() -> None:
    """Headers count: a record must not become too large by them."""
    assert HEADER_BYTES_MAX + KEY_BYTES_MAX < RESULT_OVERHEAD_BYTES
    settings = Settings()
    filled = "x" * (settings.record_bytes_max - RESULT_OVERHEAD_BYTES - 20)
    world, rig = serving(EngineScript(kills={"poison"}), settings)
    world.send(work_item("poison"), work_item("beside", inputs=f'"{filled}"'.encode()))
    rig.run_until(lambda: len(world.results()) == 2)
    records = world.log.visible(world.names.results)
    assert world.results()["beside"].status == "ok"
    assert len(told(records)["beside"]) == 1


def test_results_say_that_content_chose_their_variant() -> None:
    world, rig = serving(EngineScript(kills={"poison"}))
    world.send(work_item("key"))
    world.send(work_item("pinned"), work_item("poison"), work_item("late", deadline_at_ms=1), headers=PINNED)
    world.send(work_item("copy", variant=f"{SHADOW}canary"), headers=PINNED)
    rig.run_until(lambda: len(world.results()) == 4 and world.log.visible(world.names.shadow))
    records = [*world.log.visible(world.names.results), *world.log.visible(world.names.shadow)]
    marked = {decode_result(record.value).request_id: pinned_in(record.headers) for record in records}
    assert marked == {"key": (), "pinned": PINNED, "poison": PINNED, "late": PINNED, "copy": PINNED}
