"""Where each request id is on the topics: a SQLite file beside the engine's state, built once and then only continued.

Topics are ordered by time, request ids by nothing, so finding one by its id alone would be a scan. The file holds the
8-byte digest of each id with its partition and offset, about 30 bytes a record. It holds nothing that is not on the
topics: deleting it is harmless, and whoever reads a record by it checks the id, since topics can be made anew.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Self

from sie_stream.edge.spans import Span, read_batches
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord

BATCH = 100_000
"""Records sorted and written together: rows of one batch land on neighbouring pages."""
CACHE_KIB = 128 * 1024
PRUNE_MIN = 1_000_000
"""Rows of records that retention took are removed once there are so many of a partition."""

IdsOf = Callable[[LogRecord], str]
"""Request id of a record; empty: it has none of its own."""


class RequestIndex:
    """Not safe for two threads. Two processes may use one file; one waits while the other writes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            self._database = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            self._database.executescript(
                f"PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA cache_size=-{CACHE_KIB};"
                "CREATE TABLE IF NOT EXISTS place (number INTEGER PRIMARY KEY, topic TEXT, partition INTEGER,"
                " first INTEGER, next INTEGER, UNIQUE (topic, partition));"
                "CREATE TABLE IF NOT EXISTS entry (digest INTEGER, place INTEGER, record INTEGER,"
                " PRIMARY KEY (digest, place, record)) WITHOUT ROWID;"
            )
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"the index {path} cannot be used: {error}. Delete it; it is made again.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def next_offsets(self) -> dict[TopicPartition, int]:
        """How far each partition is in the index."""
        rows = self._database.execute("SELECT topic, partition, next FROM place")
        return {TopicPartition(topic, partition): offset for topic, partition, offset in rows}

    def behind(self, reader: LogReader, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Span]:
        """What is still to be read. A partition that is shorter than it was has been made anew: it starts again."""
        asked = list(partitions)
        begins, ends = reader.beginning_offsets(asked), reader.end_offsets(asked)
        known = self.next_offsets()
        for place in asked:
            if known.get(place, 0) > ends[place]:
                self.forget(place)
                known.pop(place)
            self._prune(place, begins[place])
        return {place: Span(max(known.get(place, 0), begins[place]), ends[place]) for place in asked}

    def catch_up(
        self,
        reader: LogReader,
        spans: Mapping[TopicPartition, Span],
        ids_of: IdsOf,
        advanced: Callable[[int], None],
        timeout_s: float = 30.0,
    ) -> None:
        """Read on. Each batch is written whole or not at all, so Ctrl-C loses at most one. `advanced`: records more."""
        numbers = {(place.topic, place.partition): self._number(place, span.start) for place, span in spans.items()}
        waiting: list[tuple[int, int, int]] = []
        reached: dict[int, int] = {}
        for records in read_batches(reader, spans, timeout_s):
            for record in records:
                number = numbers[record.topic, record.partition]
                reached[number] = record.offset + 1
                request_id = ids_of(record)
                if request_id:
                    waiting.append((signed_digest(request_id), number, record.offset))
            if len(waiting) >= BATCH:
                self._write(waiting, reached)
                advanced(len(waiting))
                waiting = []
        self._write(waiting, {numbers[place]: span.end for place, span in spans.items()})
        advanced(len(waiting))

    def _write(self, waiting: list[tuple[int, int, int]], reached: Mapping[int, int]) -> None:
        """`reached`: the next offset of each place, by its number."""
        waiting.sort()
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT OR IGNORE INTO entry VALUES (?, ?, ?)", waiting)
            self._database.executemany(
                "UPDATE place SET next = max(next, ?) WHERE number = ?",
                [(offset, number) for number, offset in reached.items()],
            )

    def find(self, request_id: str) -> list[tuple[TopicPartition, int]]:
        """Where records with this id may be, by topic, partition and offset."""
        rows = self._database.execute(
            "SELECT topic, partition, record FROM entry JOIN place ON place.number = entry.place"
            " WHERE digest = ? ORDER BY topic, partition, record",
            (signed_digest(request_id),),
        )
        return [(TopicPartition(topic, partition), offset) for topic, partition, offset in rows]

    def forget(self, place: TopicPartition) -> None:
        """All of one partition: it will be read from its beginning again."""
        row = self._database.execute("SELECT number FROM place WHERE topic = ? AND partition = ?", place).fetchone()
        if row is not None:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.execute("DELETE FROM entry WHERE place = ?", row)
                self._database.execute("DELETE FROM place WHERE number = ?", row)

    def _number(self, place: TopicPartition, first: int) -> int:
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(
                "INSERT OR IGNORE INTO place (topic, partition, first, next) VALUES (?, ?, ?, ?)",
                (*place, first, first),
            )
        row = self._database.execute("SELECT number FROM place WHERE topic = ? AND partition = ?", place).fetchone()
        return int(row[0])

    def _prune(self, place: TopicPartition, begins_at: int) -> None:
        row = self._database.execute(
            "SELECT number, first FROM place WHERE topic = ? AND partition = ?", place
        ).fetchone()
        if row is None or begins_at - row[1] < PRUNE_MIN:
            return
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("DELETE FROM entry WHERE place = ? AND record < ?", (row[0], begins_at))
            self._database.execute("UPDATE place SET first = ? WHERE number = ?", (begins_at, row[0]))


def signed_digest(request_id: str) -> int:
    """8-byte blake2b as SQLite's signed integer."""
    return int.from_bytes(
        blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True
    )
