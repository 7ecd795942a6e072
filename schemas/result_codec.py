"""Result and RawOutput as bytes and back: once per request, so this is written for speed.

Most results are `ok`, and the fields from `instance` to `provenance.source_topic` are the same for all results of one
replica and route: they are encoded once, and recognised by their bytes when decoding.
"""

from __future__ import annotations

import struct

from schemas.catalog import CURRENT
from schemas.runs import RunMemo
from schemas.wire import (
    ENCODED,
    HEADER_BYTES,
    MEMO_MAX,
    NULL,
    SOME,
    Cursor,
    bad_avro,
    blob_bytes,
    check_utf8,
    frame,
    long_bytes,
    optional_ints,
    optional_json,
    optional_long,
    optional_text,
    read_long,
    read_span,
    text_bytes,
)
from sie_stream.records import (
    STATUSES,
    Provenance,
    RawOutput,
    Result,
    ResultError,
    Status,
    Timings,
    Usage,
    WorkItem,
)

RESULT_FRAME = frame(CURRENT["Result"].id)
RAW_OUTPUT_FRAME = frame(CURRENT["RawOutput"].id)

_STATUS_BYTES: dict[str, bytes] = {status: long_bytes(index) for index, status in enumerate(STATUSES)}
_TIMINGS = struct.Struct("<6d")
_Milliseconds = tuple[float, float, float, float, float, float]
"""queue, preprocess, inference, first_token, postprocess, total."""
NO_USAGE = Usage()

# ---------------------------------------------------------------- encoding

_SharedKey = tuple[str, str, str, str, int, int, str, str, str, str, str, str, str]
_shared: dict[_SharedKey, bytes] = {}


def _shared_bytes(key: _SharedKey) -> bytes:
    """The fields from `instance` to `provenance.source_topic`."""
    if len(_shared) >= MEMO_MAX // 8:
        _shared.clear()
    made = _shared[key] = b"".join(long_bytes(part) if isinstance(part, int) else text_bytes(part) for part in key)
    return made


def _error_bytes(error: ResultError | None) -> bytes:
    if error is None:
        return NULL
    return b"".join((SOME, text_bytes(error.code), text_bytes(error.message), text_bytes(error.field)))


def _result(result: Result, opening: bytes) -> bytes:
    """`opening` and the body of one result."""
    usage, timings, origin = result.usage, result.timings_ms, result.provenance
    key = (
        result.instance,
        result.model,
        result.version,
        result.variant,
        origin.route_epoch,
        origin.placement_epoch,
        origin.work_topic,
        origin.worker,
        origin.incarnation,
        origin.device,
        origin.weights_digest,
        origin.engine,
        origin.source_topic,
    )
    return b"".join(
        (
            opening,
            text_bytes(result.request_id),
            _STATUS_BYTES[result.status],
            ENCODED[result.finished_at],
            NULL if result.error is None else _error_bytes(result.error),
            ENCODED[usage.prompt_tokens],
            ENCODED[usage.completion_tokens],
            optional_json(result.outputs),
            _TIMINGS.pack(
                timings.queue,
                timings.preprocess,
                timings.inference,
                timings.first_token,
                timings.postprocess,
                timings.total,
            ),
            _shared.get(key) or _shared_bytes(key),
            ENCODED[origin.batch_size],
            ENCODED[origin.source_partition],
            long_bytes(origin.source_offset),
            ENCODED[origin.work_partition],
            long_bytes(origin.work_offset),
            NULL if origin.seed is None else optional_long(origin.seed),
            ENCODED[origin.schema_id],
        )
    )


def encode_result(result: Result) -> bytes:
    """Frame and body. Raises CodecError for a text that is not valid and a number beyond 64 bits."""
    return _result(result, RESULT_FRAME)


def encode_raw_output(output: RawOutput) -> bytes:
    return b"".join(
        (
            _result(output.result, RAW_OUTPUT_FRAME),
            blob_bytes(output.key),
            optional_json(output.outputs),
            optional_ints(output.token_ids),
            text_bytes(output.finish_reason),
            optional_text(output.reply_topic),
            optional_text(output.output_topic),
        )
    )


class ReplicaResults:
    """Encodes the `ok` results of one replica straight from its work items, without a Result in between."""

    def __init__(
        self,
        *,
        version: str,
        placement_epoch: int,
        work_topic: str,
        worker: str,
        incarnation: str,
        device: str,
        weights_digest: str,
        engine: str,
    ) -> None:
        self._version = version
        self._replica = (placement_epoch, work_topic, worker, incarnation, device, weights_digest, engine)
        self._routes: dict[tuple[str, str, str, int, str], bytes] = {}

    def _route(self, key: tuple[str, str, str, int, str]) -> bytes:
        if len(self._routes) >= MEMO_MAX // 8:
            self._routes.clear()
        instance, model, variant, route_epoch, source_topic = key
        made = self._routes[key] = _shared_bytes(
            (instance, model, self._version, variant, route_epoch, *self._replica, source_topic)
        )
        return made

    def encode_ok(
        self,
        item: WorkItem,
        outputs: bytes,
        *,
        timings_ms: _Milliseconds,
        finished_at: int,
        batch_size: int,
        work_partition: int,
        work_offset: int,
        usage: Usage = NO_USAGE,
    ) -> bytes:
        """The same bytes as encode_result of the Result made from these; the version is the replica's."""
        key = (item.instance, item.model, item.variant, item.route_epoch, item.source_topic)
        if not outputs.isascii():
            check_utf8(outputs)
        return b"".join(
            (
                RESULT_FRAME,
                text_bytes(item.request_id),
                _STATUS_BYTES["ok"],
                ENCODED[finished_at],
                NULL,
                ENCODED[usage.prompt_tokens],
                ENCODED[usage.completion_tokens],
                SOME,
                ENCODED[len(outputs)],
                outputs,
                _TIMINGS.pack(*timings_ms),
                self._routes.get(key) or self._route(key),
                ENCODED[batch_size],
                ENCODED[item.source_partition],
                long_bytes(item.source_offset),
                ENCODED[work_partition],
                long_bytes(work_offset),
                NULL if item.seed is None else optional_long(item.seed),
                ENCODED[item.schema_id],
            )
        )


