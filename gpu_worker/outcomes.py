"""From what an engine answered to the records of the log: terminal results, raw outputs, dead letters, copies.

Records are encoded once, when the result is known, and wait in memory for a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from gpu_worker.backends.base import EngineOutput, ending_of
from gpu_worker.facts import Identity
from gpu_worker.guards import Guards
from gpu_worker.state import Batch, Finisher, Item, Replica
from schemas.codec import ReplicaResults, encode_deadletter, encode_raw_output, encode_result, encode_work
from schemas.wire import CodecError
from sie_stream.control import ModelLaunch
from sie_stream.errors import ConfigError, EngineError
from sie_stream.ids import TopicNames, derived_request_id
from sie_stream.postprocess import Stage2, build_outputs
from sie_stream.privacy.rules import WITHHELD
from sie_stream.privacy.vault import Guard, Vault
from sie_stream.provenance import (
    KEY_BYTES_MAX,
    NO_COPIES,
    NO_USAGE,
    Placed,
    ResultTopics,
    dead_letter,
    result_json,
    result_key,
    source_result,
    terminal_writes,
    without_content,
    work_ended,
    work_provenance,
    work_result,
)
from sie_stream.records import (
    REQUEST_ID_HEADER,
    Headers,
    LogRecord,
    LogWrite,
    Provenance,
    RawOutput,
    Result,
    ResultError,
    Status,
    Timings,
    Usage,
    header,
)
from sie_stream.rollout_records import SHADOW
from sie_stream.touches import HEADER_BYTES_MAX, touch_headers

COMPONENT = "worker"
UNIMPORTANT_LIBRARIES = ("python", "numpy")


class Stage2Refused(EngineError):
    """A model's Stage 2 cannot be set up (e.g. its tokenizer, or the key ring that it needs, is missing): the replica
    fails to load."""


Stage2Of = Callable[[ModelLaunch], Stage2]
"""Raises Stage2Refused."""


class Output(Struct):
    """Records that wait for the next transaction."""

    writes: list[LogWrite]
    copies: list[LogWrite]


class Turn(NamedTuple):
    """One completed batch."""

    batch: Batch
    inference_ms: float
    now_ms: int


def engine_label(backend: str, versions: dict[str, str]) -> str:
    """What provenance calls the engine: the backend and the libraries that decide its results."""
    libraries = [f"{name} {version}" for name, version in versions.items() if name not in UNIMPORTANT_LIBRARIES]
    return f"{backend} ({', '.join(libraries)})" if libraries else backend


class Outcomes:
    """Builds and encodes; keeps nothing but caches."""

    def __init__(
        self,
        names: TopicNames,
        identity: Identity,
        record_bytes_max: int,
        deadletter_bytes_max: int,
        stage2_of: Stage2Of,
        vault: Vault | None = None,
    ) -> None:
        self._names = names
        self._identity = identity
        self._value_bytes_max = record_bytes_max - KEY_BYTES_MAX
        self._deadletter_bytes_max = deadletter_bytes_max
        self._stage2_of = stage2_of
        self._vault = vault
        self._guards = Guards(vault)

    @property
    def keeps_keys(self) -> bool:
        """Whether records of sie.keys are wanted."""
        return self._vault is not None

    def heed(self, key: bytes | None, value: bytes | None) -> None:
        """A record of sie.keys."""
        if self._vault is not None:
            self._vault.heed(key, value)

    def finisher(self, replica: Replica, versions: dict[str, str]) -> Finisher:
        """Raises Stage2Refused."""
        placed = Placed(
            work_topic=self._names.work(replica.launch.model),
            placement_epoch=replica.key.placement_epoch,
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            device=replica.key.device,
            weights_digest=replica.weights_digest,
            engine=engine_label(replica.launch.backend, versions),
        )
        results = ReplicaResults(
            version=replica.launch.version,
            placement_epoch=placed.placement_epoch,
            work_topic=placed.work_topic,
            worker=placed.worker,
            incarnation=placed.incarnation,
            device=placed.device,
            weights_digest=placed.weights_digest,
            engine=placed.engine,
        )
        return Finisher(replica.launch, placed, self._stage2_of(replica.launch), results, self._guard(replica.launch))

    def _guard(self, launch: ModelLaunch) -> Guard | None:
        """Raises Stage2Refused."""
        try:
            return self._guards.guard_of(launch)
        except ConfigError as refusal:
            raise Stage2Refused(str(refusal)) from refusal

    def answered(self, turn: Turn, answers: Sequence[tuple[Item, EngineOutput]], output: Output) -> None:
        """The ending of every item of a batch that is still ours."""
        batch, inference_ms, now_ms = turn
        if batch.finisher.launch.fusion == "pooled":
            self._pooled(turn, answers, output)
            return
        if batch.finisher.guard is not None:
            self._guarded(turn, batch.finisher.guard, answers, output)
            return
        results_topic, value_bytes_max = self._names.results, self._value_bytes_max
        stage2, batch_size, submitted_ms = batch.finisher.stage2, len(batch.items), batch.submitted_ms
        encode_ok, append = batch.finisher.results.encode_ok, output.writes.append
        for item, answer in answers:
            work = item.work
            if answer.error_code is not None:
                self._failed(turn, item, answer, ResultError(answer.error_code, answer.error_message or ""), output)
                continue
            built = build_outputs(stage2, answer.outputs, answer.token_ids, answer.finish_reason or "")
            if not isinstance(built, bytes):
                self._failed(turn, item, answer, built, output)
                continue
            routed_ms = work.routed_at_ms
            # As in _result(); written out, because this runs for every request.
            queue_ms = submitted_ms - routed_ms
            timings = (
                queue_ms if queue_ms > 0 else 0.0,
                routed_ms - work.received_at_ms,
                inference_ms,
                answer.first_token_ms or 0.0,
                0.0,
                now_ms - work.requested_at_ms,
            )
            try:
                value = encode_ok(
                    work,
                    built,
                    timings_ms=timings,
                    finished_at=now_ms,
                    batch_size=batch_size,
                    work_partition=item.partition.partition.partition,
                    work_offset=item.offset,
                    usage=_usage(answer),
                )
            except CodecError as refusal:
                self._failed(turn, item, answer, _not_text(refusal), output)
                continue
            if work.output_topic or work.reply_topic or len(value) > value_bytes_max or work.variant[:1] == SHADOW:
                result = _result(turn, item, answer, "ok", built, None)
                self._terminal(item, result, batch.finisher.launch, output)
            else:
                told = self._told(item, len(value)) if item.touches or item.passed else ()
                append(LogWrite(results_topic, value, result_key(work.key, work.request_id), None, told))

    def _failed(self, turn: Turn, item: Item, answer: EngineOutput, error: ResultError, output: Output) -> None:
        result = _result(turn, item, answer, ending_of(error.code), None, error)
        self._terminal(item, result, turn.batch.finisher.launch, output)

    def _guarded(self, turn: Turn, guard: Guard, answers: Sequence[tuple[Item, EngineOutput]], output: Output) -> None:
        """As `answered`, for models whose fields are protected: apart, so that all others do not pay for it."""
        finisher = turn.batch.finisher
        for item, answer in answers:
            if answer.error_code is not None:
                self._failed(turn, item, answer, _engine_error(finisher, answer), output)
                continue
            built: bytes | ResultError | None
            built = build_outputs(finisher.stage2, answer.outputs, answer.token_ids, answer.finish_reason or "")
            if isinstance(built, bytes):
                built = guard.outputs(item.work, built, output.writes)
            if built is None:
                built = ResultError("output_not_text", "the outputs are no JSON, so their fields cannot be protected")
            if not isinstance(built, bytes):
                self._failed(turn, item, answer, built, output)
                continue
            try:
                self._terminal(item, _result(turn, item, answer, "ok", built, None), finisher.launch, output)
            except CodecError as refusal:
                self._failed(turn, item, answer, _not_text(refusal), output)

    def _pooled(self, turn: Turn, answers: Sequence[tuple[Item, EngineOutput]], output: Output) -> None:
        """Raw outputs for the shared Stage 2 pool; what failed already needs no Stage 2."""
        for item, answer in answers:
            work = item.work
            if answer.error_code is not None:
                self._failed(turn, item, answer, _engine_error(turn.batch.finisher, answer), output)
                continue
            raw = RawOutput(
                result=_result(turn, item, answer, "ok", None, None),
                key=result_key(work.key, work.request_id),
                outputs=answer.outputs,
                token_ids=None if answer.token_ids is None else tuple(answer.token_ids),
                finish_reason=answer.finish_reason or "",
                reply_topic=work.reply_topic,
                output_topic=work.output_topic,
            )
            try:
                value = encode_raw_output(raw)
            except CodecError as refusal:
                self._failed(turn, item, answer, _not_text(refusal), output)
                continue
            if len(value) > self._value_bytes_max:
                self._failed(turn, item, answer, self._too_large(len(value)), output)
            else:
                own_key, told = result_key(None, work.request_id), self._told(item, len(value))
                output.writes.append(LogWrite(self._names.outputs, value, own_key, None, told))

    def ended(
        self,
        item: Item,
        status: Status,
        code: str,
        message: str,
        launch: ModelLaunch | None,
        now_ms: int,
        output: Output,
    ) -> None:
        """An item that ends without an answer: expired, or failed after its retries."""
        result = work_ended(item.work, status, code, message, self._bare_provenance(item), now_ms)
        self._terminal(item, result, launch, output)

    def poisoned(self, item: Item, finisher: Finisher, now_ms: int, output: Output) -> None:
        """An item no engine survives, or that every engine refuses: `failed`, and its bytes to the dead letters."""
        guard = finisher.guard
        said = item.message if guard is None else WITHHELD
        message = f"gave up after {item.attempts} attempts, the last one alone: {said}"
        self.ended(item, "failed", item.code, message, finisher.launch, now_ms, output)
        if item.work.variant[:1] == SHADOW:
            return  # a copy; the request itself is answered elsewhere
        place = item.partition.partition
        kept = item.work if guard is None else guard.work(item.work, output.writes)
        record = LogRecord(
            place.topic, place.partition, item.offset, item.work.routed_at_ms, item.work.key, encode_work(kept)
        )
        letter = msgspec.structs.replace(
            dead_letter(
                record,
                item.work.request_id,
                ResultError(item.code, message),
                self._deadletter_bytes_max,
                COMPONENT,
                now_ms,
            ),
            attempts=item.attempts,
        )
        output.writes.append(LogWrite(self._names.deadletter, encode_deadletter(letter), item.work.request_id.encode()))

    def undecodable(
        self, record: LogRecord, launches: Sequence[ModelLaunch], refusal: CodecError, now_ms: int, output: Output
    ) -> None:
        """A record of a work topic that is no WorkItem: `rejected`, under the id of its header or of its place.

        `launches`: the versions of that topic's model that are placed here. Where one protects fields, the bytes stay
        on the work topic: nobody can say where in them those fields are.
        """
        named = header(record.headers, REQUEST_ID_HEADER)
        request_id = derived_request_id(record.topic, record.partition, record.offset)
        if named:
            request_id = named.decode("utf-8", "replace")
        hides = self._guards.may_hold_protected(launches)
        why = "why is withheld, since it may repeat personal data" if hides else refusal.message
        error = ResultError(refusal.code, f"the work record cannot be read: {why}")
        result = source_result(record, request_id, "rejected", error, None, 0, now_ms)
        letter = dead_letter(record, request_id, error, self._deadletter_bytes_max, COMPONENT, now_ms)
        if hides:
            letter = without_content(letter)
        output.writes.append(LogWrite(self._names.deadletter, encode_deadletter(letter), request_id.encode()))
        output.writes.append(LogWrite(self._names.results, encode_result(result), result_key(record.key, request_id)))

    def _terminal(self, item: Item, result: Result, launch: ModelLaunch | None, output: Output) -> None:
        """Any terminal record, with its copies; one that does not fit into a record becomes `failed`."""
        work = item.work
        size = len(encode_result(result))
        if size > self._value_bytes_max:
            result = msgspec.structs.replace(result, status="failed", outputs=None, error=self._too_large(size))
        copies = NO_COPIES
        if work.output_topic or work.reply_topic:
            copies = ResultTopics(
                output=work.output_topic,
                output_serializer=launch.output_serializer if launch else "avro",
                reply=work.reply_topic,
                reply_serializer="avro" if work.schema_id else "json",
            )
        if work.variant[:1] == SHADOW:
            key = result_key(work.key, work.request_id)
            output.writes.append(LogWrite(self._names.shadow, encode_result(result), key, None, item.passed))
            return
        told = self._told(item, size)
        writes = terminal_writes(self._names, result, work.key, copies, encode_result, result_json, told)
        output.writes.append(writes[0])
        output.copies.extend(writes[1:])

    def _told(self, item: Item, size: int) -> Headers:
        """What happened to it here and before, beside a value of `size` bytes; left out where it does not fit."""
        return touch_headers(item.touches) + item.passed if size + HEADER_BYTES_MAX < self._value_bytes_max else ()

    def _too_large(self, size: int) -> ResultError:
        message = f"the result has {size} bytes, allowed are {self._value_bytes_max} (setting record_bytes_max)."
        return ResultError("output_too_large", message, "outputs")

    def _bare_provenance(self, item: Item) -> Provenance:
        place = item.partition.partition
        placed = Placed(
            work_topic=place.topic,
            placement_epoch=item.partition.placement_epoch,
            worker=self._identity.worker,
            incarnation=self._identity.incarnation,
            device="",
            weights_digest="",
            engine="",
        )
        return work_provenance(item.work, place.partition, item.offset, placed, 0)


def _engine_error(finisher: Finisher, answer: EngineOutput) -> ResultError:
    """Why an engine did not answer. Its words may quote the inputs."""
    assert answer.error_code is not None
    return ResultError(answer.error_code, WITHHELD if finisher.guard is not None else answer.error_message or "")


def _not_text(refusal: CodecError) -> ResultError:
    return ResultError("output_not_text", f"the outputs cannot be written: {refusal.message}", "outputs")


def _usage(answer: EngineOutput) -> Usage:
    if answer.prompt_tokens or answer.completion_tokens:
        return Usage(answer.prompt_tokens, answer.completion_tokens)
    return NO_USAGE


def _result(
    turn: Turn, item: Item, answer: EngineOutput, status: Status, outputs: bytes | None, error: ResultError | None
) -> Result:
    """The version is that of the model that ran, which may be newer than the one the item was routed to."""
    work, finisher = item.work, turn.batch.finisher
    provenance = work_provenance(
        work, item.partition.partition.partition, item.offset, finisher.placed, len(turn.batch.items)
    )
    timings = Timings(
        float(max(0, turn.batch.submitted_ms - work.routed_at_ms)),
        float(max(0, work.routed_at_ms - work.received_at_ms)),
        turn.inference_ms,
        answer.first_token_ms or 0.0,
        0.0,
        float(max(0, turn.now_ms - work.requested_at_ms)),
    )
    made = work_result(work, status, outputs, error, _usage(answer), timings, provenance, turn.now_ms)
    if work.version == finisher.launch.version:
        return made
    return msgspec.structs.replace(made, version=finisher.launch.version)
