"""Collects what the topics say about one request, from short stretches of each; sie_stream.tracing puts it in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from schemas.codec import (
    decode_cluster,
    decode_deadletter,
    decode_decision,
    decode_request,
    decode_result,
    decode_row,
    decode_work,
)
from schemas.wire import MAGIC, CodecError
from sie_stream.auditing.requests import is_finished
from sie_stream.cli.declared_outputs import declared_outputs
from sie_stream.cli.trace_devices import kept_out
from sie_stream.cli.trace_lookup import Place, Routes, fetch, newest
from sie_stream.control import PartitionPlacement, PlacementRow, RouteRow
from sie_stream.decisions import Decision, concerns
from sie_stream.edge.connection import Connection
from sie_stream.edge.key_table import key_table_of
from sie_stream.edge.spans import Span, partitions_of, read_spans, window
from sie_stream.edge.tables import latest_values, read_to_end
from sie_stream.ids import TopicNames, TopicPartition, base_of
from sie_stream.origin import origin_in
from sie_stream.ports import LogReader
from sie_stream.privacy.declared import Shreds
from sie_stream.privacy.forms import may_be_sealed
from sie_stream.records import (
    TRACEPARENT_HEADER,
    CommittedOffset,
    InferenceRequest,
    LogRecord,
    Result,
    WorkItem,
    header,
    request_decoder,
)
from sie_stream.rollout_records import SHADOW
from sie_stream.touches import touches_in
from sie_stream.tracing.batches import neighbours
from sie_stream.tracing.evidence import ClusterFact, Evidence, Found, Source
from sie_stream.tracing.story import telling, touches

RecordT = TypeVar("RecordT")
BESIDE_MS = 500
"""Results of one batch are written together; this much before and after is looked at."""
LETTER_MS = 2_000
CLOCKS_MS = 60_000
"""The scheduler's clock, which stamps decisions, and the broker's, which stamps sie.cluster, differ by less."""
CONTROL_MS_MAX = 15 * 60_000
"""Of a request that was open for longer only the last part is held against sie.cluster."""
WORK_MS = 30_000
WORK_RECORDS_MAX = 200_000
PLACING = ("replica_placed", "placement_restored")


def found_at(record: LogRecord) -> Found:
    return Found(TopicPartition(record.topic, record.partition), record.offset, record.timestamp_ms)


def decoded(
    records: Iterable[LogRecord], decode: Callable[[bytes | None], RecordT]
) -> Iterator[tuple[LogRecord, RecordT]]:
    """Those that can be read."""
    for record in records:
        try:
            yield record, decode(record.value)
        except CodecError:
            continue


class Collector:
    """Reads for one request at a time. `reader` belongs to the caller."""

    def __init__(self, connection: Connection, reader: LogReader, routes: Routes, now_ms: int) -> None:
        self._connection = connection
        self._reader = reader
        self._routes = routes
        self._names: TopicNames = connection.settings.topics
        self._now_ms = now_ms
        self._notes: list[str] = []

    def collect(self, request_id: str, places: Iterable[Place]) -> Evidence:
        """`places`: where records with this id may be. Those that carry another id are left out."""
        self._notes = []
        records = fetch(self._reader, places)
        results = [
            (record, result)
            for record, result in decoded(newest(records, self._names.results), decode_result)
            if result.request_id == request_id
        ]
        record, result = results[0] if results else (None, None)
        sources = self._sources(request_id, records, result)
        work_record, work = self._work(request_id, result, sources)
        evidence = Evidence(
            request_id=request_id,
            now_ms=self._now_ms,
            sources=sources,
            work=work,
            work_at=None if work_record is None else found_at(work_record),
            result=result,
            result_at=None if record is None else found_at(record),
            other_results=tuple(found_at(other) for other, _ in results[1:]),
            touches=() if record is None else touches_in(record.headers),
        )
        evidence = self._ended(evidence) if result is not None else self._under_way(evidence)
        evidence = self._controlled(evidence)
        return msgspec.structs.replace(evidence, notes=tuple(self._notes))

    # ------------------------------------------------------------ request, work

    def _sources(self, request_id: str, records: dict[Place, LogRecord], result: Result | None) -> tuple[Source, ...]:
        """Request records with this id, oldest first; the one that the result names comes in any case."""
        found = {
            place: record
            for place, record in records.items()
            if place[0].topic in self._routes.request_topics and self._routes.source_id(record) in (request_id, "")
        }
        if result is not None:
            origin = result.provenance
            place = (TopicPartition(origin.source_topic, origin.source_partition), origin.source_offset)
            found |= fetch(self._reader, [place]) if place not in found else {}
            if place not in found:
                self._notes.append(f"The request record {place[0].topic}/{place[0].partition}@{place[1]} is gone.")
        ordered = sorted(found.values(), key=lambda record: (record.timestamp_ms, record.partition, record.offset))
        return tuple(_source(record, self._names.requests) for record in ordered)

    def _work(
        self, request_id: str, result: Result | None, sources: tuple[Source, ...]
    ) -> tuple[LogRecord | None, WorkItem | None]:
        if result is not None:
            origin = result.provenance
            if not origin.work_topic:
                return None, None
            place = (TopicPartition(origin.work_topic, origin.work_partition), origin.work_offset)
            for record, work in decoded(fetch(self._reader, [place]).values(), decode_work):
                return record, work
            self._notes.append(
                f"The work record {origin.work_topic}/{origin.work_partition}@{origin.work_offset} is gone."
            )
            return None, None
        return self._search_work(request_id, sources[0]) if sources else (None, None)

    def _search_work(self, request_id: str, source: Source) -> tuple[LogRecord | None, WorkItem | None]:
        """The work item of a request that has not ended: on its model's topic, soon after the request."""
        request = source.request
        wanted = "" if request is None else request.model or request.instance
        route = self._routes.of(wanted, source.at.place.topic)
        topic = route.topic if route is not None else self._names.work(wanted.partition("@")[0])
        begun = source.at.timestamp_ms
        places = [place for one in (topic, *self._variant_topics(route)) for place in partitions_of(self._reader, one)]
        needle = request_id.encode("utf-8", "surrogatepass")
        for until in (begun + WORK_MS, self._now_ms + WORK_MS):
            spans = _at_most(window(self._reader, places, begun - WORK_MS, until), WORK_RECORDS_MAX)
            holding = (record for record in read_spans(self._reader, spans) if needle in (record.value or b""))
            for record, work in decoded(holding, decode_work):
                if work.request_id == request_id and work.variant[:1] != SHADOW:
                    return record, work
        return None, None

    def _variant_topics(self, route: RouteRow | None) -> list[str]:
        """Of variants that have replicas, or work that is left of a rollout."""
        if route is None:
            return []
        units = latest_values(self._reader, self._names.placements)
        return [self._names.work(unit) for unit in units if unit != base_of(unit) == route.model]

    # ------------------------------------------------------------ endings

    def _ended(self, evidence: Evidence) -> Evidence:
        """Batch neighbours and the dead letter."""
        result, at = evidence.result, evidence.result_at
        assert result is not None
        assert at is not None
        beside: tuple[Result, ...] = ()
        if result.provenance.batch_size > 1:
            spans = self._window(self._names.results, at.timestamp_ms - BESIDE_MS, at.timestamp_ms + BESIDE_MS)
            beside = tuple(other for _, other in decoded(read_spans(self._reader, spans), decode_result))
        if self._shredded(result):
            self._notes.append("Its subject was shredded: nobody can read the encrypted values of its outputs.")
        letter_at = letter = None
        if result.status in ("rejected", "failed"):
            spans = self._window(self._names.deadletter, at.timestamp_ms - LETTER_MS, at.timestamp_ms + LETTER_MS)
            for record, found in decoded(read_spans(self._reader, spans), decode_deadletter):
                if found.request_id == evidence.request_id:
                    letter_at, letter = found_at(record), found
        return msgspec.structs.replace(
            evidence, neighbours=neighbours(result, beside), letter=letter, letter_at=letter_at
        )

    def _shredded(self, result: Result) -> bool:
        """Reads the data keys only where there is something that they could be needed for."""
        if not may_be_sealed(result.outputs):
            return False
        declared = declared_outputs(self._reader, self._names, self._connection.reader)
        return Shreds(key_table_of(self._connection), declared).reach(result)

    def _under_way(self, evidence: Evidence) -> Evidence:
        """How far the groups have come, and who has it now."""
        ingress = work = None
        if evidence.sources:
            place = evidence.sources[0].at.place
            groups = self._routes.groups_of(place.topic, evidence.request_id)
            committed = [self._committed(group, place) for group in groups]
            passed = [one.offset for one in committed if one is not None]
            ingress = min(passed) if passed and len(passed) == len(groups) else None
        finished = False
        owner: PartitionPlacement | None = None
        if evidence.work is not None and evidence.work_at is not None:
            work = self._committed(self._names.worker_group, evidence.work_at.place)
            finished = work is not None and is_finished(work, evidence.work_at.offset)
            owner = self._owner(evidence.unit, evidence.work_at.place.partition)
        outside = None
        if evidence.work is not None and owner is not None and not finished:
            outside = kept_out(self._reader, self._names, owner, evidence.work, self._now_ms)
        return msgspec.structs.replace(
            evidence,
            ingress_committed=ingress,
            work_committed=work,
            work_finished=finished,
            owner=owner,
            touches=() if outside is None else (outside,),
        )

    def _committed(self, group: str, place: TopicPartition) -> CommittedOffset | None:
        reader = self._connection.reader(group)
        try:
            return reader.committed([place])[place]
        finally:
            reader.close()

    def _owner(self, unit: str, partition: int) -> PartitionPlacement | None:
        value = latest_values(self._reader, self._names.placements).get(unit)
        if value is None:
            return None
        try:
            row = decode_row(value, PlacementRow)
        except CodecError:
            return None  # somebody else's record
        return next((held for held in row.partitions if held.partition == partition), None)

    # ------------------------------------------------------------ control plane

    def _controlled(self, evidence: Evidence) -> Evidence:
        begun, ended = _life(evidence)
        if ended - begun > CONTROL_MS_MAX:
            self._notes.append("It was open for long: of the control plane only the last 15 minutes were read.")
            begun = ended - CONTROL_MS_MAX
        unit, worker = evidence.unit, _worker(evidence)
        if not unit and not worker:
            return evidence
        facts = [
            ClusterFact(record.offset, record.timestamp_ms, fact)
            for record, fact in decoded(
                read_spans(self._reader, self._window(self._names.cluster, begun, ended + 1)), decode_cluster
            )
        ]
        decisions = tuple(
            decision
            for decision in self._decisions(begun, ended)
            if begun <= decision.at_ms <= ended and touches(decision, unit, worker)
        )
        return msgspec.structs.replace(
            evidence,
            facts=tuple(fact for fact in facts if telling(fact) and _about(fact, unit, worker)),
            decisions=decisions,
            placed=self._placed(evidence),
        )

    def _decisions(self, from_ms: int, to_ms: int) -> list[Decision]:
        spans = self._window(self._names.decisions, from_ms - CLOCKS_MS, to_ms + CLOCKS_MS)
        return [decision for _, decision in decoded(read_spans(self._reader, spans), decode_decision)]

    def decisions_about(self, model: str, from_ms: int, to_ms: int) -> tuple[Decision, ...]:
        found = self._decisions(from_ms, to_ms)
        return tuple(one for one in found if from_ms <= one.at_ms <= to_ms and concerns(one, model))

    def _placed(self, evidence: Evidence) -> Decision | None:
        """The decision whose cause is the record that the result's placement epoch names."""
        result = evidence.result
        if result is None or not result.provenance.worker:
            return None
        epoch = result.provenance.placement_epoch
        cluster = TopicPartition(self._names.cluster, 0)
        cause = fetch(self._reader, [(cluster, epoch)]).get((cluster, epoch))
        if cause is not None:
            near = self._decisions(cause.timestamp_ms, cause.timestamp_ms)
        else:  # sie.cluster keeps less than sie.decisions
            near = [one for _, one in decoded(read_to_end(self._reader, self._names.decisions), decode_decision)]
        caused = [one for one in near if one.cause_offset == epoch and one.subject == evidence.unit]
        placing = [one for one in caused if one.kind in PLACING and _names(one, result.provenance.worker)]
        return next(iter((*placing, *(one for one in caused if one.kind == "partitions_assigned"))), None)

    def _window(self, topic: str, from_ms: int, to_ms: int) -> dict[TopicPartition, Span]:
        return window(self._reader, partitions_of(self._reader, topic), from_ms, to_ms)


