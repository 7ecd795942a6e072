"""Ingress as a pure machine: events in, one transaction out. Simulation and replay run exactly this.

A record goes: decode -> dedupe -> route -> deadline -> inputs behind a reference -> input_schema -> quota -> tokens ->
WorkItem. Wherever it falls out, it ends in its terminal record, written in the same transaction that moves its offset.
One whose inputs are not there yet holds its partition: nothing of it is settled from there on, and it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

from msgspec import Struct

from processors.ingress.decode import (
    NAME_CHARS_MAX,
    Bound,
    Limits,
    check_fields,
    decode_bound,
    decode_request,
    header_request_id,
    recovered_request_id,
    source_id,
)
from processors.ingress.events import (
    BatchAborted,
    BatchTooLarge,
    CommitBatch,
    GroupBatch,
    IngressCommand,
    IngressEvent,
    RecordsPolled,
    RoutesChanged,
    ShareChanged,
    WindowRead,
)
from processors.ingress.references import NoContents, NotYet, References
from processors.ingress.routes import CompiledRoute, RouteTable, TextEncoders
from processors.ingress.work import WorkBuilder, check_deadline
from schemas import codec
from schemas.reference import RELEASED_TABLE
from sie_stream.control import RouteRow
from sie_stream.dedupe import DedupeWindow
from sie_stream.errors import InvalidRequest
from sie_stream.ids import TopicPartition
from sie_stream.ports import Contents
from sie_stream.provenance import (
    NO_COPIES,
    ResultTopics,
    dead_letter,
    error_of,
    result_json,
    source_result,
    terminal_writes,
    without_content,
)
from sie_stream.records import (
    CommittedOffset,
    InferenceRequest,
    LogRecord,
    LogWrite,
    Status,
)
from sie_stream.settings import Settings

ENDINGS: dict[str, Status] = {
    "deadline_exceeded": "expired",
    "quota_exceeded": "shed",
    "model_unavailable": "failed",
    "reference_timeout": "failed",
    "reference_unavailable": "failed",
}
"""Status of the codes that do not say that the request is wrong; all others end as `rejected`."""


class IngressCounts(Struct):
    """Since the start, of committed and aborted batches alike."""

    routed: int = 0
    referenced: int = 0
    duplicates: int = 0
    undecodable: int = 0
    rejected: int = 0
    expired: int = 0
    shed: int = 0
    failed: int = 0


class _Batch:
    """What becomes of the records of one turn."""

    __slots__ = ("held", "now_ms", "remembered", "routed", "writes")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.held: dict[tuple[str, int], int] = {}
        """Where partitions go on: at a request whose inputs are not there yet."""
        self.writes: list[LogWrite] = []
        self.remembered: list[str] = []
        self.routed = 0


class IngressMachine:
    """Decides about requests. `topic_exists` is asked about topics that requests and routes name.

    `schemas` knows the Avro schemas that users registered, `contents` reads what references name.
    """

    def __init__(
        self,
        settings: Settings,
        encoders: TextEncoders,
        topic_exists: Callable[[str], bool],
        schemas: codec.SchemaTable = RELEASED_TABLE,
        contents: Contents | None = None,
    ) -> None:
        self.counts = IngressCounts()
        self.routes = RouteTable(settings.topics, encoders)
        self.window = DedupeWindow(settings.dedupe_window_ms, settings.dedupe_entries_max)
        self._names = settings.topics
        self._requests = settings.topics.requests
        self._limits = Limits(settings.request_bytes_max, settings.json_depth_max, schemas, settings.reference_places)
        self._letter_bytes_max = settings.deadletter_bytes_max
        self._topic_exists = topic_exists
        self._builder = WorkBuilder(settings, self.routes, topic_exists)
        self._references = References(settings, contents or NoContents())

    def decide(self, events: Sequence[IngressEvent]) -> list[IngressCommand]:
        commands: list[IngressCommand] = []
        for event in events:
            match event:
                case RecordsPolled():
                    commands.append(self._take_up(event))
                case RoutesChanged():
                    commands.extend(self.routes.change(event.rows))
                case ShareChanged():
                    self._builder.share = event.share
                case WindowRead():
                    self._remember(event)
                case BatchAborted():
                    self._forget(event.batch)
                case BatchTooLarge():
                    self._forget(event.batch)
                    self._learn_limit(event.batch)
                case _:
                    assert_never(event)
        return commands

    # -------------------------------------------------------------------------------------------- batches

    def _take_up(self, event: RecordsPolled) -> CommitBatch:
        batch = _Batch(event.now_ms)
        self._references.begin_batch()
        offsets, held = [], []
        for group_batch in event.batches:
            batch.held = {}
            topic, bound = self._requests, None
            for record in group_batch.records:
                if record.topic != topic:
                    topic = record.topic
                    bound = self.routes.bound(group_batch.group, topic)
                if batch.held and (topic, record.partition) in batch.held:
                    self._look_ahead(record, bound, batch.now_ms)
                else:
                    self._one_or_held(record, bound, batch)
            offsets.append((group_batch.group, _positions(group_batch, batch.held)))
            if batch.held:
                held.append((group_batch.group, {TopicPartition(*one): offset for one, offset in batch.held.items()}))
        self.counts.routed += batch.routed
        return CommitBatch(batch.writes, tuple(offsets), batch.remembered, tuple(held))

    def _one_or_held(self, record: LogRecord, bound: Bound | None, batch: _Batch) -> None:
        known = len(batch.remembered)
        try:
            self._one(record, bound, batch)
        except NotYet:
            self.window.forget(batch.remembered[known:])
            del batch.remembered[known:]
            batch.held[record.topic, record.partition] = record.offset

    def _look_ahead(self, record: LogRecord, bound: Bound | None, now_ms: int) -> None:
        """References behind a waiting one are read at the same time, not one after the other. Those of requests that
        will end without them are not read at all."""
        if not self._references.look_ahead():
            return
        try:
            if bound is None:
                request, _ = decode_request(record, self._limits)
            else:
                request, _ = decode_bound(record, bound, self._limits)
            if request.inputs_ref is None:
                return
            check_fields(request, self._limits)
            route = self.routes.by_model(request.model) or self.routes.find(request.model, request.instance)[0]
            check_deadline(record, request, route.row, now_ms)
        except InvalidRequest:
            return  # said when its turn comes
        given = request.request_id or header_request_id(record)
        if not given or (given if bound is None else window_key(given, bound.instance)) not in self.window:
            self._references.prepare(request)

    def _remember(self, event: WindowRead) -> None:
        bound = self.routes.bound(event.group, event.topic) if event.topic != self._requests else None
        if bound is None:
            self.window.remember(event.entries)
        else:
            self.window.remember((window_key(given, bound.instance), at_ms) for given, at_ms in event.entries)

    def _forget(self, batch: CommitBatch) -> None:
        """From now on topics are looked up before they are written to: a missing one would abort every batch."""
        self.window.forget(batch.remembered)
        self._builder.verify_topics = True

    def _learn_limit(self, batch: CommitBatch) -> None:
        """Stay below the size of the record that was refused; its request is rejected when it comes again."""
        largest = max(batch.writes, key=lambda write: len(write.value or b""))
        size = len(largest.value or b"")
        if largest.topic == self._names.deadletter:
            self._letter_bytes_max = min(self._letter_bytes_max, size // 2)
        else:
            self._builder.work_bytes_max = min(self._builder.work_bytes_max, size - 1)

    def _one(self, record: LogRecord, bound: Bound | None, batch: _Batch) -> None:
        try:
            if bound is None:
                if record.topic != self._requests:
                    raise InvalidRequest("not_bound", f"no model is bound to the topic {record.topic!r} any more.")
                request, schema_id = decode_request(record, self._limits)
            else:
                request, schema_id = decode_bound(record, bound, self._limits)
            given = request.request_id
            if given and (len(given) > NAME_CHARS_MAX or not given.isprintable()):
                raise InvalidRequest(
                    "bad_request_id", "request_id must be at most 256 printable characters.", "request_id"
                )
            if record.headers:
                given = _one_id(given, header_request_id(record))
        except InvalidRequest as refusal:
            self._undecodable(record, refusal, bound, batch)
            return
        if given and self._is_duplicate(given, bound, batch):
            return
        request_id = given or _made_id(record, bound)
        try:
            check_fields(request, self._limits)
            route = self.routes.by_model(request.model)
            version = ""
            if route is None:
                route, version = self.routes.find(request.model, request.instance)
        except InvalidRequest as refusal:
            self._end(record, request_id, refusal, schema_id, None, NO_COPIES, batch)
            return
        try:
            if request.inputs_ref is not None:
                check_deadline(record, request, route.row, batch.now_ms)
                request = self._references.resolved(request)
                self.counts.referenced += 1
            batch.writes.append(
                self._builder.work(record, request_id, request, schema_id, route, version, batch.now_ms)
            )
            self.counts.routed += 1
            if self._builder.copies:
                batch.writes += self._builder.copies
                self._builder.copies = []
        except InvalidRequest as refusal:
            copies = self._copies(route, request, schema_id)
            self._end(record, request_id, refusal, schema_id, route.row, copies, batch)

    def _is_duplicate(self, given: str, bound: Bound | None, batch: _Batch) -> bool:
        identity = given if bound is None else window_key(given, bound.instance)
        if self.window.seen(identity, batch.now_ms):
            self.counts.duplicates += 1
            return True
        batch.remembered.append(identity)
        return False

    # -------------------------------------------------------------------------------------------- endings

    def _copies(self, route: CompiledRoute, request: InferenceRequest, schema_id: int) -> ResultTopics:
        """Where the ending of a routed request goes besides the results topic; topics that are missing are left out."""
        output = route.output_topic if route.output_topic and self._topic_exists(route.output_topic) else None
        reply = None
        if request.reply_topic:
            try:
                reply = self._builder.reply_topic(request.reply_topic)
            except InvalidRequest:
                reply = None  # the refusal that is being written may be this very one
        return ResultTopics(output, route.row.output_serializer, reply, "avro" if schema_id else "json")

    def _end(
        self,
        record: LogRecord,
        request_id: str,
        refusal: InvalidRequest,
        schema_id: int,
        row: RouteRow | None,
        copies: ResultTopics,
        batch: _Batch,
    ) -> None:
        status = ENDINGS.get(refusal.code, "rejected")
        setattr(self.counts, status, getattr(self.counts, status) + 1)
        result = source_result(record, request_id, status, error_of(refusal), row, schema_id, batch.now_ms)
        batch.writes += terminal_writes(self._names, result, record.key, copies, codec.encode_result, result_json)

    def _undecodable(self, record: LogRecord, refusal: InvalidRequest, bound: Bound | None, batch: _Batch) -> None:
        """Terminal record and dead letter. One whose id was answered already keeps its dead letter only."""
        self.counts.undecodable += 1
        given = recovered_request_id(record)
        if not (given and self._is_duplicate(given, bound, batch)):
            self._end(record, given or _made_id(record, bound), refusal, 0, None, NO_COPIES, batch)
        request_id = given or _made_id(record, bound)
        letter = dead_letter(record, request_id, error_of(refusal), self._letter_bytes_max, "ingress", batch.now_ms)
        if self.routes.may_hold_protected(bound, record.topic):
            letter = without_content(letter)
        batch.writes.append(LogWrite(self._names.deadletter, codec.encode_deadletter(letter), request_id.encode()))


def window_key(request_id: str, instance: str) -> str:
    """Key in the dedupe window of a request from a bound topic: other models may read the same topic."""
    return f"{request_id}\0{instance}"


def _positions(batch: GroupBatch, held: dict[tuple[str, int], int]) -> dict[TopicPartition, CommittedOffset]:
    """Next offset of every partition in the batch. Runs of one partition cost one entry.

    `held`: where a partition is not settled any further; one held at its first record has no position.
    """
    firsts = _firsts(batch, held) if held else {}
    last: dict[tuple[str, int], int] = {}
    topic, partition, offset = "", -1, -1
    for record in batch.records:
        if record.partition != partition or record.topic != topic:
            if offset >= 0:
                last[topic, partition] = offset
            topic, partition = record.topic, record.partition
        offset = record.offset
    if offset >= 0:
        last[topic, partition] = offset
    settled = {place: offset + 1 for place, offset in last.items()} | held
    return {
        TopicPartition(*place): CommittedOffset(offset)
        for place, offset in settled.items()
        if offset != firsts.get(place)
    }


def _firsts(batch: GroupBatch, held: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    """First offset in the batch of each held partition."""
    firsts: dict[tuple[str, int], int] = {}
    for record in batch.records:
        if (record.topic, record.partition) in held:
            firsts.setdefault((record.topic, record.partition), record.offset)
    return firsts


def _one_id(given: str, in_header: str) -> str:
    """The id of a request from its body and its header. Raises InvalidRequest when they differ."""
    if given and in_header and given != in_header:
        raise InvalidRequest(
            "bad_request_id",
            f"request_id {given!r} differs from the header sie-request-id {in_header!r}: both must be equal.",
            "request_id",
        )
    return given or in_header


def _made_id(record: LogRecord, bound: Bound | None) -> str:
    """Id of a request that has none: its place in the log, and the model if others may read that place too."""
    return source_id(record) if bound is None else f"{source_id(record)}:{bound.instance}"
