"""Terminal records: how each kind of ending is built, and where it is written. Pure.

Every request ends in exactly one Result on the results topic. Copies go to the model's bound output topic and to the
reply topic of the request, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import msgspec
from msgspec import Raw, Struct

from sie_stream.control import RouteRow
from sie_stream.errors import InvalidRequest
from sie_stream.ids import TopicNames
from sie_stream.records import (
    REQUEST_ID_HEADER,
    DeadLetter,
    Headers,
    LogRecord,
    LogWrite,
    Provenance,
    Result,
    ResultError,
    Status,
    Timings,
    Usage,
    WorkItem,
)

KEY_BYTES_MAX = 4 * 1024
"""A longer key of a request is not repeated on its result; the request id stands in."""
NO_USAGE = Usage()
NO_TIMINGS = Timings()


class Placed(Struct, frozen=True, gc=False):
    """What is the same for all results of one replica."""

    work_topic: str
    placement_epoch: int
    worker: str
    incarnation: str
    device: str
    weights_digest: str
    engine: str
    """Backend and its version, e.g. `sklearn 1.9.1`."""


def source_result(
    record: LogRecord,
    request_id: str,
    status: Status,
    error: ResultError,
    route: RouteRow | None,
    schema_id: int,
    now_ms: int,
) -> Result:
    """The ending of a request that never became work: rejected, expired or shed at ingress."""
    return Result(
        request_id=request_id,
        status=status,
        instance=route.instance if route else "",
        model=route.model if route else "",
        version="",
        variant="",
        outputs=None,
        error=error,
        usage=NO_USAGE,
        timings_ms=Timings(total=float(max(0, now_ms - record.timestamp_ms))),
        provenance=Provenance(
            source_topic=record.topic,
            source_partition=record.partition,
            source_offset=record.offset,
            route_epoch=route.route_epoch if route else 0,
            schema_id=schema_id,
        ),
        finished_at=now_ms,
    )


def work_provenance(work: WorkItem, partition: int, offset: int, placed: Placed, batch_size: int) -> Provenance:
    """Everything the result of `work`, read at (partition, offset) of its work topic, depended on."""
    return Provenance(
        work.source_topic,
        work.source_partition,
        work.source_offset,
        placed.work_topic,
        partition,
        offset,
        work.route_epoch,
        placed.placement_epoch,
        placed.worker,
        placed.incarnation,
        placed.device,
        placed.weights_digest,
        placed.engine,
        work.seed,
        batch_size,
        work.schema_id,
    )


def work_result(
    work: WorkItem,
    status: Status,
    outputs: bytes | None,
    error: ResultError | None,
    usage: Usage,
    timings_ms: Timings,
    provenance: Provenance,
    now_ms: int,
) -> Result:
    """The ending of a work item, good or bad. `outputs` is the JSON object, None unless status is ok."""
    return Result(
        work.request_id,
        status,
        work.instance,
        work.model,
        work.version,
        work.variant,
        outputs,
        error,
        usage,
        timings_ms,
        provenance,
        now_ms,
    )


def work_ended(
    work: WorkItem, status: Status, code: str, message: str, provenance: Provenance, now_ms: int, field: str = ""
) -> Result:
    """A work item that ends without outputs: expired in the queue, shed under load, failed in the engine."""
    timings = Timings(
        queue=float(max(0, now_ms - work.routed_at_ms)), total=float(max(0, now_ms - work.requested_at_ms))
    )
    error = ResultError(code, message, field)
    return work_result(work, status, None, error, NO_USAGE, timings, provenance, now_ms)


def error_of(refusal: InvalidRequest) -> ResultError:
    return ResultError(refusal.code, refusal.message, refusal.field)


def result_key(key: bytes | None, request_id: str) -> bytes:
    """Key of the terminal record: the request's key, or the request id when it has none (or a giant one)."""
    if key and len(key) <= KEY_BYTES_MAX:
        return key
    return request_id.encode("utf-8", "surrogatepass")


def dead_letter(
    record: LogRecord, request_id: str, reason: ResultError, bytes_max: int, component: str, now_ms: int
) -> DeadLetter:
    """The original bytes (cut to `bytes_max`) of a record that could not be processed at all."""
    original = record.value or b""
    return DeadLetter(
        request_id=request_id,
        reason=reason.code,
        message=reason.message,
        source_topic=record.topic,
        source_partition=record.partition,
        source_offset=record.offset,
        original=original[:bytes_max],
        original_bytes=len(original),
        original_sha256=sha256(original).hexdigest(),
        stack_digest="",
        attempts=1,
        at_ms=now_ms,
        component=component,
    )


def without_content(letter: DeadLetter) -> DeadLetter:
    """For bytes that may hold protected fields, which nobody can find in them: length, digest and place stay, and the
    bytes are where they were read until retention takes them."""
    return msgspec.structs.replace(letter, original=b"")


class ResultTopics(Struct, frozen=True):
    """Where the terminal records of one request go besides the results topic, and in which form.

    output: bound output topic of the model, with its serializer ("json" or "avro").
    reply: topic the request named; written in the form the request came in (JSON for JSON).
    """

    output: str | None = None
    output_serializer: str = "avro"
    reply: str | None = None
    reply_serializer: str = "json"


NO_COPIES = ResultTopics()
_json = msgspec.json.Encoder()


def result_json(result: Result) -> bytes:
    """JSON form of a result: the same names as in Avro, `outputs` as an object."""
    fields = {name: getattr(result, name) for name in Result.__struct_fields__}
    fields["outputs"] = None if result.outputs is None else Raw(result.outputs)
    return _json.encode(fields)


def terminal_writes(
    names: TopicNames,
    result: Result,
    key: bytes | None,
    copies: ResultTopics,
    encode: Callable[[Result], bytes],
    encode_json: Callable[[Result], bytes],
    told: Headers = (),
) -> list[LogWrite]:
    """The terminal record, with the headers `told`, and its copies. `encode` gives framed Avro, `encode_json` is
    result_json.
    """
    own_key = result_key(key, result.request_id)
    avro = encode(result)
    headers = ((REQUEST_ID_HEADER, result.request_id.encode("utf-8", "surrogatepass")),)
    writes = [LogWrite(names.results, avro, own_key, None, told)]
    if copies.output:
        value = encode_json(result) if copies.output_serializer == "json" else avro
        writes.append(LogWrite(copies.output, value, own_key, None, headers))
    if copies.reply and copies.reply != copies.output:
        value = encode_json(result) if copies.reply_serializer == "json" else avro
        writes.append(LogWrite(copies.reply, value, own_key, None, headers))
    return writes
