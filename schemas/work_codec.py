"""WorkItem as bytes and back: once per request in ingress and once in the worker, so this is written for speed.

The fields from `instance` to `source_topic` are the same for all work of one route, and the optional fields at the end
are mostly absent. Both runs are remembered by their bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from schemas.catalog import CURRENT
from schemas.runs import RunMemo
from schemas.wire import (
    ENCODED,
    FALSE,
    HEADER_BYTES,
    MEMO_MAX,
    STAMP_BYTES,
    STAMPS,
    TRUE,
    Cursor,
    bad_avro,
    check_utf8,
    frame,
    long_bytes,
    optional_ints,
    optional_json,
    optional_long,
    optional_text,
    read_long,
    read_span,
    read_stamp,
    text_bytes,
)
from sie_stream.records import WorkItem

FRAME = frame(CURRENT["WorkItem"].id)
_NO_OPTIONS = bytes(9)
"""The nine fields from `parameters` to `traceparent`: seven nulls and a false among them."""

_heads: dict[tuple[str, str, str, str, int, str], bytes] = {}


def _head(key: tuple[str, str, str, str, int, str]) -> bytes:
    instance, model, version, variant, route_epoch, source_topic = key
    if len(_heads) >= MEMO_MAX:
        _heads.clear()
    made = _heads[key] = b"".join(
        (
            FRAME,
            text_bytes(instance),
            text_bytes(model),
            text_bytes(version),
            text_bytes(variant),
            long_bytes(route_epoch),
            text_bytes(source_topic),
        )
    )
    return made


def _options(item: WorkItem) -> bytes:
    return b"".join(
        (
            optional_json(item.parameters),
            optional_ints(item.token_ids),
            optional_long(item.seed),
            optional_text(item.session),
            optional_text(item.tenant),
            TRUE if item.stream else FALSE,
            optional_text(item.reply_topic),
            optional_text(item.output_topic),
            optional_text(item.traceparent),
        )
    )


def encode_work(item: WorkItem) -> bytes:
    """Frame and body. Raises CodecError for a text that is not valid and a number beyond 64 bits."""
    key = (item.instance, item.model, item.version, item.variant, item.route_epoch, item.source_topic)
    plain = (
        item.parameters is None
        and item.token_ids is None
        and item.seed is None
        and item.session is None
        and item.tenant is None
        and not item.stream
        and item.reply_topic is None
        and item.output_topic is None
        and item.traceparent is None
    )
    inputs = item.inputs
    if not inputs.isascii():
        check_utf8(inputs)
    try:
        request_id = item.request_id.encode()
    except UnicodeEncodeError as error:
        raise bad_avro(f"request_id: not a valid text: {error}") from error
    return b"".join(
        (
            _heads.get(key) or _head(key),
            ENCODED[item.received_at_ms],
            ENCODED[item.routed_at_ms],
            ENCODED[item.priority],
            ENCODED[item.source_partition],
            ENCODED[item.schema_id],
            long_bytes(item.source_offset),
            ENCODED[item.requested_at_ms],
            ENCODED[item.deadline_at_ms],
            ENCODED[len(request_id)],
            request_id,
            ENCODED[len(item.key)],
            item.key,
            ENCODED[len(inputs)],
            inputs,
            _NO_OPTIONS if plain else _options(item),
        )
    )


# ---------------------------------------------------------------- decoding

_STAMPS_BYTES = 13
"""received_at_ms, routed_at_ms and priority, in this century."""
_OPTIONS_BYTES_MAX = 256


def _read_head(cursor: Cursor) -> tuple[str, str, str, str, int, str]:
    return cursor.text(), cursor.text(), cursor.text(), cursor.text(), cursor.long(), cursor.text()


class _Options(NamedTuple):
    parameters: bytes | None
    token_ids: tuple[int, ...] | None
    seed: int | None
    session: str | None
    tenant: str | None
    stream: bool
    reply_topic: str | None
    output_topic: str | None
    traceparent: str | None


_seen_heads = RunMemo(_read_head)
_seen_stamps: dict[bytes, tuple[int, int, int]] = {}
_seen_options: dict[bytes, _Options] = {}


def _read_stamps(value: bytes, at: int) -> tuple[int, int, int, int]:
    """received_at_ms, routed_at_ms, priority, and where the next field starts."""
    start = at
    received_at_ms, at = read_long(value, at)
    routed_at_ms, at = read_long(value, at)
    priority, at = read_long(value, at)
    if at - start == _STAMPS_BYTES:
        if len(_seen_stamps) >= MEMO_MAX // 8:
            _seen_stamps.clear()
        _seen_stamps[value[start:at]] = (received_at_ms, routed_at_ms, priority)
    return received_at_ms, routed_at_ms, priority, at


def _read_options(value: bytes, at: int) -> _Options:
    cursor = Cursor(value, at)
    options = _Options(
        cursor.optional_json(),
        cursor.optional_ints(),
        cursor.optional_long(),
        cursor.optional_text(),
        cursor.optional_text(),
        cursor.flag(),
        cursor.optional_text(),
        cursor.optional_text(),
        cursor.optional_text(),
    )
    cursor.end()
    if len(value) - at <= _OPTIONS_BYTES_MAX:
        if len(_seen_options) >= MEMO_MAX // 8:
            _seen_options.clear()
        _seen_options[value[at:]] = options
    return options


def _read_texts(value: bytes, at: int) -> tuple[str, bytes, bytes, int]:
    """request_id, key, inputs, and where the next field starts. Short lengths are taken in place."""
    size = value[at]
    if size & 0x81:
        start, at = read_span(value, at)
    else:
        start = at + 1
        at = start + (size >> 1)
    request_id = value[start:at].decode()
    size = value[at]
    if size & 0x81:
        start, at = read_span(value, at)
    else:
        start = at + 1
        at = start + (size >> 1)
    key = value[start:at]
    size = value[at]
    more = value[at + 1]
    if size & 0x81 == 0x80 and more < 0x80:  # 64 to 8,191 bytes, as most inputs are
        start = at + 2
        at = start + (size >> 1 & 0x3F | more << 6)
    else:
        start, at = read_span(value, at)
    inputs = value[start:at]
    if not inputs.isascii():
        check_utf8(inputs)
    return request_id, key, inputs, at


def read_work(value: bytes) -> WorkItem:
    """The record after a frame that was checked. Raises IndexError, UnicodeDecodeError or CodecError when it is bad."""
    _, size, (instance, model, version, variant, route_epoch, source_topic) = _seen_heads.find(value, HEADER_BYTES)
    at = HEADER_BYTES + size
    stamps = _seen_stamps.get(value[at : at + _STAMPS_BYTES])
    if stamps:
        received_at_ms, routed_at_ms, priority = stamps
        at += _STAMPS_BYTES
    else:
        received_at_ms, routed_at_ms, priority, at = _read_stamps(value, at)
    source_partition, schema_id = value[at], value[at + 1]
    if (source_partition | schema_id) & 0x81:
        source_partition, at = read_long(value, at)
        schema_id, at = read_long(value, at)
    else:
        source_partition >>= 1
        schema_id >>= 1
        at += 2
    source_offset, at = read_long(value, at)
    requested_at_ms = STAMPS.get(value[at : at + STAMP_BYTES])
    if requested_at_ms is None:
        requested_at_ms, at = read_stamp(value, at)
    else:
        at += STAMP_BYTES
    deadline_at_ms, at = read_stamp(value, at) if value[at] else (0, at + 1)
    request_id, key, inputs, at = _read_texts(value, at)
    return WorkItem(
        request_id,
        instance,
        model,
        version,
        variant,
        route_epoch,
        priority,
        inputs,
        key,
        source_topic,
        source_partition,
        source_offset,
        requested_at_ms,
        received_at_ms,
        routed_at_ms,
        schema_id,
        deadline_at_ms,
        *(_seen_options.get(value[at:]) or _read_options(value, at)),
    )
