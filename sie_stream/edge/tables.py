"""Reads a whole topic up to its present end, e.g. a state table kept on a compacted topic."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord


def read_to_end(
    reader: LogReader, topic: str, since: Mapping[TopicPartition, int] | None = None, timeout_s: float = 30.0
) -> Iterator[LogRecord]:
    """Every visible record of `topic` (from the offsets `since`, where given) up to the end offset seen at the call.

    Nothing for a topic that does not exist.

    Raises FatalLogError when the end is not reached in time.
    """
    partitions = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
    if not partitions:
        return
    ends = reader.end_offsets(partitions)
    starts = reader.beginning_offsets(partitions) | dict(since or {})
    left = [partition for partition in partitions if starts[partition] < ends[partition]]
    reader.assign({partition: starts[partition] for partition in left})
    deadline = time.monotonic() + timeout_s
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


def latest_values(reader: LogReader, topic: str) -> dict[str, bytes]:
    """Newest value per key of a compacted topic, in key order; deleted keys are left out."""
    rows: dict[str, bytes] = {}
    for record in read_to_end(reader, topic):
        key = (record.key or b"").decode()
        if record.value is None:
            rows.pop(key, None)
        else:
            rows[key] = record.value
    return dict(sorted(rows.items()))
