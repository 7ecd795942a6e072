"""Results wait here for their work items: the two topics have different partitions and orders.

In memory up to a limit, and on disk beyond it, since a day of results does not fit into memory. Writing a row, reading
it and making a record of it again cost 5 us together, a quarter of all that a replay does for a request.
"""

from __future__ import annotations

import heapq
import sqlite3
import tempfile
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sie_stream.ids import TopicPartition
from sie_stream.records import Result
from sie_stream.replay.compare import Original

MEMORY_BYTES_MAX = 256 * 1024 * 1024
ROW_BYTES = 400
"""Of one result in memory, besides its id and its outputs."""
_Shared = tuple[str, str, str, str, str, str]
"""status, model, version, weights digest, engine, error code: alike for nearly all results."""
_COLUMNS = "offset, shared, request_id, outputs, seed, batch_size, inference_ms, total_ms, finished_at"
_PAGE = 10_000


def original_of(result: Result) -> Original:
    """What of a result is compared."""
    origin, timings, error = result.provenance, result.timings_ms, result.error
    return Original(
        result.request_id,
        result.status,
        result.model,
        result.version,
        origin.weights_digest,
        origin.engine,
        result.outputs,
        error.code if error else "",
        origin.seed,
        origin.batch_size,
        timings.inference,
        timings.total,
        result.finished_at,
    )


class Scratch:
    """By partition of a work topic and offset. A result that comes twice counts once, as it was the first time."""

    def __init__(self, folder: Path | None = None, memory_bytes_max: int = MEMORY_BYTES_MAX) -> None:
        self._left_bytes = memory_bytes_max
        self._held: dict[tuple[str, int], dict[int, Original]] = {}
        self._disk = _Disk(folder)
        self.count = 0
        self.repeated = 0

    def add(self, results: Iterable[Result]) -> None:
        """Keep results under the place of their work item."""
        overflow: dict[TopicPartition, dict[int, Original]] = {}
        for result in results:
            origin = result.provenance
            place, offset = (origin.work_topic, origin.work_partition), origin.work_offset
            held = self._held.get(place)
            if held is None:
                held = self._held[place] = {}
            if offset in held:
                self.repeated += 1
                continue
            original = original_of(result)
            if self._left_bytes > 0:
                held[offset] = original
                self.count += 1
                self._left_bytes -= ROW_BYTES + len(original.request_id) + len(original.outputs or b"")
            else:
                rows = overflow.setdefault(TopicPartition(*place), {})
                if rows.setdefault(offset, original) is not original:
                    self.repeated += 1
        for place, rows in overflow.items():
            added = self._disk.add(place, rows)
            self.count += added
            self.repeated += len(rows) - added

    def places(self) -> list[TopicPartition]:
        return sorted(TopicPartition(*place) for place in self._held)

    def offsets(self, place: TopicPartition) -> Iterator[int]:
        """Of all results of a partition, rising."""
        return heapq.merge(sorted(self._held.get(place, ())), self._disk.offsets(place))

    def between(self, place: TopicPartition, first: int, last: int) -> Mapping[int, Original]:
        """Results of work items `first` to `last`, both included, and perhaps of others as well."""
        held = self._held.get(place, {})
        rows = self._disk.between(place, first, last)
        return ChainMap(held, rows) if rows else held

    def held(self, place: TopicPartition) -> int:
        """Results of one partition."""
        return len(self._held.get(place, ())) + self._disk.held(place)

    def below(self, place: TopicPartition, offset: int, listed: int) -> tuple[int, list[tuple[int, str, str]]]:
        """How many results have a work item below `offset`, and (offset, request id, model) of the first of them."""
        held = self._held.get(place, {})
        offsets = sorted(at for at in held if at < offset)
        count, rows = self._disk.below(place, offset, listed)
        first = [(at, held[at].request_id, held[at].model) for at in offsets[:listed]]
        return count + len(offsets), sorted([*first, *rows])[:listed]

    def close(self) -> None:
        self._disk.close()


class _Disk:
    """One SQLite table per partition, by offset."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sie-replay-", dir=folder)
        self._db = sqlite3.connect(Path(self._folder.name) / "results.sqlite", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-16384", "locking_mode=EXCLUSIVE"):
            self._db.execute(f"PRAGMA {pragma}")
        self._tables: dict[TopicPartition, str] = {}
        self._shared: dict[_Shared, int] = {}
        self._shared_of: list[_Shared] = []

    def add(self, place: TopicPartition, rows: Mapping[int, Original]) -> int:
        """How many are new."""
        self._db.execute("BEGIN")
        statement = f"INSERT OR IGNORE INTO {self._table(place)} VALUES (?,?,?,?,?,?,?,?,?)"
        added = self._db.executemany(statement, [self._row(offset, one) for offset, one in rows.items()]).rowcount
        self._db.execute("COMMIT")
        return added

    def _row(self, offset: int, one: Original) -> tuple[object, ...]:
        shared = (one.status, one.model, one.version, one.weights_digest, one.engine, one.error_code)
        number = self._shared.get(shared)
        if number is None:
            number = self._shared[shared] = len(self._shared_of)
            self._shared_of.append(shared)
        return (
            *(offset, number, one.request_id, one.outputs, one.seed, one.batch_size),
            *(one.inference_ms, one.total_ms, one.finished_at),
        )

    def _table(self, place: TopicPartition) -> str:
        name = self._tables.get(place)
        if name is None:
            name = self._tables[place] = f"partition_{len(self._tables)}"
            self._db.execute(
                f"CREATE TABLE {name} (offset INTEGER PRIMARY KEY, shared INTEGER, request_id TEXT, outputs BLOB, "
                "seed INTEGER, batch_size INTEGER, inference_ms REAL, total_ms REAL, finished_at INTEGER)"
            )
        return name

    def offsets(self, place: TopicPartition) -> Iterator[int]:
        after = -1
        while place in self._tables:
            page = self._db.execute(
                f"SELECT offset FROM {self._table(place)} WHERE offset > ? ORDER BY offset LIMIT {_PAGE}", (after,)
            ).fetchall()
            if not page:
                return
            for (after,) in page:
                yield after

    def between(self, place: TopicPartition, first: int, last: int) -> dict[int, Original]:
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
        if place not in self._tables:
            return 0
        return self._db.execute(f"SELECT COUNT(*) FROM {self._table(place)}").fetchone()[0]

    def below(self, place: TopicPartition, offset: int, listed: int) -> tuple[int, list[tuple[int, str, str]]]:
        if place not in self._tables:
            return 0, []
        table = self._table(place)
        count = self._db.execute(f"SELECT COUNT(*) FROM {table} WHERE offset < ?", (offset,)).fetchone()[0]
        rows = self._db.execute(
            f"SELECT offset, request_id, shared FROM {table} WHERE offset < ? ORDER BY offset LIMIT ?", (offset, listed)
        )
        return count, [(at, request_id, self._shared_of[shared][1]) for at, request_id, shared in rows]

    def close(self) -> None:
        self._db.close()
        self._folder.cleanup()
