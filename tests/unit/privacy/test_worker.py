"""What a worker writes about a model with protected fields: results, copies, dead letters, token deltas, data keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import structlog
from msgspec import Raw
from structlog.testing import capture_logs

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.edge.observer import LogObserver
from gpu_worker.facts import TopicMissing, WorkerCommand, WorkerEvent
from gpu_worker.sim.engine import EngineScript
from schemas.codec import decode_deadletter, decode_work, encode_work
from sie_stream.control import ReplicaFailed, ReplicaReady
from sie_stream.edge.keyring import Keyring, create_keyring
from sie_stream.ids import variant_unit
from sie_stream.privacy.datakeys import KeyTable, shred_writes, shredded_now
from sie_stream.privacy.forms import sealed_in
from sie_stream.privacy.rules import WITHHELD
from sie_stream.privacy.vault import Opener
from sie_stream.records import LogWrite
from tests.unit.privacy.kit import INPUTS, OUTPUTS, opened
from tests.unit.worker.rig import INCARNATION, Rig, World, serving, work_item
from topics.catalog import system_topics

MARKED: dict[str, Any] = {
    "input_schema": Raw(json.dumps(INPUTS).encode()),
    "output_schema": Raw(json.dumps(OUTPUTS).encode()),
    "privacy_subject": "customer",
}
ADA = json.dumps({"customer": "Ada Lovelace"}).encode()


def says_who(item: EngineInput) -> EngineOutput:
    if item.request_id == "bad":
        return EngineOutput("bad", error_code="no_vowels", error_message=f"cannot read {item.inputs.decode()}")
    customer = json.loads(item.inputs)["customer"]
    return EngineOutput(item.request_id, outputs=json.dumps({"reason": f"it is {customer}", "score": 0.5}).encode())


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return create_keyring(tmp_path / "ring")


def everything_written(world: World, *others: str) -> bytes:
    topics = [world.names.results, world.names.deadletter, world.names.keys, world.names.tokens, *others]
    records = [record for topic in topics for record in world.log.visible(topic)]
    return b"".join((record.key or b"") + (record.value or b"") for record in records)


def key_table(world: World) -> KeyTable:
    table = KeyTable()
    for record in world.log.visible(world.names.keys):
        table.heed(record.key, record.value)
    return table


def test_results_and_copies_hold_protected_values_and_their_key_comes_in_the_same_transaction(keyring: Keyring) -> None:
    world, rig = serving(EngineScript(answer=says_who), cipher=keyring, **MARKED)
    world.add_topic("copies")
    world.send(*[work_item(f"r{n}", inputs=ADA, output_topic="copies") for n in range(3)])
    rig.run(50)
    results = world.results()
    assert b"Ada Lovelace" not in everything_written(world, "copies")
    assert len(world.log.visible("copies")) == 3
    opener = Opener(key_table(world), keyring)
    for result in results.values():
        assert result.outputs is not None
        assert opened(opener, result.outputs) == {"reason": "it is Ada Lovelace", "score": 0.5}
    assert len(list(opener.table)) == 1


def test_another_worker_uses_the_key_that_is_there_until_it_is_shredded(keyring: Keyring) -> None:
    world, rig = serving(EngineScript(answer=says_who), cipher=keyring, **MARKED)
    world.send(work_item("first", inputs=ADA))
    rig.run(50)
    world.take_away("m")
    rig.run(50)
    second = Rig(world, "w1-1", EngineScript(answer=says_who))
    world.place(world.rows["m"].replicas[0].launch, "w1-1")
    second.run(100)
    world.give("m", [0, 1, 2], "w1-1")
    world.send(work_item("second", inputs=ADA))
    second.run(50)
    keys = {name: sealed_in(result.outputs) for name, result in world.results().items()}
    assert keys["first"] == keys["second"]
    (by,) = keys["first"]
    world.writer.write([*tombstones(world)])
    second.run(50)
    world.send(work_item("third", inputs=ADA))
    second.run(50)
    (other,) = sealed_in(world.results()["third"].outputs)
    assert (other.subject == by.subject, other.data_key == by.data_key) == (True, False)


def tombstones(world: World) -> Any:
    table = key_table(world)
    subject = next(iter(table)).subject
    return shred_writes(world.names.keys, table, shredded_now(table, subject, 1, "ada", ""))


def test_dead_letters_and_errors_do_not_repeat_inputs(keyring: Keyring) -> None:
    world, rig = serving(EngineScript(answer=says_who, kills={"poison"}), cipher=keyring, **MARKED)
    world.send(work_item("bad", inputs=ADA), work_item("poison", inputs=ADA))
    rig.run_until(lambda: len(world.results()) == 2)
    assert b"Ada Lovelace" not in everything_written(world)
    error = world.results()["bad"].error
    assert error is not None
    assert (error.code, error.message) == ("no_vowels", WITHHELD)
    (record,) = world.log.visible(world.names.deadletter)
    kept = decode_work(decode_deadletter(record.value).original)
    assert (kept.request_id, kept.source_offset) == ("poison", 7)
    assert sealed_in(kept.inputs)


def test_answers_under_way_are_not_told_in_plain(keyring: Keyring) -> None:
    script = EngineScript(answer=says_who, continuous={"m": 3}, batch_ms=40.0)
    world, rig = serving(script, cipher=keyring, **MARKED)
    world.send(work_item("r", inputs=ADA, stream=True))
    rig.run_until(world.results)
    assert world.log.visible(world.names.tokens) == []


def test_without_a_key_ring_such_a_model_is_not_loaded() -> None:
    world, rig = serving(EngineScript(answer=says_who), **MARKED)
    (failed,) = world.reports(ReplicaFailed)
    assert isinstance(failed, ReplicaFailed)
    assert (failed.incarnation, failed.code) == (INCARNATION, "stage2_refused")
    assert "set SIE_STREAM_PII_KEYS=DIR" in failed.message
    assert "sie-stream keys create" in failed.message
    assert rig.machine.state.outcomes.keeps_keys is False


def test_models_without_marks_write_as_they_did(keyring: Keyring) -> None:
    world, rig = serving(cipher=keyring)
    world.send(work_item("r"))
    rig.run(50)
    assert world.results()["r"].outputs == b'{"echo":{"x":1}}'
    assert world.log.visible(world.names.keys) == []


def test_outputs_that_are_no_text_fail_alone_where_only_inputs_are_marked(keyring: Keyring) -> None:
    script = EngineScript(answer=lambda item: EngineOutput(item.request_id, outputs=b'{"text":"\xff"}'))
    world, rig = serving(script, cipher=keyring, input_schema=Raw(json.dumps(INPUTS).encode()))
    world.send(work_item("r", inputs=ADA))
    rig.run(50)
    result = world.results()["r"]
    assert result.error is not None
    assert (result.status, result.error.code) == ("failed", "output_not_text")


class Heard:
    """Observes a worker."""

    def __init__(self) -> None:
        self.missing: list[TopicMissing] = []

    def saw(self, events: Sequence[WorkerEvent], commands: Sequence[WorkerCommand]) -> None:
        self.missing += [event for event in events if isinstance(event, TopicMissing)]


def test_a_worker_that_waits_for_the_data_keys_says_so_now_and_then(keyring: Keyring) -> None:
    world = World(cipher=keyring)
    world.log.admin().delete([world.names.keys])
    world.place(world.add_model("m"))
    heard = Heard()
    rig = Rig(world, script=EngineScript(answer=says_who), observers=(heard,))
    _seconds(rig, 20)
    (said,) = heard.missing
    assert said.topic == "sie.keys"
    assert "sie-stream topics apply" in said.advice
    assert "SIE_STREAM_PII_KEYS" in said.advice
    _seconds(rig, 20)
    assert len(heard.missing) == 2
    assert world.reports(ReplicaReady) == []
    world.log.admin().ensure(system_topics(world.settings))
    rig.run_until(lambda: world.reports(ReplicaReady))
    _seconds(rig, 40)
    assert len(heard.missing) == 2


def _seconds(rig: Rig, seconds: int) -> None:
    for _ in range(seconds * 10):
        rig.host.run_turn()
        rig.world.clock.advance(100)


def test_the_log_of_a_worker_names_the_missing_topic_and_what_to_do() -> None:
    with capture_logs() as lines:
        LogObserver(structlog.stdlib.get_logger()).saw([TopicMissing("sie.keys", "run it")], [])
    assert lines == [{"event": "topic_missing", "log_level": "warning", "topic": "sie.keys", "advice": "run it"}]


@pytest.mark.parametrize(
    ("changes", "kept"), [(MARKED, b""), ({}, b"\x00garbage of Ada"), ({"output_schema": MARKED["output_schema"]}, b"")]
)
def test_work_that_nobody_can_read_is_kept_only_where_nothing_is_protected(
    keyring: Keyring, changes: dict[str, Any], kept: bytes
) -> None:
    world, rig = serving(EngineScript(answer=says_who), cipher=keyring, **changes)
    world.writer.write([LogWrite(world.names.work("m"), b"\x00garbage of Ada", b"k", 1)])
    rig.run(50)
    (record,) = world.log.visible(world.names.deadletter)
    letter = decode_deadletter(record.value)
    digest = sha256(b"\x00garbage of Ada").hexdigest()
    assert (letter.original, letter.original_bytes, letter.original_sha256) == (kept, 15, digest)
    assert (letter.source_topic, letter.source_partition, letter.source_offset) == ("sie.work.m", 1, 0)
    assert (b"garbage of Ada" in everything_written(world)) is bool(kept)


def test_it_is_not_kept_either_where_no_version_is_known(keyring: Keyring) -> None:
    world = World(cipher=keyring)
    rig = Rig(world)
    world.add_model("m")
    world.give("m", [1])
    rig.run(20)
    world.writer.write([LogWrite(world.names.work("m"), b"\x00garbage of Ada", b"k", 1)])
    rig.run(50)
    (record,) = world.log.visible(world.names.deadletter)
    assert decode_deadletter(record.value).original == b""


def test_answers_of_a_variant_are_opened_by_the_name_of_the_model(keyring: Keyring) -> None:
    world, unit = World(cipher=keyring), variant_unit("m", "canary")
    rig = Rig(world, script=EngineScript(answer=says_who))
    world.place(world.add_model(unit, **MARKED))
    rig.run(100)
    world.give(unit, [1])
    rig.run(20)
    work = encode_work(work_item("r", variant="canary", inputs=ADA))
    world.writer.write([LogWrite(world.names.work(unit), work, b"", 1)])
    rig.run(50)
    result = world.results()["r"]
    assert (result.model, result.status) == ("m", "ok")
    assert opened(Opener(key_table(world), keyring), result.outputs or b"")["reason"] == "it is Ada Lovelace"


def test_protected_outputs_are_not_written_for_others_to_finish(keyring: Keyring) -> None:
    """Declarations refuse that; what is placed all the same is not loaded."""
    world, _ = serving(EngineScript(answer=says_who), cipher=keyring, fusion="pooled", **MARKED)
    (failed,) = world.reports(ReplicaFailed)
    assert isinstance(failed, ReplicaFailed)
    assert (failed.code, "fusion = pooled" in failed.message) == ("stage2_refused", True)


def test_a_dead_letter_does_not_keep_parameters_of_protected_requests(keyring: Keyring) -> None:
    world, rig = serving(EngineScript(answer=says_who, kills={"poison"}), cipher=keyring, **MARKED)
    world.send(work_item("poison", inputs=ADA, parameters=b'{"stop":["Ada"]}'))
    rig.run_until(world.results)
    assert b"Ada Lovelace" not in everything_written(world)
