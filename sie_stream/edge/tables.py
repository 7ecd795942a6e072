"""Reads a whole topic up to its present end, e.g. a state table kept on a compacted topic."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import TypeVar

from schemas.wire import CodecError
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord

AnswerT = TypeVar("AnswerT")
RowT = TypeVar("RowT")
RETRY_S = 0.1


def read_to_end(
    reader: LogReader,
    topic: str,
    since: Mapping[TopicPartition, int] | None = None,
    timeout_s: float = 30.0,
    latest: LogReader | None = None,
) -> Generator[LogRecord]:
    """Every visible record of `topic` (from the offsets `since`, where given) up to the end offset seen at the call.

    Nothing for a topic that does not exist. `latest`: a reader whose end offsets count open transactions, too, so that
    what is committed behind one is waited for (at most the transaction timeout).

    Raises FatalLogError when the end is not reached in time.
    """
    deadline = time.monotonic() + timeout_s
    starts, ends = patiently(lambda: _span(reader, topic, since or {}, latest or reader), deadline)
    partitions = list(ends)
    left = [partition for partition in partitions if starts[partition] < ends[partition]]
    reader.assign({partition: starts[partition] for partition in left})
    try:
        while left:
            try:
                yield from reader.poll(5_000, 100)
            except Retriable:
                pass
            left = [partition for partition in left if reader.position(partition) < ends[partition]]
            if left and time.monotonic() > deadline:
                raise FatalLogError(f"{topic}: did not reach its end within {timeout_s:.0f} s")
    finally:
        reader.unassign([partition for partition in partitions if starts[partition] < ends[partition]])


def _span(
    reader: LogReader, topic: str, since: Mapping[TopicPartition, int], latest: LogReader
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Where to start and where to stop, per partition."""
    partitions = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
    ends = latest.end_offsets(partitions)
    return reader.beginning_offsets(partitions) | dict(since), ends


def patiently(call: Callable[[], AnswerT], deadline: float) -> AnswerT:
    """Call again while Kafka has passing trouble (a broker just came back), until `deadline` (time.monotonic, s)."""
    while True:
        try:
            return call()
        except Retriable:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


def latest_values(reader: LogReader, topic: str) -> dict[str, bytes]:
    """Newest value per key of a compacted topic, in key order; deleted keys are left out.

    A key that is no UTF-8 is shown with replacements: whoever may write to the topic may have written it.
    """
    rows: dict[str, bytes] = {}
    for record in read_to_end(reader, topic):
        key = (record.key or b"").decode(errors="replace")
        if record.value is None:
            rows.pop(key, None)
        else:
            rows[key] = record.value
    return dict(sorted(rows.items()))


def latest_rows(
    reader: LogReader, topic: str, decode: Callable[[bytes], RowT], tell: Callable[[str], None]
) -> dict[str, RowT]:
    """The newest row per key, in key order. One that cannot be read is told and left out, as the processes do that
    follow the table: a record that somebody else wrote must not hide all others.
    """
    rows: dict[str, RowT] = {}
    for key, value in latest_values(reader, topic).items():
        try:
            rows[key] = decode(value)
        except CodecError as error:
            tell(f"{topic}, key {key!r}: left out, it is no row of this table: {error}")
    return rows
