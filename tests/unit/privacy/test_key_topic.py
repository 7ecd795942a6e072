"""sie.keys over the log in memory: shredding, rotation, and what is said of data that nobody can read any more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from msgspec import Raw
from typer.testing import CliRunner

from schemas.codec import encode_row
from sie_stream.cli.audit_contents import Payloads
from sie_stream.cli.declared_outputs import declared_outputs
from sie_stream.cli.keys import app, plain_outputs
from sie_stream.cli.trace_lookup import Routes
from sie_stream.control import ModelRow
from sie_stream.edge.connection import Connection
from sie_stream.edge.key_table import KeyReaders, key_table_of, read_key_table
from sie_stream.edge.key_topic import NothingHeld, open_keys, rewrap, shred
from sie_stream.edge.keyring import Keyring, add_kek
from sie_stream.errors import ConfigError, Fenced
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.ports import LogReader
from sie_stream.privacy.datakeys import key_write
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.privacy.vault import Opener
from sie_stream.records import LogRecord, LogWrite, Provenance, Result, Timings, Usage
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from tests.unit.privacy.kit import INPUTS, OUTPUTS, Ring
from topics.catalog import system_topics

NAMES = TopicNames()
DECLARED = DeclaredOutputs([("m", "1", json.dumps(OUTPUTS).encode())])


def answer(outputs: bytes) -> dict[str, object]:
    return {"model": "m", "version": "1", "outputs": json.loads(outputs)}


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
        return Opener(read_key_table(self.readers, NAMES), ring)


class Behind:
    """A data key that was committed behind a transaction that is open, until somebody reads for a while."""

    def __init__(self, log: Log, subject: str) -> None:
        self._log = log
        self.slow = log.sim.transactional_writer("a-slow-worker")
        self.slow.init()
        self.slow.begin()
        self.slow.write([key_write(NAMES.keys, log.ring.keyring.make("f" * 32)[0])])
        log.sim.plain_writer().write([key_write(NAMES.keys, log.ring.keyring.make(subject)[0])])

    def reader(self) -> LogReader:
        """What is committed; the slow worker is done after some polls."""
        outer, reader = self, self._log.sim.reader("g")

        class Patient:
            polls = 0

            def __getattr__(self, name: str) -> object:
                return getattr(reader, name)

            def poll(self, records_max: int, wait_ms: int) -> list[LogRecord]:
                self.polls += 1
                if self.polls == 3:
                    outer.slow.commit()
                return reader.poll(records_max, wait_ms)

        return Patient()  # type: ignore[return-value]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(Ring(tmp_path))


def test_a_text_that_only_looks_encrypted_is_no_failure_of_keys_open(log: Log) -> None:
    looks = f"aes-256-gcm:{'0' * 32}:{'0' * 16}:{'A' * 60}"
    opener = log.opener(log.ring.keyring)
    outputs = json.dumps({"score": looks, **json.loads(log.bob)}).encode()
    found = plain_outputs(opener, DECLARED, answer(outputs))
    assert found == ({"score": looks, "reason": "because of Bob"}, [])
    assert plain_outputs(opener, DeclaredOutputs(()), answer(outputs))[1] != []


def test_shredding_leaves_a_fact_and_nothing_to_read(log: Log) -> None:
    assert log.shred("ada") == 1
    opener = log.opener(log.ring.keyring)
    outputs, refused = plain_outputs(opener, DECLARED, answer(log.ada))
    assert outputs == json.loads(log.ada)
    assert len(refused) == 1
    assert "was shredded" in refused[0]
    assert plain_outputs(opener, DECLARED, answer(log.bob)) == ({"reason": "because of Bob"}, [])
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
    assert rewrap(log.readers, writer, NAMES, lambda: rotated) == ("kek-0002", 1, 0)
    opener = log.opener(rotated)
    assert [wrapped.kek for wrapped in opener.table] == ["kek-0002"]
    assert plain_outputs(opener, DECLARED, answer(log.bob))[0] == {"reason": "because of Bob"}
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
        rewrap(KeyReaders(Overtaken(), log.readers.latest), writer, NAMES, lambda: rotated)  # type: ignore[arg-type]
    assert log.opener(rotated).table.any_shredded(log.ada)


@pytest.mark.parametrize("held_before", [True, False])
def test_a_key_that_was_committed_behind_an_open_transaction_is_shredded_too(log: Log, held_before: bool) -> None:
    name = log.ring.keyring.subject_of(b"ada" if held_before else b"carol")
    behind = Behind(log, name)
    writer = log.sim.transactional_writer(NAMES.keys_transactional_id)
    readers = KeyReaders(behind.reader(), log.readers.latest)
    removed = shred(readers, writer, NAMES, name, (7, "ada", ""))[1]
    assert removed == 1 + held_before
    assert log.opener(log.ring.keyring).table.of(name) == ()


def connected(log: Log, reader: Callable[[], LogReader]) -> Connection:
    """What tools talk to Kafka through, over the log in memory."""
    found = SimpleNamespace(
        settings=Settings(),
        reader=reader,
        latest_reader=lambda: log.readers.latest,
        transactional_writer=log.sim.transactional_writer,
    )
    return cast(Connection, found)


def test_whoever_reads_the_keys_waits_for_what_an_open_transaction_hides(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay and audit by open_keys and key_table_of, `keys list` and `keys open` by themselves."""
    ring, name = log.ring, log.ring.keyring.subject_of(b"carol")
    monkeypatch.setenv("SIE_STREAM_PII_KEYS", str(ring.folder))
    connection = connected(log, Behind(log, name).reader)
    settings = msgspec.structs.replace(connection.settings, pii_keys=str(ring.folder))
    monkeypatch.setattr(connection, "settings", settings)
    assert len(open_keys(connection).table.of(name)) == 1
    assert len(key_table_of(connected(log, Behind(log, name).reader)).of(name)) == 2
    connection = connected(log, Behind(log, name).reader)
    monkeypatch.setattr(Connection, "open", lambda bootstrap: connection)
    listed = CliRunner().invoke(app, ["list", "-o", "json"])
    assert json.loads(listed.stdout)["keks"] == [{"data_keys": 8, "here": True, "kek": "kek-0001"}]


