"""What results tell of attempts: of a request whose engine failed with it, and of nobody else."""

from __future__ import annotations

from gpu_worker.sim.engine import EngineScript
from schemas.codec import decode_result
from sie_stream.records import LogRecord
from sie_stream.settings import Settings
from sie_stream.touches import Retried, Touch, touches_in
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


def test_a_result_that_fills_its_record_goes_without() -> None:
    """Headers count: a record must not become too large by what it tells."""
    settings = Settings()
    room = settings.record_bytes_max - 8 * 1024
    world, rig = serving(EngineScript(kills={"poison"}), settings)
    text = '{"text":"' + "x" * room + '"}'
    world.send(work_item("poison"), work_item("beside", inputs=text.encode()))
    rig.run_until(lambda: len(world.results()) == 2)
    record = next(
        one for one in world.log.visible(world.names.results) if decode_result(one.value).request_id == "beside"
    )
    assert (decode_result(record.value).status, record.headers) == ("ok", ())
