"""Replay of logs as they get in years: several schemas, aborted and open transactions, compaction, deleted heads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewTopic

from schemas.catalog import BY_ID, released_text
from schemas.codec import decode_result, decode_work
from schemas.registry_table import Registration, registration_write
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.key_topic import rewrap, shred
from sie_stream.edge.keyring import Keyring, add_kek, create_keyring
from sie_stream.records import LogWrite
from sie_stream.replay.report import Report
from tests.integration.odd_logs import FLUSH_S, MODEL, OddLog, framed, now_ms, petals
from tests.waiting import PATIENCE_MS, PATIENCE_S, wait_until

pytestmark = pytest.mark.integration
HOUR_MS = 3_600_000
TRAIT = [{"name": "petal_length_cm", "type": "double"}, {"name": "petal_width_cm", "type": "double"}]
FLOWER = {"type": "record", "name": "Flower", "fields": TRAIT}
HEAD = [{"name": "model", "type": "string"}, {"name": "request_id", "type": "string"}]
FIRST = {"type": "record", "name": "Ask", "fields": [*HEAD, {"name": "inputs", "type": FLOWER}]}
SECOND = {
    "type": "record",
    "name": "Ask",
    "fields": [
        {"name": "shop", "type": "string"},
        {"name": "inputs", "type": {"type": "map", "values": "double"}},
        *HEAD,
    ],
}
"""The same record a version later: other fields, in another order, with other types."""


def as_json(request_id: str, number: int) -> bytes:
    return json.dumps({"model": MODEL, "request_id": request_id, "inputs": petals(number)}).encode()


def test_every_form_of_request_between_aborted_transactions(kafka: EmbeddedBroker) -> None:
    """JSON, our Avro and two schemas of a user, with the time of an event two days ago on every record. What was
    aborted on the work and result topics never happened."""
    here = OddLog(kafka, "forms.")
    here.writer.write(
        [
            registration_write(here.names.schemas, Registration("ask-value", version, 999 + version, json.dumps(text)))
            for version, text in ((1, FIRST), (2, SECOND))
        ]
    )
    here.writer.flush(PATIENCE_MS)
    released = json.loads(released_text(BY_ID[1]))  # as clients of the first release write it
    requests, event_ms = here.names.requests, now_ms() - 48 * HOUR_MS

    def send(first: int, inputs: dict[str, float] | None = None) -> None:
        """One request of each form."""
        flower = inputs or petals(first)
        fields = [{"model": MODEL, "request_id": f"r{first + form}", "inputs": flower} for form in range(4)]
        values = (
            json.dumps(fields[0]).encode(),
            framed(1, released, fields[1] | {"inputs": json.dumps(flower)}),
            framed(1_000, FIRST, fields[2]),
            framed(1_001, SECOND, fields[3] | {"shop": "here"}),
        )
        for form, value in enumerate(values):
            here.produce(requests, value, f"r{first + form}", event_ms)

    with here.ingress("0"):
        send(0)
        items = here.routed(4)
        lost = [LogWrite(here.work, record.value, record.key, record.partition) for record in items]
        here.transaction(lost).abort_transaction(FLUSH_S)
        here.transaction(here.answers(items, wrong=b'{"label":"never"}')).abort_transaction(FLUSH_S)
        here.answer(items)
        send(4)
        send(8, {"petal_length_cm": 400.0, "petal_width_cm": 0.1})
        unknown = framed(4_242, FIRST, {"model": MODEL, "request_id": "x", "inputs": petals(1)})
        here.produce(requests, unknown, "x", event_ms)
        later = here.routed(13)[4:]
        here.transaction(here.answers(later, wrong=b'{"label":"never"}')).abort_transaction(FLUSH_S)
        here.answer(later)
    assert {decode_work(record.value).schema_id for record in [*items, *later]} == {0, 1, 1_000, 1_001}
    heads = sum(result.provenance.source_offset == 0 for result in here.results())
    for question, count in (
        ({"topic": requests}, 13),
        ({"topic": here.names.results}, 13),
        ({"topic": requests, "until": "1"}, heads),
        ({"model": MODEL}, 8),
    ):
        report = here.replay(**question)
        assert (report.replayed, report.equal, report.causes, report.unscored) == (count, count, {}, {}), question
    here.close()


@contextmanager
def eager_cleaner(broker: EmbeddedBroker) -> Iterator[AdminClient]:
    """The log cleaner looks for work every 50 ms instead of every 15 s."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    (number,) = admin.list_topics(timeout=PATIENCE_S).brokers

    def change(how: AlterConfigOpType) -> None:
        entry = ConfigEntry("log.cleaner.backoff.ms", "50", incremental_operation=how)
        asked = ConfigResource(ResourceType.BROKER, str(number), incremental_configs=[entry])
        for changed in admin.incremental_alter_configs([asked]).values():
            changed.result(PATIENCE_S)

    change(AlterConfigOpType.SET)
    yield admin
    change(AlterConfigOpType.DELETE)


