"""W3C trace context: the `traceparent` header. Source: W3C Recommendation "Trace Context", section 3.2."""

from __future__ import annotations

import re
from hashlib import blake2b

from msgspec import Struct

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8


class TraceContext(Struct, frozen=True):
    """What a caller told about its own span. Ids are lower-case hexadecimal."""

    trace_id: str
    parent_id: str
    sampled: bool


def parse_traceparent(text: str | None) -> TraceContext | None:
    """None for what the specification calls invalid: other shape, version ff, zero ids, or more parts in version 00."""
    found = _HEADER.fullmatch(text.strip()) if text else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    if not found[2].strip("0") or not found[3].strip("0"):
        return None
    return TraceContext(found[2], found[3], bool(int(found[4], 16) & 1))


def made_trace_id(request_id: str) -> str:
    """Trace id of a request that came without one: the same whoever asks."""
    return blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=TRACE_ID_BYTES).hexdigest()


def made_span_id(request_id: str, name: str) -> str:
    text = f"{request_id}\n{name}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=SPAN_ID_BYTES).hexdigest()
