"""Where the records of a request id are: by the index, by a stretch of time, or by the id when it names a place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from processors.ingress.decode import Bound, remembered_id
from schemas.codec import decode_result, decode_row, decode_work
from schemas.result_codec import RESULT_FRAME
from schemas.wire import HEADER_BYTES, CodecError, read_span
from sie_stream.cli.output import tell
from sie_stream.cli.progress import progress_bars
from sie_stream.control import RouteRow
from sie_stream.edge.connection import Connection
from sie_stream.edge.request_index import RequestIndex
from sie_stream.edge.spans import Span, partitions_of, read_spans, window
from sie_stream.edge.tables import latest_rows
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.partitioner import keyed_partition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord
from sie_stream.rollout_records import SHADOW

Place = tuple[TopicPartition, int]
_DERIVED = re.compile(r"src:([a-zA-Z0-9._-]{1,249}):(\d{1,9}):(\d{1,18})(?::mi-[0-9a-f]+)?", re.ASCII)
NEWS_MAX = 50_000
"""More records than this to be indexed are worth a progress bar."""


class Times(Struct, frozen=True):
    """Records from `from_ms` to below `to_ms`."""

    from_ms: int
    to_ms: int


class Routes:
    """The route table as it is now, and what follows from it for reading request topics."""

    def __init__(self, reader: LogReader, names: TopicNames) -> None:
        rows = latest_rows(reader, names.routes, lambda value: decode_row(value, RouteRow), tell)
        self.by_model: dict[str, RouteRow] = {row.model: row for row in rows.values()}
        self._names = names
        self._bound = {
            row.input_topic: Bound(row.instance, row.input_deserializer, "")
            for row in self.by_model.values()
            if row.input_topic and not row.input_bootstrap
        }

    @property
    def request_topics(self) -> tuple[str, ...]:
        """Topics of this cluster that ingress reads."""
        return (self._names.requests, *sorted(self._bound))

    def instances_of(self, topic: str) -> tuple[str, ...]:
        """Models that answer a record of the topic, each for itself; of the common request topic one unnamed."""
        if topic == self._names.requests:
            return ("",)
        return tuple(sorted(row.instance for row in self.by_model.values() if self._reads(row, topic)))

    def groups(self) -> dict[tuple[str, str], str]:
        """{(request topic, instance): the consumer group that ingress reads it with}."""
        bound = {
            (row.input_topic, row.instance): row.input_group or self._names.ingress_group
            for row in self.by_model.values()
            if self._reads(row, row.input_topic)
        }
        return {(self._names.requests, ""): self._names.ingress_group, **bound}

    def groups_of(self, topic: str, request_id: str) -> list[str]:
        """Groups that have to come past a record before this request of it is routed: one for each model that reads
        the topic, unless the id names the model."""
        found = {instance: group for (read, instance), group in self.groups().items() if read == topic}
        own = found.get(request_id.rpartition(":")[2])
        return [own] if own else sorted(set(found.values()))

    @staticmethod
    def _reads(row: RouteRow, topic: str) -> bool:
        return bool(topic) and row.input_topic == topic and not row.input_bootstrap

    def source_id(self, record: LogRecord) -> str:
        """The request id that a request record carries; empty: ingress names it after its place."""
        return remembered_id(record, self._bound.get(record.topic))

    def of(self, wanted: str, source_topic: str) -> RouteRow | None:
        """The route of `model`, `model@version` or `mi-...`, else the one whose input the topic is."""
        named = self.by_model.get(wanted.partition("@")[0])
        if named is not None:
            return named
        rows = self.by_model.values()
        return next((row for row in rows if wanted == row.instance or row.input_topic == source_topic), None)


def result_id(record: LogRecord) -> str:
    """Request id of a result without decoding the rest; empty for what is no result."""
    value = record.value
    if value is None:
        return ""
    try:
        if value.startswith(RESULT_FRAME):
            start, end = read_span(value, HEADER_BYTES)
            return value[start:end].decode()
        return decode_result(value).request_id
    except (CodecError, IndexError, UnicodeDecodeError):
        return ""


def work_id(record: LogRecord) -> str:
    """Request id of a work record, with SHADOW before it for a copy that answers nobody; empty for what is none."""
    try:
        work = decode_work(record.value)
    except CodecError:
        return ""
    return SHADOW + work.request_id if work.variant[:1] == SHADOW else work.request_id


def index_path(connection: Connection, cluster_id: str) -> Path:
    settings = connection.settings
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in cluster_id)
    return Path(settings.state_dir) / "trace" / f"{name}.{settings.topic_prefix}sqlite"


def by_index(index: RequestIndex, reader: LogReader, routes: Routes, results: str, request_id: str) -> list[Place]:
    """Places of records with the id, after reading into the index what is new on the topics."""
    places = [place for topic in (results, *routes.request_topics) for place in partitions_of(reader, topic)]
    spans = index.behind(reader, places)

    def ids_of(record: LogRecord) -> str:
        return result_id(record) if record.topic == results else routes.source_id(record)

    news = sum(span.end - span.start for span in spans.values())
    with progress_bars(shown=news > NEWS_MAX) as progress:
        task = progress.add_task("reading what is new into the index", total=news)
        index.catch_up(reader, spans, ids_of, lambda count: progress.advance(task, count))
    return index.find(request_id)


def by_time(
    reader: LogReader, topics: Iterable[str], times: Times, request_id: str, key: str, names: TopicNames
) -> list[Place]:
    """Places of records with the id within the times. With `key` only the partition that the key goes to is read."""
    spans: dict[TopicPartition, Span] = {}
    for topic in topics:
        places = partitions_of(reader, topic)
        if key and topic in (names.results, names.requests) and places:
            places = [places[keyed_partition(key.encode(), len(places))]]
        spans |= window(reader, places, times.from_ms, times.to_ms)
    needle = request_id.encode("utf-8", "surrogatepass")
    return [
        (TopicPartition(record.topic, record.partition), record.offset)
        for record in read_spans(reader, spans)
        if _mentions(record, needle)
    ]


def _mentions(record: LogRecord, needle: bytes) -> bool:
    return needle in (record.value or b"") or any(needle == value for _, value in record.headers)


def own_place(request_id: str) -> Place | None:
    """The place that an id made by ingress (`src:TOPIC:PARTITION:OFFSET`) names."""
    found = _DERIVED.fullmatch(request_id)
    return None if found is None else (TopicPartition(found[1], int(found[2])), int(found[3]))


def fetch(reader: LogReader, places: Iterable[Place]) -> dict[Place, LogRecord]:
    """The records at these places. What retention took, and what is no record (a marker), is left out."""
    asked = list(dict.fromkeys(places))
    partitions = list(dict.fromkeys(place for place, _ in asked))
    known = [place for place in partitions if place.partition < reader.partitions_of(place.topic)]
    begins, ends = reader.beginning_offsets(known), reader.end_offsets(known)
    left = [(place, at) for place, at in asked if place in begins and begins[place] <= at < ends[place]]
    found: dict[Place, LogRecord] = {}
    while left:
        turn: dict[TopicPartition, Span] = {}
        rest = []
        for place, at in left:
            if place in turn:
                rest.append((place, at))
            else:
                turn[place] = Span(at, at + 1)
        for record in read_spans(reader, turn):
            found[(TopicPartition(record.topic, record.partition), record.offset)] = record
        left = rest
    return found


def newest(found: Mapping[Place, LogRecord], topic: str) -> Iterator[LogRecord]:
    """Records of one topic, newest first."""
    picked = [record for (place, _), record in found.items() if place.topic == topic]
    yield from sorted(picked, key=lambda record: (-record.timestamp_ms, record.partition, -record.offset))
