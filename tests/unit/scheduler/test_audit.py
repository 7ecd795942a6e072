"""The audit finds every way in which sie.decisions can differ from what sie.cluster leads to, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from scheduler.audit import DecisionAudit, audit
from scheduler.host import SchedulerHost
from scheduler.snapshots import oldest_snapshot
from schemas.codec import decode_decision, encode_decision
from sie_stream import __version__
from sie_stream.cli.audit_decisions import audited, in_words
from sie_stream.control import ApplyModel, SchedulerElected, UndoDecision, WorkerExited
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord
from sie_stream.settings import Settings
from tests.unit.scheduler.kit import joined, spec_json
from tests.unit.scheduler.test_host import ALIVE, TWO, Sim

STRICT = Settings(snapshot_every_records=40, worker_lost_after_ms=1_000, tick_ms=100, record_bytes_max=50_000)


def by(sim: Sim, settings: Settings | None = None) -> DecisionAudit:
    return audited(sim.log.reader(sim.names.scheduler_group), settings or sim.settings)


def busy(settings: Settings | None = None) -> tuple[Sim, SchedulerHost]:
    """A cluster with a history: a model, the loss of its worker, an undo."""
    sim = Sim(settings)
    sim.tell(ApplyModel(Raw(spec_json(replicas=TWO)), "ann"))
    host = sim.leader()
    sim.tell(joined("w0", "a"), joined("w1", "b"))
    sim.run(host, 300, ALIVE)
    sim.answer_loads()
    sim.run(host, 200, ALIVE)
    sim.tell(WorkerExited("w0", "a", -9, "up"))
    sim.run(host, 300, ALIVE[1:])
    sim.answer_loads()
    sim.run(host, 300, ALIVE[1:])
    return sim, host


def given(sim: Sim, decided: list[LogRecord], *, until: int | None = None, decided_from: int = 0) -> DecisionAudit:
    """An audit of these records of sie.decisions."""
    return audit(
        sim.log.visible(sim.names.cluster), decided, sim.settings, "1.0", until=until, decided_from=decided_from
    )


def recorded(sim: Sim) -> list[LogRecord]:
    return sim.log.visible(sim.names.decisions)


def test_what_was_decided_is_what_a_fold_decides() -> None:
    sim, host = busy()
    host.stop()
    lost = next(decision for decision in sim.decisions() if decision.kind == "worker_lost")
    other = sim.leader()
    sim.tell(joined("w0", "c"))
    sim.run(other, 300, (("w0", "c"), ALIVE[1]))
    sim.tell(UndoDecision(lost.decision, "ann"))
    sim.run(other, 300, (("w0", "c"), ALIVE[1]))
    assert "placement_restored" in [decision.kind for decision in sim.decisions()]
    writes: list[str] = []
    sim.log.cluster.before = lambda operation, client: writes.append(operation)
    report = by(sim)
    assert not {"write", "begin", "commit", "send_offsets", "init"} & set(writes)
    assert report.same
    assert (report.equal, report.started_from, report.fold_from) == (len(sim.decisions()), "beginning", 0)
    assert [(leader.scheduler, leader.release) for leader in report.leaders] == [
        ("s1", __version__),
        ("s2", __version__),
    ]
    assert report.notes == ()
    assert next(in_words(report)) == "decisions are the same"


def test_the_settings_of_each_leader_come_from_the_log() -> None:
    sim, host = busy()
    sim.run(host, 300, ALIVE[1:])
    sim.settings = STRICT
    strict = sim.leader()
    sim.run(strict, 1_300)
    lost = [decision for decision in sim.decisions() if decision.kind == "worker_lost"]
    assert "1000 ms are allowed" in lost[-1].reason
    report = by(sim, Settings(topic_prefix="sie.", worker_lost_after_ms=60_000, load_timeout_ms=5_000))
    assert report.same, report.first_difference
    assert report.leaders[0].other_settings["worker_lost_after_ms"] == "2000, here 60000"
    assert report.leaders[1].other_settings["tick_ms"] == "100, here 250"
    assert any("the leader's is used" in line for line in in_words(report))


def test_what_was_written_before_anybody_led_is_folded_with_the_first_leader_s_settings() -> None:
    sim = Sim(STRICT)
    large = {"type": "object", "properties": {f"field_{n}": {"type": "integer"} for n in range(1_500)}}
    sim.tell(ApplyModel(Raw(spec_json(input_schema=large))))
    host = sim.leader()
    sim.run(host, 300)
    assert sim.decisions()[0].kind == "model_rejected"
    assert by(sim, Settings()).same


def test_between_two_leaders_the_settings_of_the_first_hold() -> None:
    """Records after the first one's last commit are decided by the second, before its own SchedulerElected."""
    sim, _ = busy()
    large = {"type": "object", "properties": {f"field_{n}": {"type": "integer"} for n in range(1_500)}}
    sim.tell(ApplyModel(Raw(spec_json("large", input_schema=large))))
    sim.settings = STRICT
    sim.run(sim.leader(), 300)
    (about,) = [decision for decision in sim.decisions() if decision.subject == "large" and "model" in decision.kind]
    assert about.kind == "model_accepted"
    assert by(sim).same


def test_what_is_not_decided_yet_is_not_missing() -> None:
    sim, _ = busy()
    sim.tell(ApplyModel(Raw(spec_json("later"))))
    report = by(sim)
    assert report.same
    assert report.fold_until <= sim.history()[-1][0].offset


def changed(record: LogRecord, **fields: object) -> LogRecord:
    value = encode_decision(msgspec.structs.replace(decode_decision(record.value), **fields))
    return msgspec.structs.replace(record, value=value)