def _source(record: LogRecord, requests: str) -> Source:
    given = header(record.headers, TRACEPARENT_HEADER)
    traceparent = given.decode("ascii", "replace") if given else None
    return Source(
        found_at(record),
        len(record.value or b""),
        traceparent,
        request_in(record.value),
        origin_in(record.headers),
        record.topic != requests,
    )


def request_in(value: bytes | None) -> InferenceRequest | None:
    """A record of the common request topic, JSON or our own Avro; None for anything else."""
    if not value:
        return None
    try:
        return decode_request(value)[0] if value[0] == MAGIC else request_decoder.decode(value)
    except (CodecError, ValueError, RecursionError):
        return None


def _at_most(spans: dict[TopicPartition, Span], records_max: int) -> dict[TopicPartition, Span]:
    each = max(1, records_max // max(1, len(spans)))
    return {place: Span(span.start, min(span.end, span.start + each)) for place, span in spans.items()}


def _life(evidence: Evidence) -> tuple[int, int]:
    """From the request to its end (or now), by whatever is known."""
    result, work = evidence.result, evidence.work
    if work is not None:
        begun = work.requested_at_ms
    elif evidence.sources:
        begun = evidence.sources[0].at.timestamp_ms
    else:
        begun = evidence.now_ms if result is None else round(result.finished_at - result.timings_ms.total)
    return begun, evidence.now_ms if result is None else max(begun, result.finished_at)


def _worker(evidence: Evidence) -> str:
    if evidence.result is not None:
        return evidence.result.provenance.worker
    return "" if evidence.owner is None else evidence.owner.worker


def _about(fact: ClusterFact, unit: str, worker: str) -> bool:
    """Fences and exits of any worker: it may have been the one before."""
    name = type(fact.record).__name__
    if name in ("WorkerFenced", "WorkerExited", "WorkerLeft"):
        return True
    about = getattr(fact.record, "model", None)
    return about == unit if about is not None else getattr(fact.record, "worker", None) == worker


def _names(decision: Decision, worker: str) -> bool:
    return any(move.target.partition("/")[0] == worker for move in decision.moves)
