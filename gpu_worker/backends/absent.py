"""Keeps heavy optional packages out of an engine process that does not use them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Absent(MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = tuple(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(f"{fullname} is kept out of this import", name=fullname)
        return None


@contextmanager
def absent(*packages: str) -> Iterator[None]:
    """While it is open these packages look as if they were not installed; those imported before stay."""
    finder = _Absent(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