# ---------------------------------------------------------------- decoding

_OPENING_BYTES = 11
"""status, finished_at, no error, small usage and the branch of outputs, in this century."""
_NO_SEED_NO_SCHEMA = b"\x00\x00"
_Opening = tuple[Status, int, ResultError | None, Usage, bool]
_openings: dict[bytes, _Opening] = {}


def _read_opening(value: bytes, at: int) -> tuple[_Opening, int]:
    """The fields from `status` to the branch of `outputs`, and where the next one starts."""
    cursor = Cursor(value, at)
    status: Status = STATUSES[cursor.index(len(STATUSES))]
    finished_at = cursor.long()
    error = ResultError(cursor.text(), cursor.text(), cursor.text()) if cursor.some() else None
    opening = (status, finished_at, error, Usage(cursor.long(), cursor.long()), cursor.some())
    if cursor.at - at == _OPENING_BYTES:
        if len(_openings) >= MEMO_MAX // 8:
            _openings.clear()
        _openings[value[at : cursor.at]] = opening
    return opening, cursor.at


_Shared = tuple[str, str, str, str, int, int, str, str, str, str, str, str, str]


def _read_shared(cursor: Cursor) -> _Shared:
    text, long = cursor.text, cursor.long
    instance, model, version, variant = text(), text(), text(), text()
    return (
        *(instance, model, version, variant, long(), long()),
        *(text(), text(), text(), text(), text(), text(), text()),
    )


_seen_shared = RunMemo(_read_shared)


_Tail = tuple[int, int, int, int, int, int | None, int, int]


def _read_tail(value: bytes, at: int) -> _Tail:
    """batch_size, source partition and offset, work partition and offset, seed, schema_id; where the record ends."""
    batch_size, at = read_long(value, at)
    source_partition = value[at]
    if source_partition & 0x81:
        source_partition, at = read_long(value, at)
    else:
        source_partition >>= 1
        at += 1
    source_offset, at = read_long(value, at)
    work_partition = value[at]
    if work_partition & 0x81:
        work_partition, at = read_long(value, at)
    else:
        work_partition >>= 1
        at += 1
    work_offset, at = read_long(value, at)
    if value[at : at + 2] == _NO_SEED_NO_SCHEMA:
        seed, schema_id, at = None, 0, at + 2
    else:
        cursor = Cursor(value, at)
        seed, schema_id, at = cursor.optional_long(), cursor.long(), cursor.at
    return batch_size, source_partition, source_offset, work_partition, work_offset, seed, schema_id, at


def _read_result(value: bytes) -> tuple[Result, int]:
    """The result after the frame, and where the next field starts."""
    size = value[HEADER_BYTES]
    if size & 0x81:
        start, at = read_span(value, HEADER_BYTES)
    else:  # up to 63 bytes
        start = HEADER_BYTES + 1
        at = start + (size >> 1)
    request_id = value[start:at].decode()
    opening = _openings.get(value[at : at + _OPENING_BYTES])
    if opening:
        at += _OPENING_BYTES
    else:
        opening, at = _read_opening(value, at)
    status, finished_at, error, usage, has_outputs = opening
    outputs = None
    if has_outputs:
        size, more = value[at], value[at + 1]
        if size & 0x81 == 0x80 and more < 0x80:  # 64 to 8,191 bytes, as most outputs are
            start = at + 2
            at = start + (size >> 1 & 0x3F | more << 6)
        else:
            start, at = read_span(value, at)
        outputs = value[start:at]
        if not outputs.isascii():
            check_utf8(outputs)
    if len(value) - at < _TIMINGS.size:
        raise IndexError
    timings = Timings(*_TIMINGS.unpack_from(value, at))
    at += _TIMINGS.size
    _, length, shared = _seen_shared.find(value, at)
    instance, model, version, variant, route, placement, topic, worker, incarnation, device, weights, engine, source = (
        shared
    )
    batch_size, source_partition, source_offset, work_partition, work_offset, seed, schema_id, at = _read_tail(
        value, at + length
    )
    provenance = Provenance(
        source,
        source_partition,
        source_offset,
        topic,
        work_partition,
        work_offset,
        route,
        placement,
        worker,
        incarnation,
        device,
        weights,
        engine,
        seed,
        batch_size,
        schema_id,
    )
    made = Result(
        request_id, status, instance, model, version, variant, outputs, error, usage, timings, provenance, finished_at
    )
    return made, at


def read_result(value: bytes) -> Result:
    """The record after a frame that was checked. Raises IndexError, UnicodeDecodeError or CodecError when it is bad."""
    result, at = _read_result(value)
    if at != len(value):
        raise bad_avro(f"{len(value) - at} bytes after the end of the record")
    return result


def read_raw_output(value: bytes) -> RawOutput:
    """Like read_result."""
    result, at = _read_result(value)
    cursor = Cursor(value, at)
    output = RawOutput(
        result,
        cursor.blob(),
        cursor.optional_json(),
        cursor.optional_ints(),
        cursor.text(),
        cursor.optional_text(),
        cursor.optional_text(),
    )
    cursor.end()
    return output
