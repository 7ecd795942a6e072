"""Reads results while something is rolled out, and reports what each variant answered. Over ports only.

While no route has more than one variant it reads nothing but the routes. When one gets a second variant it starts
reading some windows back; the scheduler counts each window once, so a restart repeats windows and breaks none. Windows
of a longer outage are never reported: the rollout holds meanwhile. A model whose route is split while others are read
already was passed over until then: its first window is broken.

A window is reported once everything that was on the topics when it closed is read. An open transaction hides what
others committed behind it, and a window without that would look complete and not be. One that never ends (of a producer
that is not ours) is told, and what it touches is reported as broken.
"""

from __future__ import annotations

from msgspec import Struct

from processors.follow import RouteChange, RouteFollower
from processors.outcomes.windows import WINDOW_MS, WindowBook
from processors.turns import Ports, Silence, Watcher
from schemas.codec import decode_result, encode_cluster
from schemas.wire import CodecError
from sie_stream.errors import LogError, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord, LogWrite
from sie_stream.settings import Settings

IDLE_WAIT_MS = 500
BUSY_WAIT_MS = 100
POLL_MAX = 5_000
WINDOWS_BACK = 4
WINDOWS_BACK_AT_START = 30
"""Of a process that finds a rollout under way: what nobody counted while it was down, for a minute, is counted now."""
HIDDEN_MS = 60_000
"""So long windows wait for what a transaction hides: more than one of ours may last. They count as broken then."""


class Mark(Struct, frozen=True):
    """Where the topics ended at a moment, with what was still inside transactions."""

    at_ms: int
    ends: dict[TopicPartition, int]


class OutcomesHost:
    """Call start() once, then turn() for ever, then close()."""

    def __init__(self, settings: Settings, ports: Ports, name: str, watcher: Watcher | None = None) -> None:
        self._topics = settings.topics
        self._ports = ports
        self._name = name
        self._watcher = watcher or Silence()
        self._group = f"{settings.topic_prefix}outcomes"
        self._routes = RouteFollower(ports.make_reader(self._group), settings.topics.routes)
        self._reader = ports.make_reader(self._group)
        self._split: dict[str, None] = {}
        """Models whose routes have more than one variant."""
        self._latest: LogReader | None = None
        self._mark: Mark | None = None
        """What has to be read before windows close."""
        self._partitions: list[TopicPartition] = []
        self._book: WindowBook | None = None
        self._windows_back = WINDOWS_BACK_AT_START
        self._newest_ms = 0
        """The latest timestamp among the results that were read."""
        self.reported = 0
        self._reports = ports.make_plain_writer()
        self.undecodable = 0

    def start(self) -> None:
        """Raises FatalLogError when the routes cannot be read."""
        self._change(self._routes.read_table())
        if not self._split:
            self._windows_back = WINDOWS_BACK  # what begins later has nothing that was missed

    def turn(self) -> int:
        """Returns how many results were counted."""
        self._change(self._routes.changes(0 if self._book is not None else IDLE_WAIT_MS))
        if not self._split:
            self._stop_reading()
            return 0
        try:
            if self._book is None:
                self._start_reading()
            return self._read()
        except Retriable as trouble:
            self._watcher.event("results_unreadable", reason=str(trouble))
            return 0

    def close(self) -> None:
        self._reader.close()
        self._close_latest()
        self._reports.close()

    def _close_latest(self) -> None:
        if self._latest is not None:
            self._latest.close()
            self._latest = None

    def _change(self, rows: tuple[RouteChange, ...]) -> None:
        for model, row in rows:
            if row is not None and len(row.variants) > 1:
                if self._book is not None and model not in self._split:
                    self._book.joined(model, max(self._ports.clock.now_ms(), self._newest_ms + 1))
                self._split[model] = None
            else:
                self._split.pop(model, None)

    def _start_reading(self) -> None:
        now_ms = self._ports.clock.now_ms()
        since_ms = now_ms - now_ms % WINDOW_MS - self._windows_back * WINDOW_MS
        found = [
            TopicPartition(topic, number)
            for topic in (self._topics.results, self._topics.shadow)
            for number in range(self._reader.partitions_of(topic))
        ]
        self._reader.assign(self._reader.offsets_at(found, since_ms))
        self._partitions = found
        self._latest = self._ports.make_latest_reader(self._group)
        self._book = WindowBook(since_ms, self._name)
        self._windows_back = WINDOWS_BACK
        self._watcher.event("reading_results", models=list(self._split))

    def _stop_reading(self) -> None:
        if self._book is not None:
            self._reader.unassign(self._partitions)
            self._book = self._mark = None
            self._close_latest()
            self._watcher.event("results_not_needed")

    def _read(self) -> int:
        book = self._book
        assert book is not None
        records = self._reader.poll(POLL_MAX, BUSY_WAIT_MS)
        now_ms = self._ports.clock.now_ms()
        if self._reader.lost_positions():
            book.lost(now_ms)
        for record in records:
            self._add(book, record)
        if len(records) < POLL_MAX:
            self._report(book, now_ms)
        return len(records)

    def _add(self, book: WindowBook, record: LogRecord) -> None:
        self._newest_ms = max(self._newest_ms, record.timestamp_ms)
        try:
            result = decode_result(record.value)
        except CodecError:
            self.undecodable += 1
            return
        if result.model in self._split:
            book.add(result, record.timestamp_ms, record.partition, record.offset, record.headers)

    def _read_to_ms(self, book: WindowBook, now_ms: int) -> int:
        """The moment up to which everything is read; 0: no window is due, or something of it is hidden still."""
        if self._mark is None and self._latest is not None and book.is_due(now_ms):
            self._mark = Mark(now_ms, self._latest.end_offsets(self._partitions))
        mark = self._mark
        if mark is None:
            return 0
        hidden = [place for place, end in mark.ends.items() if self._reader.position(place) < end]
        if hidden and now_ms - mark.at_ms < HIDDEN_MS:
            return 0
        if hidden:
            at = {f"{place.topic}/{place.partition}": self._reader.position(place) for place in hidden}
            self._watcher.event("results_hidden", by="a transaction that does not end", read_to=at)
            book.lost(now_ms)
        self._mark = None
        return mark.at_ms

    def _report(self, book: WindowBook, now_ms: int) -> None:
        closing_ms = self._read_to_ms(book, now_ms)
        windows = [window for window in book.close(closing_ms) if window.model in self._split]
        if not windows:
            return
        try:
            self._reports.write(
                [LogWrite(self._topics.cluster, encode_cluster(one), one.model.encode(), 0) for one in windows]
            )
        except LogError as trouble:  # these windows are lost; the rollout waits for the next
            self._watcher.event("windows_not_reported", reason=str(trouble))
            return
        self.reported += len(windows)
