"""Egress: Stage 2 for pooled models. Raw outputs in, terminal records out, one transaction per turn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec
from msgspec import Raw, Struct

from processors.tokenise import TextEncoder
from schemas import codec
from schemas.wire import CodecError
from sie_stream.control import RouteRow
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicNames, TopicPartition, derived_request_id
from sie_stream.input_schema import compile_schema
from sie_stream.postprocess import Stage2, build_outputs, finish_result, stage2_of
from sie_stream.provenance import ResultTopics, dead_letter, result_json, result_key, terminal_writes
from sie_stream.records import CommittedOffset, Headers, LogRecord, LogWrite, RawOutput, ResultError
from sie_stream.rollout_records import SHADOW, pinned_in
from sie_stream.settings import Settings
from sie_stream.touches import kept_headers

NO_SCHEMA = b"{}"


class RoutesChanged(Struct, frozen=True):
    """Rows of the route table, oldest first; None: the row was deleted."""

    rows: tuple[tuple[str, RouteRow | None], ...]


class OutputsPolled(Struct, frozen=True, gc=False):
    """Records of sie.outputs, in the order of each partition."""

    records: list[LogRecord]
    now_ms: int


EgressEvent = RoutesChanged | OutputsPolled


class CommitOutputs(Struct, frozen=True, gc=False):
    """One transaction: these records and these positions, or nothing."""

    writes: list[LogWrite]
    offsets: dict[TopicPartition, CommittedOffset]


class EgressCounts(Struct):
    """Since the start, of committed and aborted batches alike."""

    finished: int = 0
    failed: int = 0
    undecodable: int = 0
    copies_left_out: int = 0
    """Copies for a bound or reply topic that does not exist (any more)."""


class EgressMachine:
    """Finishes what engines produced. `encoder_of(path, digest)` gives a tokenizer, or raises ConfigError."""

    def __init__(
        self,
        settings: Settings,
        encoder_of: Callable[[str, str], TextEncoder],
        topic_exists: Callable[[str], bool],
    ) -> None:
        self.counts = EgressCounts()
        self._names: TopicNames = settings.topics
        self._record_bytes_max = settings.record_bytes_max
        self._letter_bytes_max = settings.deadletter_bytes_max
        self._encoder_of = encoder_of
        self._topic_exists = topic_exists
        self._rows: dict[str, RouteRow] = {}
        self._stages: dict[str, Stage2 | ResultError] = {}

    def decide(self, events: Sequence[EgressEvent]) -> list[CommitOutputs]:
        commands = []
        for event in events:
            match event:
                case RoutesChanged():
                    self._change(event)
                case OutputsPolled():
                    commands.append(self._finish(event))
                case _:
                    assert_never(event)
        return commands

    def _change(self, event: RoutesChanged) -> None:
        """A deleted row stays usable: outputs of its last requests are still on their way."""
        for name, row in event.rows:
            if row is not None:
                self._rows[name] = row
                self._stages.pop(name, None)

    def _finish(self, event: OutputsPolled) -> CommitOutputs:
        writes: list[LogWrite] = []
        offsets: dict[TopicPartition, CommittedOffset] = {}
        for record in event.records:
            offsets[TopicPartition(record.topic, record.partition)] = CommittedOffset(record.offset + 1)
            try:
                raw = codec.decode_raw_output(record.value)
            except CodecError as refusal:
                writes.append(self._letter(record, refusal, event.now_ms))
            else:
                writes += self._terminal(raw, event.now_ms, kept_headers(record.headers) + pinned_in(record.headers))
        return CommitOutputs(writes, offsets)

    def _terminal(self, raw: RawOutput, now_ms: int, told: Headers) -> list[LogWrite]:
        """The terminal record of one raw output, with what its worker told of it, and its copies."""
        partial = raw.result
        waited_ms = float(max(0, now_ms - partial.finished_at))
        built: bytes | ResultError
        if partial.error is not None:
            built = partial.error
        else:
            stage2 = self._stage2(partial.model)
            if isinstance(stage2, ResultError):
                built = stage2
            else:
                built = build_outputs(stage2, raw.outputs, raw.token_ids, raw.finish_reason)
        result = finish_result(partial, built, waited_ms, now_ms)
        if isinstance(built, ResultError):
            self.counts.failed += 1
        else:
            self.counts.finished += 1
        if partial.variant[:1] == SHADOW:
            key = result_key(raw.key, result.request_id)
            return [LogWrite(self._names.shadow, codec.encode_result(result), key, None, told)]
        row = self._rows.get(partial.model)
        copies = ResultTopics(
            output=self._existing(raw.output_topic),
            output_serializer=row.output_serializer if row else "avro",
            reply=self._existing(raw.reply_topic),
            reply_serializer="avro" if partial.provenance.schema_id else "json",
        )
        writes = terminal_writes(self._names, result, raw.key, copies, codec.encode_result, result_json, told)
        if told and size_of(writes[0]) > self._record_bytes_max:
            writes[0] = msgspec.structs.replace(writes[0], headers=())
        return writes

    def _existing(self, topic: str | None) -> str | None:
        if topic is None or self._topic_exists(topic):
            return topic
        self.counts.copies_left_out += 1
        return None

    def _stage2(self, model: str) -> Stage2 | ResultError:
        found = self._stages.get(model)
        if found is None:
            found = self._stages[model] = self._compile(model)
        return found

    def _compile(self, model: str) -> Stage2 | ResultError:
        row = self._rows.get(model)
        if row is None:
            return ResultError("model_unavailable", f"there is no route of model {model!r} to finish its output with.")
        try:
            decode = self._encoder_of(row.tokenizer, row.tokenizer_digest).decode if row.tokenizer else None
            check = None
            if bytes(row.output_schema).strip() != NO_SCHEMA:
                check = compile_schema(_schema(row.output_schema)).check
        except (ConfigError, msgspec.DecodeError) as error:
            return ResultError("model_unavailable", f"the output of model {model!r} cannot be finished: {error}")
        return stage2_of(self._record_bytes_max, decode, check)

    def _letter(self, record: LogRecord, refusal: CodecError, now_ms: int) -> LogWrite:
        """No request is known behind these bytes, so they only go to the dead letters."""
        self.counts.undecodable += 1
        request_id = derived_request_id(record.topic, record.partition, record.offset)
        reason = ResultError(refusal.code, refusal.message)
        letter = dead_letter(record, request_id, reason, self._letter_bytes_max, "egress", now_ms)
        return LogWrite(self._names.deadletter, codec.encode_deadletter(letter), request_id.encode())


def size_of(write: LogWrite) -> int:
    """As Kafka clients count it: key, value and headers."""
    beside = sum(len(name) + len(value) for name, value in write.headers)
    return len(write.value or b"") + len(write.key or b"") + beside


def _schema(schema: Raw) -> dict[str, object]:
    return msgspec.json.decode(schema, type=dict[str, object])
