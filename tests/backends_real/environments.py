"""Where other people's servers are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / ".models" / "smollm2-135m-instruct"
START_TIMEOUT_MS = 900_000
"""A language server compiles and imports for half a minute on a free machine, and for many on a busy one."""


def interpreter(name: str) -> Path:
    """Python of .venv-NAME. Skips the test when there is none."""
    path = ROOT / f".venv-{name}" / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} does not exist: run `make test-backends`, which creates it")
    return path