def test_keys_open_reads_what_was_answered_behind_an_open_transaction(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = Behind(log, "e" * 32)
    written = log.ring.outputs("eve", {"reason": "because of Eve"})
    log.sim.plain_writer().write(log.ring.topic[-1:])
    monkeypatch.setenv("SIE_STREAM_PII_KEYS", str(log.ring.folder))
    connection = connected(log, behind.reader)
    monkeypatch.setattr(Connection, "open", lambda bootstrap: connection)
    told = CliRunner().invoke(app, ["open"], input=json.dumps(answer(written)))
    assert (told.exit_code, json.loads(told.stdout)["outputs"]) == (0, {"reason": "because of Eve"})


def test_a_rotation_that_cannot_begin_leaves_no_key_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(Ring(tmp_path))
    log.sim.admin().delete([NAMES.keys])
    connection = connected(log, lambda: log.reader)
    monkeypatch.setattr(Connection, "open", lambda bootstrap: connection)
    before = sorted(log.ring.folder.iterdir())
    told = CliRunner().invoke(app, ["rotate", "--ring", str(log.ring.folder)])
    assert isinstance(told.exception, ConfigError)
    assert "topics apply" in str(told.exception)
    assert sorted(log.ring.folder.iterdir()) == before
    log.sim.admin().ensure(system_topics(Settings()))
    done = CliRunner().invoke(app, ["rotate", "--ring", str(log.ring.folder), "-o", "json"])
    assert json.loads(done.stdout)["current"] == "kek-0002"


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
    declared = declared_outputs(reader, NAMES, lambda: log.sim.reader("history"))
    payloads = Payloads(reader, Routes(reader, NAMES), NAMES, b"key", read_key_table(log.readers, NAMES), declared)

    def result(outputs: bytes) -> Result:
        origin = Provenance("sie.requests", 0, 1)
        return Result(*("r", "ok", "mi", "m", "1", "s", outputs, None, Usage(), Timings(total=3.0), origin, 5))

    assert payloads.outputs(result(log.ada)) == log.ada
    assert payloads.outputs(result(log.bob)) == log.bob
    assert payloads.shredded == 1
    looks = (
        f'{{"reason":"hmac-sha256:eve-was-here:{"0" * 64}","score":{log.ada[log.ada.index(b":") + 1 : -1].decode()}}}'
    )
    forged = payloads.outputs(result(looks.encode()))
    assert forged is not None
    assert payloads.shredded == 1, "it stands where nothing is protected"
    gone = msgspec.structs.replace(result(log.bob), version="0")
    assert b"aes-256-gcm" not in (payloads.outputs(gone) or b""), "nobody knows what that version protected"
    older = payloads.outputs(result(b'{"reason":"because of Eve","score":1}'))
    assert older is not None
    assert b"Eve" not in older
    inputs = payloads.inputs("m", b'{"customer":"Eve","age":3}', refused=False)
    assert inputs is not None
    assert b"Eve" not in inputs
