"""Finished offsets above a committed offset, as the text that travels in the commit's metadata.

Text: base64 without padding of  kind (1 byte) | crc32 of offset and payload (4 bytes) | payload.
kind 1: bitset, lowest bit first, bit i is offset base + i. kind 2: run lengths as LEB128 varints, unfinished then
finished and so on, starting at base. No finished offsets: the empty text. The checksum covers the committed offset, so
metadata that was mangled, or moved to another offset by a tool, is not believed.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence

METADATA_CHARS_MAX = 4_095
"""Kafka's default offset.metadata.max.bytes is 4096, and Kafka refuses 4,096 characters."""
HEADER_BYTES = 5
PAYLOAD_BYTES_MAX = METADATA_CHARS_MAX * 3 // 4 - HEADER_BYTES
BITSET = 1
RUNS = 2
SPAN_MAX = 1 << 40
"""More than this between the committed offset and a finished one is not ours."""

Range = tuple[int, int]
"""Offsets from the first (included) to the second (not included)."""


def varint_bytes(value: int) -> int:
    """Bytes of `value` as a LEB128 varint. varint_bytes(a + b) <= varint_bytes(a) + varint_bytes(b)."""
    return 1 if value < 128 else (value.bit_length() + 6) // 7


def encode(base: int, finished: Sequence[Range]) -> str:
    """Shortest text for sorted, disjoint, non-adjacent, non-empty ranges above `base`.

    May be longer than METADATA_CHARS_MAX: the caller sees to it that it is not.
    """
    if not finished:
        return ""
    kind, payload = RUNS, _encode_runs(base, finished)
    if (finished[-1][1] - base + 7) // 8 < len(payload):
        kind, payload = BITSET, _encode_bitset(base, finished)
    head = bytes((kind,)) + _checksum(base, payload)
    return b64encode(head + payload).decode().rstrip("=")


def decode(base: int, text: str) -> list[Range] | None:
    """Ranges encoded for this base, or None when the text is not (or no longer) trustworthy."""
    if not text:
        return []
    try:
        raw = b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None
    payload = raw[HEADER_BYTES:]
    if len(raw) <= HEADER_BYTES or raw[1:HEADER_BYTES] != _checksum(base, payload):
        return None
    if raw[0] == BITSET:
        return _decode_bitset(base, payload)
    if raw[0] == RUNS:
        return _decode_runs(base, payload)
    return None


def _checksum(base: int, payload: bytes) -> bytes:
    return zlib.crc32(payload, zlib.crc32(base.to_bytes(8, "big"))).to_bytes(4, "big")


def _encode_bitset(base: int, finished: Sequence[Range]) -> bytes:
    parts: list[str] = []
    at = base
    for first, end in finished:
        parts += ("0" * (first - at), "1" * (end - first))
        at = end
    bits = "".join(parts)
    return int(bits[::-1], 2).to_bytes((len(bits) + 7) // 8, "little")


def _decode_bitset(base: int, payload: bytes) -> list[Range] | None:
    bits = bin(int.from_bytes(payload, "little"))[:1:-1]
    ranges: list[Range] = []
    first = bits.find("1")
    while first >= 0:
        end = bits.find("0", first)
        end = len(bits) if end < 0 else end
        ranges.append((base + first, base + end))
        first = bits.find("1", end)
    return ranges or None


def _encode_runs(base: int, finished: Sequence[Range]) -> bytes:
    out = bytearray()
    at = base
    for first, end in finished:
        for value in (first - at, end - first):
            while value > 0x7F:
                out.append(value & 0x7F | 0x80)
                value >>= 7
            out.append(value)
        at = end
    return bytes(out)


def _decode_runs(base: int, payload: bytes) -> list[Range] | None:
    values: list[int] = []
    value = shift = 0
    for byte in payload:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            value = shift = 0
    if shift or len(values) % 2 or sum(values) > SPAN_MAX:
        return None
    ranges: list[Range] = []
    at = base
    for gap, length in zip(values[::2], values[1::2], strict=True):
        if length == 0 or (gap == 0 and ranges):
            return None
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return ranges
