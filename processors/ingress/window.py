"""Rebuilds the dedupe window of partitions just assigned, by reading them back. Over ports only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from processors.ingress.decode import Bound, remembered_id
from processors.turns import Source, commit_turn
from sie_stream.errors import Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import Clock, LogReader, TransactionalWriter
from sie_stream.records import CommittedOffset, LogRecord

POLL_MAX = 10_000
EMPTY_POLLS_MAX = 40
"""Reading back gives up for this turn after so many polls in a row without progress (2 s on real Kafka)."""
POLL_WAIT_MS = 50


class WindowReader:
    """Reads each partition from the start of the window up to its committed offset.

    The window ends at the first record still to be answered, or now if that is earlier: after an outage the requests
    waiting are old, and so are the ones they may repeat. Times are shifted so that the window ends now.
    """

    def __init__(self, window_ms: int, clock: Clock) -> None:
        self._window_ms = window_ms
        self._clock = clock
        self._known: dict[TopicPartition, int] = {}
        """Below these offsets everything is in the window already; a rebalance often gives a partition back."""

    def known(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> None:
        """This process took up and committed everything below these offsets (and above what was read back)."""
        for partition, committed in offsets.items():
            self._known[partition] = committed.offset

    def read(
        self, reader: LogReader, partitions: Sequence[TopicPartition], bound_to: Mapping[str, Bound | None]
    ) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
        """(topic, ((request id, time), ...)) as they are read. Raises Retriable when it cannot be read now."""
        if self._window_ms <= 0:
            return
        now_ms = self._clock.now_ms()
        ends = reader.end_offsets(partitions)
        for partition, found in reader.committed(partitions).items():
            committed = min(found.offset, ends[partition]) if found is not None else 0
            if committed <= 0:
                continue
            ends_ms = now_ms
            if ends[partition] > committed:
                ends_ms = min(now_ms, self._waiting_since_ms(reader, partition, committed, now_ms))
            start = reader.offsets_at([partition], ends_ms - self._window_ms)[partition]
            start = max(start, self._known.get(partition, 0))
            bound = bound_to.get(partition.topic)
            shift_ms = now_ms - ends_ms
            for records in self._records(reader, partition, start, committed):
                if records[-1].offset >= committed:
                    records = [record for record in records if record.offset < committed]
                yield partition.topic, _entries(records, bound, shift_ms, now_ms)
                # Kept as it goes, so that a long read that a rebalance interrupts goes on where it stopped.
                if records:
                    self._known[partition] = records[-1].offset + 1
            self._known[partition] = committed

    def _waiting_since_ms(self, reader: LogReader, partition: TopicPartition, committed: int, now_ms: int) -> int:
        """Timestamp of the first record not answered yet; now if there is none."""
        for records in self._records(reader, partition, committed, committed + 1):
            return records[0].timestamp_ms
        return now_ms

    def _records(self, reader: LogReader, partition: TopicPartition, start: int, end: int) -> Iterator[list[LogRecord]]:
        """Records from `start` until the reader has passed `end` (the last chunk may go beyond)."""
        if start >= end:
            return
        reader.assign({partition: start})
        at, empty_polls = start, 0
        try:
            while at < end:
                records = reader.poll(POLL_MAX, POLL_WAIT_MS)
                position = reader.position(partition)
                if position > at:
                    at, empty_polls = position, 0
                else:
                    empty_polls += 1
                if empty_polls > EMPTY_POLLS_MAX:
                    raise Retriable(f"{partition}: reading back stalled at offset {at}, wanted {end}")
                if records:
                    yield records
        finally:
            reader.unassign([partition])


def _entries(
    records: Sequence[LogRecord], bound: Bound | None, shift_ms: int, now_ms: int
) -> tuple[tuple[str, int], ...]:
    """(request id, time) of the records that have an id. A timestamp of the future counts as now."""
    return tuple(
        [
            (given, at_ms if (at_ms := record.timestamp_ms + shift_ms) < now_ms else now_ms)
            for record in records
            if (given := remembered_id(record, bound))
        ]
    )


def start_at_end(
    writer: TransactionalWriter, source: Source, reader: LogReader, partitions: Sequence[TopicPartition]
) -> bool:
    """For a group that starts at `latest`: partitions never read before start at their end. True if there were any.

    The ends are committed first, so that a crash right after does not lose the records in between. When that commit is
    refused (a rebalance came), the partitions stay fresh and nothing of them is used.
    """
    unread = [partition for partition, found in reader.committed(partitions).items() if found is None]
    if not unread:
        return False
    ends = {partition: CommittedOffset(offset) for partition, offset in reader.end_offsets(unread).items()}
    if commit_turn(writer, (), [(source.reader, ends)]) is not None:
        source.still_fresh(partitions)
    return True
