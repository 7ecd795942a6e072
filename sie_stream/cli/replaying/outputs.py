"""The new results on a topic of the user's own, in the form of sie.results."""

from __future__ import annotations

import time

import msgspec

from schemas.codec import encode_result
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError
from sie_stream.ports import LogReader
from sie_stream.provenance import Placed, result_key, work_provenance, work_result
from sie_stream.records import LogWrite, ResultError, Timings, Usage, WorkItem
from sie_stream.replay.compare import Again, Original
from sie_stream.replay.report import Place, Tally
from sie_stream.settings import Settings

WORKER = "replay"
"""Named as the worker of these results: nobody takes them for answers to users."""
BATCH = 500
FLUSH_MS = 30_000


def checked_topic(reader: LogReader, settings: Settings, topic: str) -> str:
    """Raises ConfigError for a topic of SIE-Stream's own, and for one that does not exist."""
    if topic.startswith(settings.topic_prefix):
        raise ConfigError(f"--to-topic {topic!r}: topics that start with {settings.topic_prefix!r} are not for replays")
    if not reader.partitions_of(topic):
        raise ConfigError(f"--to-topic {topic!r}: there is no such topic; create it first")
    return topic


class OutputTopic:
    """Plain writes: a replay that is repeated writes them again."""

    def __init__(self, connection: Connection, topic: str, tally: Tally) -> None:
        self._writer = connection.plain_writer()
        self._topic = topic
        self._tally = tally
        self._writes: list[LogWrite] = []

    def add(self, original: Original, again: Again, place: Place, work: WorkItem) -> None:
        placed = Placed(place.topic, 0, WORKER, "", "", again.weights_digest, again.engine)
        error = ResultError(again.error_code, again.error_message) if again.error_code else None
        origin = work_provenance(work, place.partition, place.offset, placed, 0)
        timings = Timings(inference=again.inference_ms)
        made = work_result(
            work, again.status, again.outputs, error, Usage(), timings, origin, round(time.time() * 1_000)
        )
        result = msgspec.structs.replace(made, version=again.version)
        self._writes.append(LogWrite(self._topic, encode_result(result), result_key(work.key, work.request_id)))
        if len(self._writes) >= BATCH:
            self._write()

    def _write(self) -> None:
        writes, self._writes = self._writes, []
        self._writer.write(writes)

    def close(self) -> None:
        self._write()
        self._writer.flush(FLUSH_MS)
        self._writer.close()
