"""Links to topics on another Kafka cluster, which no transaction of ours can reach: at least once, made idempotent.

In:  foreign topic -> sie.requests. Written and flushed first, then the foreign offset is committed. A crash in between
     writes some requests twice with the same id (made from the foreign place), and ingress drops the repeat.
Out: sie.results of one instance -> foreign topic, flushed before our offset is committed. A repeat is possible; it has
     the same request id. Over ports only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from processors.ingress.decode import Bound, Limits, decode_bound, header_request_id, id_fits
from processors.ingress.window import start_at_end
from processors.turns import Source, commit_turn
from schemas import codec
from schemas.codec import CodecError
from sie_stream.control import RouteRow
from sie_stream.errors import InvalidRequest
from sie_stream.ids import TopicPartition, derived_request_id, keyed_hash
from sie_stream.origin import Origin, origin_header
from sie_stream.ports import GroupReader, LogReader, PlainWriter, TransactionalWriter
from sie_stream.provenance import result_json
from sie_stream.records import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    CommittedOffset,
    LogRecord,
    LogWrite,
    header,
)
from sie_stream.settings import Settings

BATCH_MAX = 500
FLUSH_MS = 10_000


class ClusterPorts(Struct, frozen=True):
    """The clients of one Kafka cluster.

    make_committer: a transactional writer that is only used to commit offsets.
    """

    make_reader: Callable[[str], LogReader]
    make_group_reader: Callable[[str], GroupReader]
    make_committer: Callable[[str], TransactionalWriter]
    make_plain_writer: Callable[[], PlainWriter]


def cluster_tag(bootstrap: str) -> str:
    """Short name of another cluster, for ids and groups: eight hexadecimal digits of its bootstrap servers."""
    return f"{keyed_hash(bootstrap.encode(), b'cluster') >> 32:08x}"


class InLink:
    """One foreign input topic of one model."""

    def __init__(
        self, row: RouteRow, bound: Bound, settings: Settings, here: ClusterPorts, there: ClusterPorts
    ) -> None:
        names = settings.topics
        tag = cluster_tag(row.input_bootstrap)
        self.name = f"{row.input_topic}@{tag}->{row.model}"
        self._bound = bound
        self._cluster = row.input_bootstrap
        self._place = f"{tag}/{row.input_topic}"
        self._requests = names.requests
        self._limits = Limits(settings.request_bytes_max, settings.json_depth_max)
        self._group = row.input_group or f"{names.bridge_group}.{row.model}"
        self._there = there
        self._committer = there.make_committer(f"{names.prefix}bridge.{row.model}")
        self._committer.init()
        self._writer = here.make_plain_writer()
        self._source = Source(self._group, there.make_group_reader(self._group))
        self._source.offset_reset = row.input_offset_reset
        self._source.subscribe((row.input_topic,))

    def turn(self) -> int:
        """Records carried over. Raises LogError when a cluster does not answer; the link is then made anew."""
        records = self._source.poll(BATCH_MAX, 0)
        fresh = self._source.take_fresh()
        if fresh and self._source.offset_reset == "latest" and self._started_at_end(fresh):
            self._source.rewind()
            return 0
        if not records:
            return 0
        self._writer.write([self.forwarded(record) for record in records])
        self._writer.flush(FLUSH_MS)
        if commit_turn(self._committer, (), [(self._source.reader, positions(records))]) is not None:
            self._source.rewind()
        return len(records)

    def forwarded(self, record: LogRecord) -> LogWrite:
        """The request in a foreign record. One that cannot be decoded goes on as it is, and ingress says why."""
        request_id = header_request_id(record)
        try:
            request, _ = decode_bound(record, self._bound, self._limits)
            if id_fits(request.request_id):
                request_id = request_id or request.request_id
            request_id = request_id or self._made_id(record)
            value = codec.encode_request(replace(request, request_id=request_id))
        except (InvalidRequest, CodecError):
            request_id = request_id or self._made_id(record)
            value = record.value
            if value is not None and len(value) > self._limits.request_bytes_max:
                value = value[: self._limits.request_bytes_max + 1]  # enough to be refused for its size
        headers = [(REQUEST_ID_HEADER, request_id.encode())]
        trace = header(record.headers, TRACEPARENT_HEADER)
        if trace:
            headers.append((TRACEPARENT_HEADER, trace))
        place = (record.topic, record.partition, record.offset, record.timestamp_ms)
        headers += origin_header(Origin(self._cluster, *place))
        # The key keeps repeats of one record on one partition, where ingress can see them.
        return LogWrite(self._requests, value, record.key or request_id.encode(), None, tuple(headers))

    def _made_id(self, record: LogRecord) -> str:
        return f"{derived_request_id(self._place, record.partition, record.offset)}:{self._bound.instance}"

    def _started_at_end(self, fresh: Sequence[TopicPartition]) -> bool:
        reader = self._there.make_reader(self._group)
        try:
            return start_at_end(self._committer, self._source, reader, fresh)
        finally:
            reader.close()

    def close(self) -> None:
        self._source.reader.close()
        self._writer.close()
        self._committer.close()


class OutLink:
    """Results of all instances whose output topic is on one other cluster."""

    def __init__(self, bootstrap: str, settings: Settings, here: ClusterPorts, there: ClusterPorts) -> None:
        names = settings.topics
        tag = cluster_tag(bootstrap)
        self.name = f"results->{tag}"
        self.rows: Mapping[str, RouteRow] = {}
        """By instance; the owner keeps it up to date."""
        self._committer = here.make_committer(f"{names.prefix}bridge.results.{tag}")
        self._committer.init()
        self._writer = there.make_plain_writer()
        group = f"{names.bridge_group}.results.{tag}"
        self._source = Source(group, here.make_group_reader(group))
        self._source.subscribe((names.results,))

    def turn(self) -> int:
        """Results read. Raises LogError when a cluster does not answer; the link is then made anew."""
        records = self._source.poll(BATCH_MAX, 0)
        self._source.take_fresh()
        if not records:
            return 0
        writes = [write for record in records if (write := self.forwarded(record)) is not None]
        if writes:
            self._writer.write(writes)
            self._writer.flush(FLUSH_MS)
        if commit_turn(self._committer, (), [(self._source.reader, positions(records))]) is not None:
            self._source.rewind()
        return len(records)

    def forwarded(self, record: LogRecord) -> LogWrite | None:
        """The copy of a result for the foreign topic, or None if it is not for this cluster."""
        try:
            result = codec.decode_result(record.value)
        except CodecError:
            return None
        row = self.rows.get(result.instance)
        if row is None:
            return None
        value = result_json(result) if row.output_serializer == "json" else record.value
        headers = ((REQUEST_ID_HEADER, result.request_id.encode()),)
        return LogWrite(row.output_topic, value, record.key, None, headers)

    def close(self) -> None:
        self._source.reader.close()
        self._writer.close()
        self._committer.close()


def positions(records: Sequence[LogRecord]) -> dict[TopicPartition, CommittedOffset]:
    """Next offset of every partition; records of one partition are in order."""
    return {TopicPartition(one.topic, one.partition): CommittedOffset(one.offset + 1) for one in records}
