"""Reads given stretches of partitions, e.g. one record, or the second around a moment. Nothing before or behind."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from typing import NamedTuple

from sie_stream.edge.tables import patiently
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord

POLL_MAX = 5_000
POLL_MS = 100
LOOKUP_S = 30.0


class Span(NamedTuple):
    """Offsets from `start` (included) to `end` (not included)."""

    start: int
    end: int


def read_spans(
    reader: LogReader, spans: Mapping[TopicPartition, Span], timeout_s: float = 30.0
) -> Generator[LogRecord]:
    """The visible records of each stretch, in the order of each partition. Markers and aborted records are passed over.

    A stretch must end at or before the partition's end offset. Close the generator to stop early.
    Raises FatalLogError when nothing comes for `timeout_s`.
    """
    with closing(read_batches(reader, spans, timeout_s)) as batches:
        for records in batches:
            yield from records


def read_batches(
    reader: LogReader, spans: Mapping[TopicPartition, Span], timeout_s: float = 30.0
) -> Generator[list[LogRecord]]:
    """read_spans for whoever reads millions: as many at once as came."""
    left = {place: span for place, span in spans.items() if span.start < span.end}
    ends: dict[tuple[str, int], int] = {place: span.end for place, span in left.items()}
    reader.assign({place: span.start for place, span in left.items()})
    heard = time.monotonic()
    try:
        while left:
            try:
                records = reader.poll(POLL_MAX, POLL_MS)
            except Retriable:
                records = []
            within = [record for record in records if record.offset < ends.get((record.topic, record.partition), 0)]
            if within:
                yield within
            done = [place for place, span in left.items() if reader.position(place) >= span.end]
            if done:
                reader.unassign(done)
                left = {place: span for place, span in left.items() if place not in done}
            if records or done:
                heard = time.monotonic()
            elif time.monotonic() - heard > timeout_s:
                raise FatalLogError(f"{', '.join(f'{t}/{p}' for t, p in left)}: nothing came for {timeout_s:.0f} s")
    finally:
        reader.unassign(list(left))


def partitions_of(reader: LogReader, topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]


def window(reader: LogReader, places: Iterable[TopicPartition], from_ms: int, to_ms: int) -> dict[TopicPartition, Span]:
    """The stretch of each partition with the times from `from_ms` to below `to_ms`, cut to what is there.

    By Kafka's own index of times: the first offset at or after each.
    """
    asked = list(places)
    deadline = time.monotonic() + LOOKUP_S
    starts = patiently(lambda: reader.offsets_at(asked, from_ms), deadline)
    ends = patiently(lambda: reader.offsets_at(asked, to_ms), deadline)
    limits = patiently(lambda: reader.end_offsets(asked), deadline)
    return {place: Span(starts[place], min(ends[place], limits[place])) for place in asked}
