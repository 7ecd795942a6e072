"""Names of the files of a replay. A file under the name that was asked for is of a replay that came to its end."""

from __future__ import annotations

from pathlib import Path

PARTIAL = "partial"


def partial_name(path: Path) -> Path:
    """Where a report is while it is not complete, and stays if it never gets so: `day.partial.parquet`."""
    return path.with_name(f"{path.stem}.{PARTIAL}{path.suffix}")
