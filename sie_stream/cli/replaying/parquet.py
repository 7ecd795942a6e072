"""Every record that was answered again, as one Parquet file, written in row groups while the replay runs.

Half a replay looks like a whole one to whoever counts its rows. So the file has the name that was asked for only once
the replay came to its end, and its metadata say whether it did (`sie.replay.partial`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sie_stream.cli.replaying.files import partial_name
from sie_stream.replay.compare import Again, Original, Verdict
from sie_stream.replay.report import Place

GROUP_ROWS = 20_000
SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("model", pa.string()),
        ("work_topic", pa.string()),
        ("work_partition", pa.int32()),
        ("work_offset", pa.int64()),
        ("finished_at", pa.timestamp("ms", tz="UTC")),
        ("outcome", pa.string()),
        ("cause", pa.string()),
        ("distance", pa.float64()),
        ("fields", pa.list_(pa.string())),
        ("before_status", pa.string()),
        ("after_status", pa.string()),
        ("before_version", pa.string()),
        ("after_version", pa.string()),
        ("before_weights", pa.string()),
        ("after_weights", pa.string()),
        ("before_outputs", pa.string()),
        ("after_outputs", pa.string()),
        ("before_error", pa.string()),
        ("after_error", pa.string()),
        ("seed", pa.int64()),
        ("before_batch", pa.int32()),
        ("before_inference_ms", pa.float64()),
        ("after_inference_ms", pa.float64()),
    ]
)


PARTIAL_KEY, TITLE_KEY = "sie.replay.partial", "sie.replay.title"
"""Of the metadata: `true` or `false`, and what was replayed."""


class ParquetFile:
    """Closed in the end, also of a replay that was stopped or failed, so that it can be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = partial_name(path)
        self._writer = pq.ParquetWriter(self._written, SCHEMA, compression="zstd")
        self._columns: list[list[Any]] = [[] for _ in SCHEMA]
        self._title = ""
        self._partial = True

    def ends(self, title: str, *, partial: bool) -> None:
        """The replay is over; without this it counts as partial."""
        self._title, self._partial = title, partial

    def add(self, original: Original, again: Again, place: Place, found: Verdict) -> None:
        row = (
            original.request_id,
            original.model,
            place.topic,
            place.partition,
            place.offset,
            original.finished_at,
            found.outcome,
            found.cause,
            found.distance,
            found.fields,
            original.status,
            again.status,
            original.version,
            again.version,
            original.weights_digest,
            again.weights_digest,
            _text(original.outputs),
            _text(again.outputs),
            original.error_code,
            again.error_code,
            original.seed,
            original.batch_size,
            original.inference_ms,
            again.inference_ms,
        )
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)
        if len(self._columns[0]) >= GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        if self._columns[0]:
            arrays = [pa.array(column, field.type) for column, field in zip(self._columns, SCHEMA, strict=True)]
            self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
            self._columns = [[] for _ in SCHEMA]

    def close(self) -> None:
        self._write()
        self._writer.add_key_value_metadata({PARTIAL_KEY: str(self._partial).lower(), TITLE_KEY: self._title})
        self._writer.close()
        if not self._partial:
            self._written.replace(self._path)


def _text(outputs: bytes | None) -> str | None:
    return None if outputs is None else outputs.decode("utf-8", "replace")
