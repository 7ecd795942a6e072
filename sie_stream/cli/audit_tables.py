"""Parquet tables of an audit bundle, written a few thousand rows at a time."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet

from sie_stream.decisions import Decision
from sie_stream.records import DeadLetter, LogRecord, Result, WorkItem

ROWS_AT_ONCE = 5_000
_PLACE = [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("timestamp_ms", pa.int64())]

REQUESTS = pa.schema(
    [
        *_PLACE,
        ("request_id", pa.string()),
        ("model", pa.string()),
        ("size", pa.int64()),
        ("inputs", pa.string()),
        ("parameters", pa.string()),
        ("traceparent", pa.string()),
        ("inputs_url", pa.string()),
        ("inputs_sha256", pa.string()),
    ]
)
WORK = pa.schema(
    [
        *_PLACE,
        ("request_id", pa.string()),
        ("model", pa.string()),
        ("version", pa.string()),
        ("variant", pa.string()),
        ("route_epoch", pa.int64()),
        ("priority", pa.int32()),
        ("source_topic", pa.string()),
        ("source_partition", pa.int32()),
        ("source_offset", pa.int64()),
        ("requested_at_ms", pa.int64()),
        ("received_at_ms", pa.int64()),
        ("routed_at_ms", pa.int64()),
        ("deadline_at_ms", pa.int64()),
        ("seed", pa.int64()),
        ("schema_id", pa.int32()),
    ]
)
_PROVENANCE = [
    *[(name, pa.string()) for name in ("source_topic", "work_topic", "worker", "incarnation", "device")],
    *[(name, pa.string()) for name in ("weights_digest", "engine")],
    *[(name, pa.int64()) for name in ("source_partition", "source_offset", "work_partition", "work_offset")],
    *[(name, pa.int64()) for name in ("route_epoch", "placement_epoch", "seed", "batch_size", "schema_id")],
]
_TIMINGS = [
    (f"{name}_ms", pa.float64()) for name in ("queue", "preprocess", "inference", "first_token", "postprocess", "total")
]
RESULTS = pa.schema(
    [
        *_PLACE,
        ("request_id", pa.string()),
        ("status", pa.string()),
        ("instance", pa.string()),
        ("model", pa.string()),
        ("version", pa.string()),
        ("variant", pa.string()),
        ("outputs", pa.string()),
        ("error_code", pa.string()),
        ("error_message", pa.string()),
        ("error_field", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("finished_at", pa.int64()),
        *_TIMINGS,
        *_PROVENANCE,
    ]
)
DECISIONS = pa.schema(
    [
        *_PLACE,
        ("decision", pa.string()),
        ("kind", pa.string()),
        ("subject", pa.string()),
        ("reason", pa.string()),
        ("cause_offset", pa.int64()),
        ("at_ms", pa.int64()),
        ("record", pa.string()),
    ]
)
DEADLETTERS = pa.schema(
    [
        *_PLACE,
        ("request_id", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("source_topic", pa.string()),
        ("source_partition", pa.int32()),
        ("source_offset", pa.int64()),
        ("original_bytes", pa.int64()),
        ("attempts", pa.int32()),
        ("component", pa.string()),
        ("at_ms", pa.int64()),
    ]
)


class TableFile:
    """One Parquet file. Rows are dictionaries with the columns of the schema; what is absent is null."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pyarrow.parquet.ParquetWriter(path, schema, compression="zstd")
        self._schema = schema
        self._waiting: list[dict[str, Any]] = []
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        self._writer.close()

    def add(self, row: dict[str, Any]) -> None:
        self._waiting.append(row)
        self.rows += 1
        if len(self._waiting) >= ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=self._schema))
            self._waiting = []


def place_row(record: LogRecord) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
    }


def work_row(record: LogRecord, work: WorkItem) -> dict[str, Any]:
    names = WORK.names[len(_PLACE) :]
    return {**place_row(record), **{name: getattr(work, name) for name in names}}


def result_row(record: LogRecord, result: Result, outputs: bytes | None) -> dict[str, Any]:
    plain = ("request_id", "status", "instance", "model", "version", "variant", "finished_at")
    error = result.error
    return {
        **place_row(record),
        **{name: getattr(result, name) for name in plain},
        "outputs": None if outputs is None else outputs.decode(),
        "error_code": None if error is None else error.code,
        "error_message": None if error is None else error.message,
        "error_field": None if error is None else error.field,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        **{f"{name}_ms": took for name, took in msgspec.to_builtins(result.timings_ms).items()},
        **msgspec.to_builtins(result.provenance),
    }


def decision_row(record: LogRecord, decision: Decision) -> dict[str, Any]:
    plain = ("decision", "kind", "subject", "reason", "cause_offset", "at_ms")
    return {
        **place_row(record),
        **{name: getattr(decision, name) for name in plain},
        "record": msgspec.json.encode(decision).decode(),
    }


def letter_row(record: LogRecord, letter: DeadLetter) -> dict[str, Any]:
    """Without the original bytes and their digest: they may hold personal data that nobody could find in them."""
    names = DEADLETTERS.names[len(_PLACE) :]
    return {**place_row(record), **{name: getattr(letter, name) for name in names}}
