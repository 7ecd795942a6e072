"""What happened to a request inside a worker, besides its turn in an engine. Pure.

It stands in a header of the result's record (or of its raw output), so it is written in the transaction of the result
and kept as long. A request that nothing happened to has no header: it costs nothing, and no schema changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from sie_stream.records import Headers, header

TOUCHES_HEADER = "sie-touches"
TOUCHES_MAX = 8
"""Of one request; the newest are kept."""
HEADER_BYTES_MAX = 2 * 1024
"""Within what postprocess.RESULT_OVERHEAD_BYTES leaves beside outputs and a key."""
LEFT_MAX = 6
"""Models named as having given way; more are counted."""
NAME_CHARS_MAX = 120


class CameIn(Struct, frozen=True, omit_defaults=True, tag="came_in"):
    """Its model had to come to a device while it waited there. Times are of the worker's clocks."""

    at_ms: int
    """When it was there; milliseconds since the epoch."""
    worker: str
    device: str
    model: str
    """model@version, here and below."""
    came_from: str
    """host or disk."""
    size_bytes: int
    """Copied."""
    took_ms: float
    """From the order to bring it until it was there."""
    waited_ms: float = 0.0
    """Before that order, from when requests for it began to wait. 0: nothing waited when it was ordered."""
    gave_way: tuple[str, ...] = ()
    """Models that left the device for it, at most LEFT_MAX; empty: there was room."""
    gave_way_more: int = 0
    left_for: str = ""
    """For which model it had left the device before; empty: it had not been there since its load."""
    away_ms: float = 0.0
    """How long ago that was, when it was back."""


class KeptOut(Struct, frozen=True, omit_defaults=True, tag="kept_out"):
    """It ended in the queue while its model was not on the device."""

    at_ms: int
    worker: str
    device: str
    model: str
    place: str
    """coming (on the way to the device), host, or disk."""
    held_by: tuple[str, ...] = ()
    """Models that were on the device, at most LEFT_MAX."""


class Moved(Struct, frozen=True, omit_defaults=True, tag="moved"):
    """It ran elsewhere, was stopped there, and its partition came to another worker with an image of it."""

    worker: str
    incarnation: str
    """Of the worker that stopped it."""
    begun_ms: int
    stopped_ms: int
    """By the clock of that worker; milliseconds since the epoch."""
    size_bytes: int
    """Of the image."""
    at_ms: int = 0
    """When the next worker's engine had taken the image up, by its clock; 0: it has not."""
    refused: str = ""
    """Why that engine did not take it: the request was computed from its beginning."""

    @property
    def ran_ms(self) -> float:
        """On the worker that stopped it."""
        return float(max(0, self.stopped_ms - self.begun_ms))

    @property
    def pause_ms(self) -> float:
        """Between the two workers; their clocks may differ."""
        return float(max(0, self.at_ms - self.stopped_ms)) if self.at_ms else 0.0


class Retried(Struct, frozen=True, omit_defaults=True, tag="retried"):
    """An engine failed while it held the request, and it was tried again."""

    at_ms: int
    worker: str
    code: str
    attempt: int
    """Which attempt failed, from 1."""


Touch = CameIn | KeptOut | Moved | Retried

_decoder = msgspec.json.Decoder(tuple[Touch, ...])
_one = msgspec.json.Decoder(Touch)
_any = msgspec.json.Decoder(tuple[msgspec.Raw, ...])


def encode_touches(touches: Sequence[Touch]) -> bytes:
    """JSON of the newest, as many as may be told."""
    body = msgspec.json.encode(touches[-TOUCHES_MAX:])
    while len(body) > HEADER_BYTES_MAX:
        touches = touches[-TOUCHES_MAX:][1:]
        body = msgspec.json.encode(touches)
    return body


def touch_headers(touches: Sequence[Touch]) -> Headers:
    return ((TOUCHES_HEADER, encode_touches(touches)),) if touches else ()


def kept_headers(headers: Headers) -> Headers:
    """What a stage between engine and result passes on."""
    told = header(headers, TOUCHES_HEADER) if headers else None
    return () if not told or len(told) > HEADER_BYTES_MAX else ((TOUCHES_HEADER, told),)


def decode_touches(body: bytes) -> tuple[Touch, ...]:
    """Those of kinds that are known here; nothing of what cannot be read."""
    if len(body) > HEADER_BYTES_MAX:
        return ()
    try:
        return _decoder.decode(body)[-TOUCHES_MAX:]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        parts = _any.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ()
    found: list[Touch] = []
    for part in parts[-TOUCHES_MAX:]:
        try:
            found.append(_one.decode(part))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue  # of a newer release
    return tuple(found)


def touches_in(headers: Headers) -> tuple[Touch, ...]:
    told = header(headers, TOUCHES_HEADER) if headers else None
    return decode_touches(told) if told else ()


def came_in_of(arrived: CameIn, gave_way: Sequence[str], left_for: str, away_ms: float) -> CameIn:
    """With who gave way for it and for whom it had left, in bounded length."""
    return msgspec.structs.replace(
        arrived,
        model=arrived.model[:NAME_CHARS_MAX],
        gave_way=tuple(name[:NAME_CHARS_MAX] for name in gave_way[:LEFT_MAX]),
        gave_way_more=max(0, len(gave_way) - LEFT_MAX),
        left_for=left_for[:NAME_CHARS_MAX],
        away_ms=away_ms,
    )
