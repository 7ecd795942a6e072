"""sie.keys over the log in memory: shredding, rotation, and what is said of data that nobody can read any more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import Raw

from schemas.codec import encode_row
from sie_stream.cli.audit_contents import Payloads
from sie_stream.cli.keys import plain_outputs
from sie_stream.cli.trace_lookup import Routes
from sie_stream.control import ModelRow
from sie_stream.edge.key_table import read_key_table
from sie_stream.edge.key_topic import KeyReaders, NothingHeld, rewrap, shred
from sie_stream.edge.keyring import Keyring, add_kek
from sie_stream.errors import ConfigError, Fenced
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import LogReader
from sie_stream.privacy.datakeys import key_write
from sie_stream.privacy.vault import Opener
from sie_stream.records import LogRecord, LogWrite, Provenance, Result, Timings, Usage
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from tests.unit.privacy.kit import INPUTS, OUTPUTS, Ring
from topics.catalog import system_topics

NAMES = TopicNames()


class Latest:
    """A reader whose end offsets count open transactions."""

    def __init__(self, sim: SimLog) -> None:
        self._sim = sim
        self._reader = sim.reader("latest")

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self._sim.cluster.existing(place).end for place in places}


def readers_of(sim: SimLog) -> KeyReaders:
    return KeyReaders(sim.reader("g"), Latest(sim))  # type: ignore[arg-type]


class Log:
    """The topics, with what a worker of that ring wrote."""

    def __init__(self, ring: Ring) -> None:
        self.sim = SimLog(session_timeout_ms=10_000)
        self.sim.admin().ensure(system_topics(Settings()))
        self.ring = ring
        self.ada = ring.outputs("ada", {"reason": "because of Ada"})
        self.bob = ring.outputs("bob", {"reason": "because of Bob"})
        self.sim.plain_writer().write(ring.topic)

    @property
    def reader(self) -> LogReader:
        return self.sim.reader("g")

    @property
    def readers(self) -> KeyReaders:
        return readers_of(self.sim)

    def shred(self, subject: str, told: tuple[int, str, str] = (7, "ada", "asked for")) -> int:
        writer = self.sim.transactional_writer(NAMES.keys_transactional_id)
        name = self.ring.keyring.subject_of(subject.encode())
        return shred(self.readers, writer, NAMES, name, told)[1]

    def opener(self, ring: Keyring) -> Opener:
        return Opener(read_key_table(self.reader, NAMES), ring)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(Ring(tmp_path))


def test_shredding_leaves_a_fact_and_nothing_to_read(log: Log) -> None:
    assert log.shred("ada") == 1
    opener = log.opener(log.ring.keyring)
    outputs, refused = plain_outputs(opener, "m", json.loads(log.ada))
    assert outputs == json.loads(log.ada)
    assert len(refused) == 1
    assert "was shredded" in refused[0]
    assert plain_outputs(opener, "m", json.loads(log.bob)) == ({"reason": "because of Bob"}, [])
    fact = opener.table.shreds[log.ring.keyring.subject_of(b"ada")]
    assert (fact.at_ms, fact.actor, fact.reason, len(fact.data_keys)) == (7, "ada", "asked for", 1)


def test_a_person_for_whom_nothing_is_held_is_told_and_not_recorded(log: Log) -> None:
    with pytest.raises(NothingHeld, match="nothing is held for this person"):
        log.shred("adda")
    assert log.opener(log.ring.keyring).table.shreds == {}


def test_shredding_again_keeps_when_and_why_it_was_done(log: Log) -> None:
    assert log.shred("ada") == 1
    assert log.shred("ada", (9, "eve", "again")) == 0
    [fact] = log.opener(log.ring.keyring).table.shreds.values()
    assert (fact.at_ms, fact.actor, fact.reason, len(fact.data_keys)) == (7, "ada", "asked for", 1)


def test_rotation_puts_every_key_under_the_new_one_and_shredded_ones_stay_gone(log: Log) -> None:
    log.shred("ada")
    rotated = add_kek(log.ring.folder)
    writer = log.sim.transactional_writer(NAMES.keys_transactional_id)
    assert rewrap(log.readers, writer, NAMES, rotated) == (1, 0)
    opener = log.opener(rotated)
    assert [wrapped.kek for wrapped in opener.table] == ["kek-0002"]
    assert plain_outputs(opener, "m", json.loads(log.bob))[0] == {"reason": "because of Bob"}
    assert opener.table.any_shredded(log.ada)


def test_a_rotation_that_is_overtaken_by_a_shredding_cannot_bring_a_key_back(log: Log) -> None:
    rotated = add_kek(log.ring.folder)
    writer = log.sim.transactional_writer(NAMES.keys_transactional_id)

    class Overtaken:
        """The reader of a rotation, while which somebody shreds."""

        def __init__(self) -> None:
            self._reader = log.reader

        def __getattr__(self, name: str) -> object:
            return getattr(self._reader, name)

        def unassign(self, partitions: list) -> None:
            self._reader.unassign(partitions)
            log.shred("ada")

    with pytest.raises(Fenced):
        rewrap(KeyReaders(Overtaken(), log.readers.latest), writer, NAMES, rotated)  # type: ignore[arg-type]
    assert log.opener(rotated).table.any_shredded(log.ada)


@pytest.mark.parametrize("held_before", [True, False])
def test_a_key_that_was_committed_behind_an_open_transaction_is_shredded_too(log: Log, held_before: bool) -> None:
    name = log.ring.keyring.subject_of(b"ada" if held_before else b"carol")
    slow = log.sim.transactional_writer("a-slow-worker")
    slow.init()
    slow.begin()
    slow.write([key_write(NAMES.keys, log.ring.keyring.make("f" * 32)[0])])
    log.sim.plain_writer().write([key_write(NAMES.keys, log.ring.keyring.make(name)[0])])

    class Patient:
        """What is committed; the slow worker is done after some polls."""

        def __init__(self) -> None:
            self._reader = log.reader
            self._polls = 0

        def __getattr__(self, name: str) -> object:
            return getattr(self._reader, name)

        def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
            self._polls += 1
            if self._polls == 3:
                slow.commit()
            return self._reader.poll(records_max, wait_ms)

    writer = log.sim.transactional_writer(NAMES.keys_transactional_id)
    readers = KeyReaders(Patient(), log.readers.latest)  # type: ignore[arg-type]
    removed = shred(readers, writer, NAMES, name, (7, "ada", ""))[1]
    assert removed == 1 + held_before
    assert log.opener(log.ring.keyring).table.of(name) == ()


def test_without_the_topic_it_is_said_how_to_make_it(tmp_path: Path) -> None:
    empty = SimLog(session_timeout_ms=10_000)
    writer = empty.transactional_writer(NAMES.keys_transactional_id)
    with pytest.raises(ConfigError, match="topics apply"):
        shred(readers_of(empty), writer, NAMES, "s", (1, "a", ""))


def test_bundles_keep_protected_values_as_written_hash_older_plain_ones_and_count_the_shredded(log: Log) -> None:
    spec = Raw(json.dumps({"input_schema": INPUTS, "output_schema": OUTPUTS}).encode())
    row = ModelRow("m", "1", 1, spec, "accepted", 1)
    log.sim.plain_writer().write([LogWrite(NAMES.models, encode_row(row), b"m")])
    log.shred("ada")
    reader = log.reader
    payloads = Payloads(reader, Routes(reader, NAMES), NAMES, b"key")

    def result(outputs: bytes) -> Result:
        origin = Provenance("sie.requests", 0, 1)
        return Result(*("r", "ok", "mi", "m", "1", "s", outputs, None, Usage(), Timings(total=3.0), origin, 5))

    assert payloads.outputs(result(log.ada)) == log.ada
    assert payloads.outputs(result(log.bob)) == log.bob
    assert payloads.shredded == 1
    older = payloads.outputs(result(b'{"reason":"because of Eve","score":1}'))
    assert older is not None
    assert b"Eve" not in older
    inputs = payloads.inputs("m", b'{"customer":"Eve","age":3}', refused=False)
    assert inputs is not None
    assert b"Eve" not in inputs
