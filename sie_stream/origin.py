"""Where a request was before a bridge carried it here. Pure.

It stands in a header of the request record. Whoever writes requests can write it, so it is for people: nothing is
decided by it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from sie_stream.records import Headers, header

ORIGIN_HEADER = "sie-origin"
HEADER_BYTES_MAX = 2_048


class Origin(Struct, frozen=True):
    """A record of another cluster."""

    cluster: str
    """Its bootstrap servers, as the model's declaration names them."""
    topic: str
    partition: int
    offset: int
    written_ms: int
    """Timestamp of that record; milliseconds since the epoch."""

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset} of {self.cluster}"


_decoder = msgspec.json.Decoder(Origin)


def origin_header(origin: Origin) -> Headers:
    """None for names that are longer than anybody reads."""
    body = msgspec.json.encode(origin)
    return ((ORIGIN_HEADER, body),) if len(body) <= HEADER_BYTES_MAX else ()


def origin_in(headers: Headers) -> Origin | None:
    """None: no bridge brought it, or what stands there cannot be read."""
    told = header(headers, ORIGIN_HEADER) if headers else None
    if not told or len(told) > HEADER_BYTES_MAX:
        return None
    try:
        return _decoder.decode(told)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
