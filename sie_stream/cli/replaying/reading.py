"""Reads spans of partitions, read_committed: no group is joined, nothing is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.stop import StopFlag
from sie_stream.errors import ConfigError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord
from sie_stream.replay.plan import Bounds, Span, span_of

GROUP = "sie-stream-replay"
"""Asked by librdkafka; it has no members and no offsets."""
FETCH_WAIT_MS = 5
"""Many short stretches are read, and offsets looked up between them: each waits for the fetch that is under way. With
the 250 ms of readers that wait for news, a replay of 54 answers spent a second in which nothing happened."""
POLL_MAX = 5_000
POLL_MS = 100
BATCH_MIN = 2_000
POLLS_MAX = 16
"""Polls before positions are looked at all the same: beyond the end of a span production goes on writing."""
BACK_FIRST, BACK_FACTOR = 64, 16
"""Offsets that are looked through before a gap, and how many times more when there is nothing."""

Moved = Callable[[int], None]
"""Told how many offsets were passed."""
Asked = Callable[[TopicPartition], int | None]
"""First or last offset that is wanted of a partition; None: no limit."""


class Readers:
    """One reader for the records, and one that sees the high watermark, which read_committed hides."""

    def __init__(self, connection: Connection) -> None:
        self.records = connection.reader(GROUP, FETCH_WAIT_MS)
        self._high = connection.latest_reader(GROUP, FETCH_WAIT_MS)
        self._connection = connection
        self._more: list[KafkaReader] = []
        self.lost: list[str] = []

    def partitions(self, topic: str, only: Sequence[int] = ()) -> list[TopicPartition]:
        """Raises ConfigError for a topic or partition that does not exist."""
        count = self.records.partitions_of(topic)
        if not count:
            raise ConfigError(f"there is no topic {topic!r}. `sie-stream get topics` lists them.")
        wrong = [number for number in only if not 0 <= number < count]
        if wrong:
            raise ConfigError(f"--partition {wrong[0]}: {topic} has partitions 0 to {count - 1}")
        return [TopicPartition(topic, number) for number in (only or range(count))]

    def bounds(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        asked = list(places)
        high = self._high.end_offsets(asked)
        stable = self.records.end_offsets(asked)
        first = self.records.beginning_offsets(asked)
        return {
            place: Bounds(first[place], max(first[place], stable[place]), max(stable[place], high[place]))
            for place in asked
        }

    def spans(self, places: Sequence[TopicPartition], first: Asked, until: Asked) -> list[Span]:
        bounds = self.bounds(places)
        return [span_of(place, first(place), until(place), bounds[place]) for place in places]

    def read(self, spans: Iterable[Span], moved: Moved, stop: StopFlag) -> Iterator[list[LogRecord]]:
        """Records of spans of different partitions, as they come; ends early once asked to stop."""
        spans = [span for span in spans if span.size]
        limits = {(span.topic, span.partition): span.end for span in spans}
        ends = {span.place: span.end for span in spans}
        at = {span.place: span.start for span in spans}
        reader = self.records
        reader.assign(at)
        batch: list[LogRecord] = []
        polls = 0
        try:
            while ends and not stop:
                try:
                    records = reader.poll(POLL_MAX, POLL_MS)
                except Retriable:
                    continue  # passing trouble of Kafka
                batch += [one for one in records if one.offset < limits.get((one.topic, one.partition), 0)]
                polls += 1
                if records and len(batch) < BATCH_MIN and polls < POLLS_MAX:
                    continue  # what is looked up per partition is looked up for many records at once
                yield batch
                batch, polls = [], 0
                for place, end in list(ends.items()):
                    position = min(reader.position(place), end)
                    moved(position - at[place])
                    at[place] = position
                    if position >= end:
                        del ends[place]
                        reader.unassign([place])
                self._lost()
        finally:
            reader.unassign(list(ends))

    def _lost(self) -> None:
        for place, (wanted, continued) in self.records.lost_positions().items():
            self.lost.append(
                f"{place.topic}[{place.partition}]: offsets {wanted} to {continued} were deleted while this ran."
            )

    def first_times(self, spans: Iterable[Span], stop: StopFlag) -> list[int]:
        """Timestamp of the first record of every span that has one."""
        firsts = (self.first_of(span, stop) for span in spans)
        return [first.timestamp_ms for first in firsts if first is not None]

    def written_from(self, spans: Iterable[Span], stop: StopFlag) -> int | None:
        """A time on or before which the producers wrote the first of every span; None where nothing says.

        The first record that is there is not the first that was, where compaction removed some: then the last one
        before the span is asked.
        """
        times: list[int] = []
        for span in spans:
            if not span.size:
                continue
            first = self.first_of(span, stop)
            if first is None or first.offset > span.start:
                first = self._last_before(span, stop)
            if first is None:
                return None
            times.append(first.timestamp_ms)
        return min(times, default=None)

    def first_of(self, span: Span, stop: StopFlag) -> LogRecord | None:
        """The first record of a span."""
        return next((records[0] for records in self.read([span], lambda _: None, stop) if records), None)

    def _last_before(self, span: Span, stop: StopFlag) -> LogRecord | None:
        """A record before the span, from near to far, for most gaps are markers and short."""
        beginning = self.bounds([span.place])[span.place].beginning
        end, back = span.start, BACK_FIRST
        while end > beginning and not stop:
            start = max(beginning, end - back)
            found = self.first_of(Span(span.topic, span.partition, start, end), stop)
            if found is not None:
                return found
            end, back = start, back * BACK_FACTOR
        return None

    def schemas(self) -> LogReader:
        """A reader of its own, for the schema registry."""
        made = self._connection.reader(GROUP, FETCH_WAIT_MS)
        self._more.append(made)
        return made

    def close(self) -> None:
        for reader in (self.records, self._high, *self._more):
            reader.close()