ORDERS = "odd.orders"
COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0",
    "delete.retention.ms": "0",
    "segment.ms": "1000",
}


def test_requests_that_compaction_removed_are_replayed_from_their_work(kafka: EmbeddedBroker) -> None:
    """A bound topic keeps the newest request of each key. Of a refusal, whose request was all there was, is told that
    it is gone. Results lie where the requests were, which no record that is left says."""
    here, now = OddLog(kafka, "compacted.", bound=ORDERS), now_ms()
    old_ms = now - 3 * HOUR_MS

    def order(number: int, key: str, at_ms: int, partition: int) -> None:
        flower = petals(number) if number else {"petal_length_cm": 400.0, "petal_width_cm": 0.1}
        here.produce(ORDERS, json.dumps(flower).encode(), key, at_ms, partition)

    with eager_cleaner(kafka) as admin, here.ingress("0"):
        for made in admin.create_topics([NewTopic(ORDERS, 2, 1, config=COMPACTED)]).values():
            made.result(PATIENCE_S)
        for number in range(6):
            order(number, f"k{number}", old_ms, 0)
        order(6, "kept", old_ms, 1)
        order(7, "k", old_ms, 1)
        old = here.routed(8)
        here.answer(old, old_ms)
        for number in range(6):
            order(8 + number, f"k{number}", now, 0)
        order(14, "k", now, 1)
        for partition in (0, 1):
            order(15, "last", now + 10_000, partition)
        here.answer(here.routed(17)[len(old) :])
        kept = {(0, offset) for offset in range(6, 13)} | {(1, 0), (1, 2), (1, 3)}
        wait_until(lambda: {(one.partition, one.offset) for one in here.records(ORDERS)} == kept, "compaction")
    for question, count, causes in (
        ({}, 16, {"retention": 1}),
        ({"first": "0"}, 16, {"retention": 1}),
        ({"first": "4h"}, 16, {"retention": 1}),
        ({"first": "1h"}, 9, {}),
        ({"first": "6"}, 7, {}),
        ({"until": "6"}, 9, {"retention": 1}),
        ({"first": "1", "partitions": (1,)}, 3, {}),
    ):
        report = here.replay(topic=ORDERS, **question)
        assert (report.replayed, report.equal, report.causes) == (count, count, causes), question
        assert [one.place.offset for one in report.differences] == [0] * len(causes)
    here.close()


