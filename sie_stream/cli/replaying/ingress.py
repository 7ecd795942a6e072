"""Requests that ingress refused, decided again by ingress's own machine: they never became work.

What became work needs no object behind a reference: its inputs are on the log. What was refused may have named one, and
that is read again, where this process may; its digest says whether it is still what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from processors.ingress.edge.contents import reference_reader
from processors.ingress.events import BatchAborted, CommitBatch, GroupBatch, RecordsPolled, RoutesChanged
from processors.ingress.machine import IngressMachine
from schemas.codec import SchemaTable, decode_result
from sie_stream.cli.replaying.reading import Readers
from sie_stream.control import RouteRow
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.reference_reader import ReferenceReader
from sie_stream.edge.stop import StopFlag
from sie_stream.edge.tokenizer import TokenizerStore
from sie_stream.errors import InvalidRequest
from sie_stream.ids import TopicPartition
from sie_stream.records import InputsRef, LogRecord, Result
from sie_stream.references import NOT_TO_BE_HAD
from sie_stream.replay.compare import Again, Original, verdict
from sie_stream.replay.plan import Span, segments
from sie_stream.replay.report import Place, Tally
from sie_stream.replay.versions import Declared, Withdrawn
from sie_stream.settings import Settings

WAIT_MS = 100
REFUSALS_MAX = 20_000
"""Kept in memory; more are counted and not decided again."""


class Refusals:
    """Terminal records without a work item, by the place of their request."""

    def __init__(self) -> None:
        self._by_place: dict[TopicPartition, dict[int, Original]] = {}
        self.count = 0

    def add(self, result: Result) -> bool:
        """False when there is no room."""
        if self.count >= REFUSALS_MAX:
            return False
        origin = result.provenance
        place = TopicPartition(origin.source_topic, origin.source_partition)
        self._by_place.setdefault(place, {})[origin.source_offset] = Original(
            result.request_id,
            result.status,
            result.model,
            result.version,
            "",
            "",
            None,
            result.error.code if result.error else "",
            None,
            0,
            0.0,
            result.timings_ms.total,
            result.finished_at,
        )
        self.count += 1
        return True

    def stretches(self) -> Iterator[tuple[TopicPartition, int, int]]:
        """Where the requests are: partition, first offset, one past the last."""
        for place in sorted(self._by_place):
            for start, end in segments(sorted(self._by_place[place])):
                yield place, start, end

    def take(self, record: LogRecord) -> Original | None:
        return self._by_place.get(TopicPartition(record.topic, record.partition), {}).pop(record.offset, None)

    def left(self) -> Iterator[tuple[TopicPartition, int, Original]]:
        """Those whose request was not found."""
        for place in sorted(self._by_place):
            for offset, original in sorted(self._by_place[place].items()):
                yield place, offset, original


class Reread:
    """Implements ports.Contents: waits for what ingress would come back for."""

    def __init__(self, reader: ReferenceReader) -> None:
        self._reader = reader

    def prepare(self, ref: InputsRef) -> None:
        self._reader.prepare(ref)

    def ask(self, ref: InputsRef) -> bytes | InvalidRequest:
        while (found := self._reader.ask(ref)) is None:
            self._reader.wait(WAIT_MS)
        self._reader.settled()
        return found

    def wait(self, wait_ms: int) -> None:
        self._reader.wait(wait_ms)

    def settled(self) -> None:
        return None


class _Change(Struct, frozen=True):
    at_ms: int
    model: str
    row: RouteRow | None


class IngressAgain:
    """One machine, one record at a time, with the routes that were declared at the record's time.

    A quota and a deadline are a matter of that moment, so there are none here: what was shed or expired is not asked.
    """

    def __init__(
        self,
        settings: Settings,
        history: Sequence[Declared | Withdrawn],
        pinned: Declared | None,
        schemas: SchemaTable,
    ) -> None:
        self._names = settings.topics
        contents = Reread(reference_reader(settings, SystemClock()))
        self._machine = IngressMachine(settings, TokenizerStore(), lambda topic: True, schemas, contents)
        told = [one for one in history if not (isinstance(one, Declared) and one.beside)]
        self._changes = [_change_of(one) for one in told if pinned is None or _model_of(one) != pinned.launch.model]
        if pinned is not None:
            self._changes.append(_Change(0, pinned.launch.model, without_quota(pinned.route)))
            self._changes.sort(key=lambda one: one.at_ms)
        self._pinned = pinned is not None
        self._next = 0
        self._rows: dict[str, RouteRow] = {}

    def decide(self, record: LogRecord, original: Original) -> Again | None:
        """What ingress says of the request; None when it says nothing (a repeat). Cheapest in rising time."""
        self._advance(original.finished_at)
        batch = RecordsPolled((GroupBatch(self._group(record.topic), [record]),), record.timestamp_ms)
        for command in self._machine.decide([batch]):
            if isinstance(command, CommitBatch):
                self._machine.decide([BatchAborted(command)])  # the next of the same id is not a repeat of this one
                return self._answer(command)
        return None

    def _answer(self, command: CommitBatch) -> Again | None:
        for write in command.writes:
            if write.topic == self._names.results:
                result = decode_result(write.value)
                error = result.error
                code, message = (error.code, error.message) if error else ("", "")
                return Again(result.status, "", "", "", None, code, message, schema_refused=self._pinned)
            if write.topic.startswith(self._names.work("")):
                return Again("ok", "", "", "", None, "", "accepted: it would become work", schema_refused=self._pinned)
        return None

    def _advance(self, at_ms: int) -> None:
        """Routes change with time; going back in time begins again."""
        changed: list[tuple[str, RouteRow | None]] = []
        if self._next and self._changes[self._next - 1].at_ms > at_ms:
            self._next = 0
            changed = [(model, None) for model in self._rows]
        while self._next < len(self._changes) and self._changes[self._next].at_ms <= at_ms:
            change = self._changes[self._next]
            changed.append((change.model, change.row))
            self._next += 1
        if changed:
            self._machine.decide([RoutesChanged(tuple(changed))])
            for model, row in changed:
                if row is None:
                    self._rows.pop(model, None)
                else:
                    self._rows[model] = row

    def _group(self, topic: str) -> str:
        for row in self._rows.values():
            if row.input_topic == topic and not row.input_bootstrap:
                return row.input_group or self._names.ingress_group
        return self._names.ingress_group


def _model_of(one: Declared | Withdrawn) -> str:
    return one.launch.model if isinstance(one, Declared) else one.model


def _change_of(one: Declared | Withdrawn) -> _Change:
    if isinstance(one, Declared):
        return _Change(one.at_ms, one.launch.model, without_quota(one.route))
    return _Change(one.at_ms, one.model, None)


def without_quota(route: RouteRow) -> RouteRow:
    return replace(route, quota_per_s=0.0, deadline_ms=0)


def decide_again(refusals: Refusals, again: IngressAgain, readers: Readers, tally: Tally, stop: StopFlag) -> None:
    """Read the requests behind the refusals, and count what ingress says of them now."""
    for place, start, end in list(refusals.stretches()):
        if readers.records.partitions_of(place.topic) <= place.partition:
            continue
        bounds = readers.bounds([place])[place]
        span = Span(place.topic, place.partition, max(start, bounds.beginning), min(end, bounds.stable))
        for records in readers.read([span] if span.size > 0 else [], lambda _: None, stop):
            for record in records:
                original = refusals.take(record)
                found = None if original is None else again.decide(record, original)
                if original is not None and found is not None:
                    count(original, found, Place(record.topic, record.partition, record.offset), tally)
    if stop:
        return
    for place, offset, original in refusals.left():
        here = Place(place.topic, place.partition, offset)
        tally.absent(here, original.request_id, original.model, "retention", "its request is deleted")


def count(original: Original, found: Again, here: Place, tally: Tally) -> None:
    """An object that cannot be read any more, or not here, says nothing of the decision."""
    if found.error_code in NOT_TO_BE_HAD and found.error_code != original.error_code:
        why = f"the inputs that it names are not to be had: {found.error_code}: {found.error_message}"
        tally.absent(here, original.request_id, original.model, "retention", why)
    else:
        tally.answered(original, found, here, verdict(original, found))
