"""Results wait here for their work items, on disk: the two topics have different partitions and orders, and a day of
them does not fit into memory.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from sie_stream.ids import TopicPartition
from sie_stream.records import Result
from sie_stream.replay.compare import Original

_Shared = tuple[str, str, str, str, str, str]
"""status, model, version, weights digest, engine, error code: alike for nearly all results."""
_COLUMNS = "offset, shared, request_id, outputs, seed, batch_size, inference_ms, total_ms, finished_at"
_PAGE = 10_000


class Scratch:
    """One table per partition of a work topic, by offset. A result that comes twice counts once."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sie-replay-", dir=folder)
        self._db = sqlite3.connect(Path(self._folder.name) / "results.sqlite", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-16384", "locking_mode=EXCLUSIVE"):
            self._db.execute(f"PRAGMA {pragma}")
        self._tables: dict[TopicPartition, str] = {}
        self._shared: dict[_Shared, int] = {}
        self._shared_of: list[_Shared] = []
        self.count = 0
        self.repeated = 0

    def add(self, results: Iterable[Result]) -> None:
        """Keep results under the place of their work item."""
        rows: dict[TopicPartition, list[tuple[object, ...]]] = {}
        for result in results:
            origin = result.provenance
            place = TopicPartition(origin.work_topic, origin.work_partition)
            shared = (
                result.status,
                result.model,
                result.version,
                origin.weights_digest,
                origin.engine,
                result.error.code if result.error else "",
            )
            number = self._shared.get(shared)
            if number is None:
                number = self._shared[shared] = len(self._shared_of)
                self._shared_of.append(shared)
            rows.setdefault(place, []).append(
                (
                    origin.work_offset,
                    number,
                    result.request_id,
                    result.outputs,
                    origin.seed,
                    origin.batch_size,
                    result.timings_ms.inference,
                    result.timings_ms.total,
                    result.finished_at,
                )
            )
        if not rows:
            return
        self._db.execute("BEGIN")
        for place, found in rows.items():
            added = self._db.executemany(
                f"INSERT OR IGNORE INTO {self._table(place)} VALUES (?,?,?,?,?,?,?,?,?)", found
            ).rowcount
            self.count += added
            self.repeated += len(found) - added
        self._db.execute("COMMIT")

    def _table(self, place: TopicPartition) -> str:
        name = self._tables.get(place)
        if name is None:
            name = self._tables[place] = f"partition_{len(self._tables)}"
            self._db.execute(
                f"CREATE TABLE {name} (offset INTEGER PRIMARY KEY, shared INTEGER, request_id TEXT, outputs BLOB, "
                "seed INTEGER, batch_size INTEGER, inference_ms REAL, total_ms REAL, finished_at INTEGER)"
            )
        return name

    def places(self) -> list[TopicPartition]:
        return sorted(self._tables)

    def offsets(self, place: TopicPartition) -> Iterator[int]:
        """Of all results of a partition, rising."""
        after = -1
        while True:
            page = self._db.execute(
                f"SELECT offset FROM {self._table(place)} WHERE offset > ? ORDER BY offset LIMIT {_PAGE}", (after,)
            ).fetchall()
            if not page:
                return
            for (after,) in page:
                yield after

    def between(self, place: TopicPartition, first: int, last: int) -> dict[int, Original]:
        """Results of work items `first` to `last`, both included."""
        if place not in self._tables:
            return {}
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM {self._table(place)} WHERE offset BETWEEN ? AND ?", (first, last)
        )
        shared_of = self._shared_of
        found: dict[int, Original] = {}
        for offset, number, request_id, outputs, seed, batch_size, inference_ms, total_ms, finished_at in rows:
            status, model, version, digest, engine, code = shared_of[number]
            found[offset] = Original(
                request_id,
                status,
                model,
                version,
                digest,
                engine,
                outputs,
                code,
                seed,
                batch_size,
                inference_ms,
                total_ms,
                finished_at,
            )
        return found

    def held(self, place: TopicPartition) -> int:
        """Results of one partition."""
        return self._db.execute(f"SELECT COUNT(*) FROM {self._table(place)}").fetchone()[0]

    def below(self, place: TopicPartition, offset: int, listed: int) -> tuple[int, list[tuple[int, str, str]]]:
        """How many results have a work item below `offset`, and (offset, request id, model) of the first of them."""
        table = self._table(place)
        count = self._db.execute(f"SELECT COUNT(*) FROM {table} WHERE offset < ?", (offset,)).fetchone()[0]
        rows = self._db.execute(
            f"SELECT offset, request_id, shared FROM {table} WHERE offset < ? ORDER BY offset LIMIT ?", (offset, listed)
        )
        return count, [(at, request_id, self._shared_of[shared][1]) for at, request_id, shared in rows]

    def close(self) -> None:
        self._db.close()
        self._folder.cleanup()