def test_a_changed_decision_is_shown_with_both_sides() -> None:
    sim, _ = busy()
    records = recorded(sim)
    records[5] = changed(records[5], reason="Because I say so.")
    report = given(sim, records)
    assert (report.same, report.differing, report.equal) == (False, 1, len(records) - 1)
    first = report.first_difference
    assert first is not None
    assert (first.kind, first.fields, first.decisions_offset) == ("differing", ("reason",), records[5].offset)
    assert first.recorded is not None
    assert first.refolded is not None
    assert first.recorded.reason == "Because I say so."
    assert first.refolded == sim.decisions()[5]
    said = "\n".join(in_words(report))
    assert "DECISIONS DIFFER" in said
    assert "Because I say so." in said
    assert first.refolded.reason in said


def test_missing_extra_repeated_unreadable_and_disordered_ones_are_told() -> None:
    sim, _ = busy()
    records = recorded(sim)
    missing = given(sim, [*records[:3], *records[4:]])
    assert (missing.same, missing.missing, missing.extra) == (False, 1, 0)
    assert missing.first_difference is not None
    assert (missing.first_difference.kind, missing.first_difference.recorded) == ("missing", None)
    extra = given(sim, [*records[:3], changed(records[2], decision="d-3-9"), *records[3:]], until=10_000)
    assert (extra.same, extra.missing, extra.extra) == (False, 0, 1)
    repeated = given(sim, [*records, records[4]])
    assert (repeated.same, repeated.repeated, repeated.equal) == (False, 1, len(records))
    unreadable = given(sim, [*records, msgspec.structs.replace(records[4], value=b"\x00garbage")])
    assert (unreadable.same, unreadable.unreadable) == (False, 1)
    assert b"garbage".hex() in "\n".join(in_words(unreadable))
    swapped = given(sim, [records[1], records[0], *records[2:]])
    assert (swapped.same, swapped.out_of_order, swapped.equal) == (False, 1, len(records))


def test_the_first_difference_is_the_one_with_the_first_cause() -> None:
    sim, _ = busy()
    records = recorded(sim)
    late, early = changed(records[9], subject="x"), changed(records[4], subject="y")
    report = given(sim, [*records[:4], early, *records[5:9], late, *records[10:]])
    assert report.differing == 2
    assert report.first_difference is not None
    assert report.first_difference.decision == decode_decision(records[4].value).decision


def test_other_bytes_for_the_same_decision_are_no_difference() -> None:
    sim, _ = busy()
    records = recorded(sim)
    value = records[3].value
    assert value is not None
    start = value.index(b"{")
    spaced = msgspec.json.format(value[start:], indent=1)
    head = encode_decision(decode_decision(value))[: start - 2]
    length = len(spaced)
    varint = bytearray()
    zigzag = length << 1
    while zigzag > 0x7F:
        varint.append((zigzag & 0x7F) | 0x80)
        zigzag >>= 7
    varint.append(zigzag)
    records[3] = msgspec.structs.replace(records[3], value=head + bytes(varint) + spaced)
    report = given(sim, records)
    assert (report.same, report.rewritten, report.equal) == (True, 1, len(records) - 1)


def test_where_the_log_begins_late_it_folds_on_from_a_snapshot() -> None:
    sim, host = busy()
    sim.run(host, 3_000, ALIVE[1:])
    sim.tell(ApplyModel(Raw(spec_json("later", replicas=TWO))))
    sim.run(host, 1_000, ALIVE[1:])
    snapshot = oldest_snapshot(sim.log.visible(sim.names.snapshots), 30)
    assert snapshot is not None
    sim.log.delete_before(TopicPartition(sim.names.cluster, 0), snapshot.next_offset - 3)
    report = by(sim)
    assert report.same, report.first_difference
    assert (report.started_from, report.fold_from) == ("snapshot", snapshot.next_offset)
    assert report.unchecked > 5
    assert report.equal >= 3
    assert report.unchecked + report.equal == len(sim.decisions())
    assert f"Offsets 0 to {snapshot.next_offset - 4} of sie.cluster are gone" in report.notes[0]
    assert "snapshot at offset" in report.notes[1]


def test_without_a_snapshot_it_says_that_differences_prove_nothing() -> None:
    sim = Sim(Settings())
    host = sim.leader()
    sim.tell(joined("w0", "a"), ApplyModel(Raw(spec_json())))
    sim.run(host, 500, ALIVE[:1])
    sim.log.delete_before(TopicPartition(sim.names.cluster, 0), 5)
    report = by(sim)
    assert report.started_from == "oldest record"
    assert any("prove nothing" in note for note in report.notes)


def test_decisions_that_retention_took_are_not_missing() -> None:
    sim, _ = busy()
    sim.log.delete_before(TopicPartition(sim.names.decisions, 0), 4)
    report = by(sim)
    assert report.same
    assert report.expired >= 1
    assert any("older than the oldest" in note for note in report.notes)


def test_a_leader_of_an_older_release_told_nothing() -> None:
    sim, _ = busy()
    sim.tell(SchedulerElected("old"))
    report = audit(
        sim.log.visible(sim.names.cluster),
        recorded(sim),
        sim.settings,
        __version__,
        until=sim.history()[-1][0].offset + 1,
    )
    assert not report.leaders[-1].told_settings
    assert any("did not tell their settings" in note for note in report.notes)
    assert any(note.startswith("Release unknown") for note in report.notes)


@pytest.mark.parametrize("known", [True, False])
def test_an_empty_log_has_nothing_to_differ(known: bool) -> None:
    report = audit([], [], Settings(), "1.0", until=0 if known else None)
    assert report.same
    assert next(in_words(report)) == "decisions are the same"
