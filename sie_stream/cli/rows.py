"""Reads rows of inputs from files: JSON Lines, CSV, Parquet, or standard input (JSON Lines)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sie_stream.errors import ConfigError

SUFFIXES = (".jsonl", ".ndjson", ".csv", ".parquet")


def count_rows(path: Path) -> int | None:
    """Number of rows when it is cheap to know (for a progress bar), else None."""
    with _told(path):
        if path.suffix == ".parquet":
            return _parquet(path).metadata.num_rows
        lines = sum(chunk.count(b"\n") for chunk in _chunks(path))
        return lines - 1 if path.suffix == ".csv" else lines


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file, one inputs object each. Raises ConfigError naming the file, the line and what is wrong."""
    with _told(path):
        yield from _rows(path)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What keeps the file from being read as a ConfigError: no permission, a folder, other bytes than its name says."""
    if not path.exists():
        raise ConfigError(f"--file {path}: no such file")
    if path.is_dir():
        raise ConfigError(f"--file {path}: a folder; name one file of rows ({', '.join(SUFFIXES)}) in it")
    try:
        yield
    except (OSError, ValueError) as error:  # errors of pyarrow and of decoding are ValueErrors
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise ConfigError(f"--file {path}: cannot be read as {path.suffix or 'rows'}: {reason}") from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix in (".jsonl", ".ndjson"):
        with path.open() as lines:
            yield from parse_lines(lines, str(path))
    elif path.suffix == ".csv":
        import pyarrow.csv  # half a second of CPU that rows on standard input and in JSON do not need

        yield from pyarrow.csv.read_csv(path).to_pylist()
    elif path.suffix == ".parquet":
        for batch in _parquet(path).iter_batches(batch_size=1_000):
            yield from batch.to_pylist()
    else:
        raise ConfigError(f"--file {path}: unknown kind {path.suffix!r}, allowed {', '.join(SUFFIXES)}")


def _parquet(path: Path) -> Any:
    import pyarrow.parquet  # as above

    return pyarrow.parquet.ParquetFile(path)


def parse_lines(lines: Iterable[str], where: str) -> Iterator[dict[str, Any]]:
    """One JSON object per line; empty lines are skipped."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"{where}, line {number}: expected a JSON object with the inputs, got {type(row).__name__}"
            )
        yield row


def stdin_rows() -> Iterator[dict[str, Any]]:
    return parse_lines(sys.stdin, "standard input")
