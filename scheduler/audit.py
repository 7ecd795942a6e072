"""Audit: fold sie.cluster again with the production machine, and demand the decisions that are on sie.decisions.

Several leaders are no difficulty: a decision is a function of the log up to its record, whoever made it. What a leader
brought along besides, the settings that decisions depend on, is in its SchedulerElected and holds from the next record
on (`machine.in_force`); before the first one of the log, those of that one hold. Records of releases that did not tell
their settings are folded with the auditor's own, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
from msgspec import Struct, structs

from scheduler.guard import GuardedMachine
from scheduler.machine import fold_settings, in_force
from scheduler.state import ClusterState
from schemas.codec import decode_cluster, decode_decision, encode_decision
from schemas.wire import CodecError
from sie_stream.control import ClusterRecord, RecordDecision, SchedulerElected
from sie_stream.decisions import Decision, place_of
from sie_stream.records import LogRecord
from sie_stream.settings import Settings

Place = tuple[int, int]
"""(offset of the cause, number among its decisions): the order of decisions."""


class Leader(Struct, frozen=True):
    """A SchedulerElected on the log."""

    offset: int
    scheduler: str
    release: str
    """Empty: of a release that did not say."""
    other_settings: dict[str, str]
    """Settings of this process that differ from what the leader told: {name: `told, here own`}."""
    told_settings: bool


class Difference(Struct, frozen=True):
    """One decision that is not the same on the log and in the refold."""

    decision: str
    kind: Literal["differing", "missing", "extra", "repeated", "unreadable"]
    """missing: the refold makes it, the log has it not. extra: the other way round."""
    cause_offset: int
    decisions_offset: int
    """Offset on sie.decisions; -1: not there."""
    fields: tuple[str, ...]
    """Fields that differ; empty when only the bytes do, or one side is missing."""
    recorded: Decision | None
    refolded: Decision | None
    recorded_hex: str = ""
    """The bytes, where they are no decision."""


class DecisionAudit(Struct):
    """What an audit found. Counts are decisions, except `records` and `unreadable_records` (of sie.cluster)."""

    fold_from: int = 0
    """First record of sie.cluster that was folded."""
    fold_until: int = 0
    """Decisions about records below it were compared: all of them are on the log."""
    started_from: Literal["beginning", "snapshot", "oldest record"] = "beginning"
    records: int = 0
    unreadable_records: int = 0
    equal: int = 0
    rewritten: int = 0
    """Equal in content, other bytes: encoded by another release."""
    differing: int = 0
    missing: int = 0
    extra: int = 0
    repeated: int = 0
    unreadable: int = 0
    out_of_order: int = 0
    unchecked: int = 0
    """Recorded, but about records before `fold_from`."""
    expired: int = 0
    """Refolded, but older than the oldest that sie.decisions still has."""
    leaders: tuple[Leader, ...] = ()
    notes: tuple[str, ...] = ()
    first_difference: Difference | None = None

    @property
    def same(self) -> bool:
        """Nothing differs in what could be compared."""
        wrong = (self.differing, self.missing, self.extra, self.repeated, self.unreadable, self.out_of_order)
        return not any(wrong)


class Recorded(Struct, frozen=True):
    """A decision as it is on sie.decisions."""

    offset: int
    value: bytes
    decision: Decision


class Folded(Struct):
    """A refold: the decisions in order, and what was met on the way."""

    decisions: dict[Place, Decision]
    leaders: list[Leader]
    records: int = 0
    unreadable_records: int = 0


def refold(settings: Settings, records: Iterable[LogRecord], until: int, state: ClusterState | None = None) -> Folded:
    """Fold the records below `until`, on from `state` where given. Records that nobody can read are counted, as the
    scheduler skips them."""
    folded = Folded({}, [])
    facts = _facts(records, until, folded)
    first: list[tuple[LogRecord, ClusterRecord]] = []
    told = None if state is None else state.settings
    if told is None:
        for record, fact in facts:  # who decided about these was elected after them, and tells its settings there
            first.append((record, fact))
            if isinstance(fact, SchedulerElected):
                told = fact.settings
                break
    machine = GuardedMachine(in_force(settings, told), state)
    for part in (first, facts):
        for record, fact in part:
            if isinstance(fact, SchedulerElected):
                folded.leaders.append(_leader(record.offset, fact, settings))
            for command in machine.step(record.offset, record.timestamp_ms, fact):
                if isinstance(command, RecordDecision):
                    place = place_of(command.decision.decision)
                    assert place is not None, command.decision
                    folded.decisions[place] = command.decision
    return folded


def _facts(records: Iterable[LogRecord], until: int, folded: Folded) -> Iterator[tuple[LogRecord, ClusterRecord]]:
    for record in records:
        if record.offset >= until:
            return
        folded.records += 1
        try:
            fact = decode_cluster(record.value)
        except CodecError:
            folded.unreadable_records += 1
            continue
        yield record, fact


def _leader(offset: int, elected: SchedulerElected, settings: Settings) -> Leader:
    other: dict[str, str] = {}
    if elected.settings is not None:
        own = structs.asdict(fold_settings(settings))
        told = structs.asdict(elected.settings)
        other = {name: f"{told[name]}, here {own[name]}" for name in told if told[name] != own[name]}
    return Leader(offset, elected.scheduler, elected.release, other, elected.settings is not None)


# ---------------------------------------------------------------- comparing


def audit(
    records: Iterable[LogRecord],
    decided: Iterable[LogRecord],
    settings: Settings,
    release: str,
    *,
    until: int | None,
    begins_at: int = 0,
    decided_from: int = 0,
    state: ClusterState | None = None,
) -> DecisionAudit:
    """Compare `decided` (all of sie.decisions) with a fold of `records` (sie.cluster, from `state.next_offset` or else
    `begins_at`, its oldest offset).

    `until`: the scheduler's committed offset: every decision about a record below it is on the log. None: not known,
    then the last decision on the log is taken for it. `decided_from`: oldest offset of sie.decisions. `release`: of the
    software that audits.
    """
    report = DecisionAudit(fold_from=begins_at if state is None else state.next_offset)
    if state is not None:
        report.started_from = "snapshot"
    elif begins_at > 0:
        report.started_from = "oldest record"
    recorded = _recorded(decided, report)
    report.fold_until = until if until is not None else max((place[0] + 1 for place in recorded), default=0)
    folded = refold(settings, records, report.fold_until, state)
    report.records, report.unreadable_records = folded.records, folded.unreadable_records
    report.leaders = tuple(folded.leaders)
    oldest = min(recorded, default=None) if decided_from > 0 else None
    for place in sorted({*recorded, *folded.decisions}):
        _compare(report, place, recorded.get(place), folded.decisions.get(place), oldest)
    report.notes = tuple(_notes(report, begins_at, release, known_end=until is not None))
    return report


def _recorded(decided: Iterable[LogRecord], report: DecisionAudit) -> dict[Place, Recorded]:
    """By place, in the order of the log. Counts what is unreadable, repeated or out of order."""
    found: dict[Place, Recorded] = {}
    last: Place = (-1, -1)
    for record in decided:
        value = record.value or b""
        try:
            decision = decode_decision(record.value)
            place = place_of(decision.decision)
        except CodecError:
            decision, place = None, None
        if decision is None or place is None:
            report.unreadable += 1
            _note_difference(report, Difference("", "unreadable", -1, record.offset, (), decision, None, value.hex()))
            continue
        if place in found:
            report.repeated += 1
            earlier = found[place].decision
            difference = Difference(
                decision.decision, "repeated", place[0], record.offset, _fields(earlier, decision), decision, earlier
            )
            _note_difference(report, difference)
            continue
        report.out_of_order += place < last
        last = max(last, place)
        found[place] = Recorded(record.offset, value, decision)
    return found


def _compare(
    report: DecisionAudit, place: Place, recorded: Recorded | None, refolded: Decision | None, oldest: Place | None
) -> None:
    if place[0] >= report.fold_until:
        return  # under way: the next audit sees it
    if place[0] < report.fold_from:
        report.unchecked += recorded is not None
        return
    if recorded is None:
        assert refolded is not None, place
        if oldest is not None and place < oldest:
            report.expired += 1
            return
        report.missing += 1
        _note_difference(report, Difference(refolded.decision, "missing", place[0], -1, (), None, refolded))
        return
    decision = recorded.decision
    if refolded is None:
        report.extra += 1
        _note_difference(report, Difference(decision.decision, "extra", place[0], recorded.offset, (), decision, None))
    elif encode_decision(refolded) == recorded.value:
        report.equal += 1
    elif refolded == decision:
        report.rewritten += 1
    else:
        report.differing += 1
        fields = _fields(decision, refolded)
        difference = Difference(decision.decision, "differing", place[0], recorded.offset, fields, decision, refolded)
        _note_difference(report, difference)


def _fields(one: Decision, other: Decision) -> tuple[str, ...]:
    return tuple(name for name in Decision.__struct_fields__ if getattr(one, name) != getattr(other, name))


def _note_difference(report: DecisionAudit, found: Difference) -> None:
    """Keep the one with the lowest cause; what cannot be read has none and gives way to any other."""
    first = report.first_difference
    if first is None or first.cause_offset < 0 or 0 <= found.cause_offset < first.cause_offset:
        report.first_difference = found


def _notes(report: DecisionAudit, begins_at: int, release: str, *, known_end: bool) -> Iterator[str]:
    if begins_at > 0:
        yield f"Offsets 0 to {begins_at - 1} of sie.cluster are gone: retention, or somebody, removed them."
    if report.started_from == "snapshot":
        yield (
            f"Folded on from the snapshot at offset {report.fold_from}: what led to it is taken as it is, and so are "
            f"{report.unchecked} decisions about earlier records."
        )
    if report.started_from == "oldest record":
        yield "No snapshot fits, so the fold began knowing nothing: differences are to be expected, and prove nothing."
    if not known_end:
        yield "The scheduler's committed offset is gone: the last recorded decision is taken for the end."
    if report.expired:
        yield f"{report.expired} decisions are older than the oldest that sie.decisions still has."
    silent = [leader for leader in report.leaders if not leader.told_settings]
    if silent:
        yield (
            f"{len(silent)} leaders, the first at offset {silent[0].offset}, did not tell their settings: those of "
            f"this process were used for what they decided."
        )
    if report.started_from != "snapshot" and not report.leaders and report.records:
        yield "No leader is on the log; this process's own settings were used."
    for name, offset in _other_releases(report.leaders, release).items():
        yield f"Release {name} decided from offset {offset} on, this is {release}: it may decide otherwise by design."


def _other_releases(leaders: Iterable[Leader], release: str) -> Mapping[str, int]:
    """{release: offset of its first leader}."""
    found: dict[str, int] = {}
    for leader in leaders:
        if leader.release != release:
            found.setdefault(leader.release or "unknown", leader.offset)
    return found


def report_json(report: DecisionAudit) -> dict[str, object]:
    """As plain values, with the verdict first."""
    return {"same": report.same, **msgspec.to_builtins(report)}