def test_open_transactions_hold_back_what_is_behind_them_and_deleted_heads_are_told(kafka: EmbeddedBroker) -> None:
    here = OddLog(kafka, "held.")

    def send(first: int, count: int) -> None:
        for number in range(first, first + count):
            here.produce(here.names.requests, as_json(f"r{number}", number), f"r{number}")

    with here.ingress("0"):
        send(0, 3)
        early = here.routed(3)
        here.answer(early)
        send(3, 3)
        late = here.routed(6)[3:]
        opened = here.transaction(here.answers(late, wrong=b'{"label":"never"}'))
        here.answer(late)
        report = here.replay(model=MODEL)
        assert (report.replayed, report.equal, report.causes) == (3, 3, {"missing": 3})
        assert any(here.names.results in note and "open transaction" in note for note in report.notes)
        opened.abort_transaction(FLUSH_S)
        opened = here.transaction([LogWrite(here.work, late[0].value, None, late[0].partition)])
        send(6, 2)
        report = wait_until(lambda: held_back(here), "committed work behind an open transaction")
        assert report is not None
        assert (report.replayed, report.equal, report.causes) == (6, 6, {})
        opened.abort_transaction(FLUSH_S)
        items = here.routed(8)[6:]
        assert here.replay(model=MODEL).causes == {"missing": 2}
        here.answer(items)
    assert here.replay(model=MODEL).same
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    delete_below(admin, here.work, early[-1].partition, early[-1].offset + 1)
    for report in (here.replay(model=MODEL), here.replay(topic=here.names.results)):
        assert (report.replayed, report.equal, report.causes) == (5, 5, {"retention": 3})
    answered = [(record, decode_result(record.value)) for record in here.records(here.names.results)]
    (place,) = (record for record, result in answered if result.request_id == "r3")
    # Which of the others lie before it in its partition depends on which request partition ingress read first.
    gone = {
        result.request_id
        for record, result in answered
        if record.partition == place.partition and record.offset <= place.offset
    }
    delete_below(admin, place.topic, place.partition, place.offset + 1)
    report = here.replay(model=MODEL, first=str(late[0].offset))
    assert report.causes == {"missing": len(gone - {"r0", "r1", "r2"})}
    assert any(note.startswith(here.names.results) and "are deleted" in note for note in report.notes)
    here.close()


def held_back(here: OddLog) -> Report | None:
    """Both the open record and one that is committed behind it."""
    report = here.replay(model=MODEL)
    behind = re.compile(rf"{re.escape(here.work)}\[\d+\]: (\d+) offsets from \d+ on are behind an open transaction")
    counts = [int(found[1]) for note in report.notes if (found := behind.match(note))]
    return report if sum(counts) >= 3 else None


def delete_below(admin: AdminClient, topic: str, partition: int, offset: int) -> None:
    for deleted in admin.delete_records([ClientPartition(topic, partition, offset)]).values():
        deleted.result(PATIENCE_S)


def test_answers_from_before_and_after_a_rotation_and_of_a_shredded_person(
    kafka: EmbeddedBroker, tmp_path: Path
) -> None:
    """A worker that started before the rotation goes on with the old key, one that started after it takes the new."""
    create_keyring(tmp_path / "ring")
    here = OddLog(kafka, "rotated.", ring=tmp_path / "ring")

    def send(number: int, customer: str) -> None:
        asked = {"model": MODEL, "request_id": f"r{number}", "inputs": petals(number) | {"customer": customer}}
        here.produce(here.names.requests, json.dumps(asked).encode(), f"r{number}")

    with here.ingress("0"):
        old = here.guard()
        send(0, "ada")
        send(1, "bob")
        here.answer(here.routed(2), guard=old)
        with here.changing_keys() as (readers, writer):
            rotated = rewrap(readers, writer, here.names, lambda: add_kek(tmp_path / "ring"))
        assert (rotated.current, rotated.rewrapped) == ("kek-0002", 2)
        send(2, "ada")
        here.answer(here.routed(3)[2:], guard=old)
        send(3, "ada")
        send(4, "eve")
        here.answer(here.routed(5)[3:], guard=here.guard())
        assert {json.loads(one.outputs or b"")["score"].split(":")[1] for one in here.results()} == {
            "kek-0001",
            "kek-0002",
        }
        report = here.replay(model=MODEL)
        assert (report.replayed, report.equal, report.causes) == (5, 5, {})
        with here.changing_keys() as (readers, writer):
            shred(readers, writer, here.names, Keyring(tmp_path / "ring").subject_of(b"ada"), (now_ms(), "me", ""))
        send(5, "ada")
        here.answer(here.routed(6)[5:], guard=here.guard())
    report = here.replay(model=MODEL)
    assert (report.replayed, report.equal, report.causes, report.same) == (3, 3, {"shredded": 3}, True)
    here.close()
