"""An open request whose model is on no device: told by the newest sample of the worker that has its partition."""

from __future__ import annotations

import msgspec

from schemas.codec import encode_row
from sie_stream.cli.trace_devices import newest_samples, outside
from sie_stream.records import LogWrite
from sie_stream.telemetry import DeviceMemorySample, DeviceSample, ModelMemory
from sie_stream.touches import KeptOut
from sie_stream.tracing.story import tell
from tests.unit.cli.test_trace_reading import REQUEST, canary_request, collected

MODELS = (ModelMemory("m", "2", "host", 20), ModelMemory("a", "1", "device", 30), ModelMemory("b", "1", "disk", 9))


def sample(at_ms: int, *models: ModelMemory, incarnation: str = "w0-1", budget: bool = True) -> DeviceSample:
    memory = DeviceMemorySample(100, 1, 30, 0, 0, 70, 100, 20, 0, models)
    return DeviceSample("w0", incarnation, "cpu:0", at_ms, 1_000, 0, 100, memory=memory if budget else None)


def test_an_open_request_says_that_its_model_waits_and_who_is_there() -> None:
    log = canary_request()
    now_ms = log.clock.now_ms()
    told = (
        sample(now_ms - 900, ModelMemory("m", "2", "device", 20)),
        sample(now_ms - 100, *MODELS),
        sample(now_ms - 50, ModelMemory("m", "2", "device", 20), incarnation="w0-0"),
    )
    writes = [LogWrite("sie.telemetry", encode_row(one), partition=0) for one in told]
    log.plain_writer().write([*writes, LogWrite("sie.telemetry", b"garbage", partition=0)])
    found = collected(log, REQUEST)
    assert found.touches == (KeptOut(now_ms - 100, "w0", "cpu:0", "m@2", "host", ("a@1",)),)
    story = tell(found)
    assert [step.stage for step in story.steps if step.stage != "control"][-2:] == ["device", "open"]
    assert any(step.what == "m@2 was not on cpu:0, but in host memory; there were a@1" for step in story.steps)


def test_nothing_is_said_where_the_model_is_there_or_nobody_knows() -> None:
    work = collected(canary_request(), REQUEST).work
    assert work is not None
    assert collected(canary_request(), REQUEST).touches == ()
    there = (ModelMemory("m", "2", "device", 20), ModelMemory("m", "2", "host", 20))
    for one in (sample(1, *there), sample(1, *MODELS, budget=False), sample(1, MODELS[1])):
        assert outside({"cpu:0": one}, work) is None
    older = ModelMemory("m", "1", "coming", 20)
    stand_in = outside({"cpu:0": sample(1, older)}, work)
    assert stand_in is not None
    assert (stand_in.model, stand_in.place) == ("m@1", "coming")


def test_samples_that_cannot_be_true_are_left_out() -> None:
    log = canary_request()
    now_ms = log.clock.now_ms()
    owner = collected(log, REQUEST).owner
    assert owner is not None
    far = msgspec.structs.replace(sample(now_ms + 10**9), worker="w0")
    log.plain_writer().write([LogWrite("sie.telemetry", encode_row(far), partition=0)])
    assert newest_samples(log.visible("sie.telemetry"), owner, now_ms) == {}
