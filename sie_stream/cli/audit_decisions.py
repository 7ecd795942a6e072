"""`sie-stream audit decisions`: fold the control log again and compare, without writing anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import typer

from scheduler.audit import DecisionAudit, Difference, audit, report_json
from scheduler.snapshots import oldest_snapshot
from schemas.codec import encode_decision
from sie_stream import __version__
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, show_json, show_text
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from sie_stream.edge.tables import read_to_end
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.settings import Settings

BEHIND_MAX = 200
"""Records of sie.cluster beyond what is decided: a scheduler commits every second."""
SETTLE_S = 1.0
"""A commit shows on sie.cluster's offset a moment before its decisions do; what is missing is looked at again then."""


def decisions(
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that reading a topic may take.")] = 600.0,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Fold sie.cluster again with the scheduler's own code and demand the same decisions, byte for byte.

    Exit code 1 when a decision differs, is missing, or should not be there.

    \b
    Examples:
      sie-stream audit decisions
      sie-stream audit decisions -o json
    """
    connection = Connection.open(bootstrap_servers)
    reader = connection.reader(connection.settings.topics.scheduler_group)
    try:
        report = audited(reader, connection.settings, timeout_s)
        if not report.same and report.missing:
            time.sleep(SETTLE_S)
            report = audited(reader, connection.settings, timeout_s)
    finally:
        reader.close()
    if output is OutputFormat.JSON:
        show_json(report_json(report))
    else:
        show_text("\n".join(in_words(report)))
    if not report.same:
        raise typer.Exit(1)


def audited(reader: LogReader, settings: Settings, timeout_s: float = 600.0) -> DecisionAudit:
    """Reads sie.decisions, sie.snapshots when the log's beginning is gone, and sie.cluster.

    `reader`: of the scheduler's group, whose committed offset it looks up; it joins nothing and commits nothing.
    """
    topics = settings.topics
    cluster, decided = TopicPartition(topics.cluster, 0), TopicPartition(topics.decisions, 0)
    committed = reader.committed([cluster])[cluster]
    begins_at = reader.beginning_offsets([cluster])[cluster]
    state = None
    if begins_at > 0:
        state = oldest_snapshot(read_to_end(reader, topics.snapshots, timeout_s=timeout_s), begins_at)
    decided_from = reader.beginning_offsets([decided])[decided]
    recorded = list(read_to_end(reader, topics.decisions, timeout_s=timeout_s))
    start = begins_at if state is None else state.next_offset
    end = reader.end_offsets([cluster])[cluster]
    with closing(read_to_end(reader, topics.cluster, {cluster: start}, timeout_s)) as records:
        report = audit(
            records,
            recorded,
            settings,
            __version__,
            until=None if committed is None else committed.offset,
            begins_at=begins_at,
            decided_from=decided_from,
            state=state,
        )
    behind = end - report.fold_until
    if behind > BEHIND_MAX:
        report.notes = (*report.notes, f"{behind} newer records are not decided yet: does a scheduler run, and get on?")
    return report


def in_words(report: DecisionAudit) -> Iterator[str]:
    """The report for people."""
    yield "decisions are the same" if report.same else "DECISIONS DIFFER"
    yield (
        f"    folded    {report.records} records of sie.cluster, from offset {report.fold_from} to below "
        f"{report.fold_until}; {report.unreadable_records} unreadable"
    )
    yield f"    equal     {report.equal} byte for byte, {report.rewritten} in content, encoded by another release"
    yield f"    not equal {report.differing} differing, {report.missing} missing, {report.extra} extra"
    wrong = (report.repeated, report.unreadable, report.out_of_order)
    if any(wrong):
        yield "    wrong     {} repeated, {} unreadable, {} out of order".format(*wrong)
    for leader in report.leaders:
        yield f"    leader    {leader.scheduler} from offset {leader.offset}, release {leader.release or 'unknown'}"
        for name, values in leader.other_settings.items():
            yield f"              its {name}: {values} (the leader's is used)"
    for note in report.notes:
        yield f"    note      {note}"
    if report.first_difference is not None:
        yield from _difference(report.first_difference)


def _difference(found: Difference) -> Iterator[str]:
    cause = f"about record {found.cause_offset} of sie.cluster" if found.cause_offset >= 0 else "of an unknown cause"
    yield f"first difference: {found.decision or 'a record'} {cause}: {found.kind}"
    if found.fields:
        yield f"    fields    {', '.join(found.fields)}"
    where = f"sie.decisions offset {found.decisions_offset}" if found.decisions_offset >= 0 else "not on sie.decisions"
    yield f"    recorded  {where}: {_text(found.recorded) or found.recorded_hex or '-'}"
    yield f"    refolded  {_text(found.refolded) or '-'}"


def _text(decision: Decision | None) -> str:
    """The decision's own bytes, as they are under the envelope of the log."""
    if decision is None:
        return ""
    sealed = encode_decision(decision)
    return sealed[sealed.index(b"{") :].decode()
