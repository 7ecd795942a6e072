"""Runs of fields that many records share, remembered by their bytes.

Sound because Avro's encoding of a fixed run of fields is prefix-free: no encoding of a run is the beginning of the
encoding of another, so when a record goes on with the bytes of a known run, that run is what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from schemas.wire import MEMO_MAX, Cursor

FieldsT = TypeVar("FieldsT")

KEY_BYTES = 16
"""A run starts with an `mi-` id, which takes 16 bytes with its length: runs are filed under these."""
RUNS_PER_KEY_MAX = 16
"""More than the variants, epochs, workers and topics of one instance that are in use at a time."""


class RunMemo(Generic[FieldsT]):
    """Finds the run at a place in a record; decodes it only when it was not seen lately. Bounded."""

    def __init__(self, read: Callable[[Cursor], FieldsT]) -> None:
        self._read = read
        self._seen: dict[bytes, list[tuple[bytes, int, FieldsT]]] = {}

    def find(self, value: bytes, at: int) -> tuple[bytes, int, FieldsT]:
        """The run's bytes, how many, and its fields. Raises IndexError or CodecError when there is none at `at`."""
        for run in self._seen.get(value[at : at + KEY_BYTES], ()):
            if value.startswith(run[0], at):
                return run
        return self._learn(value, at)

    def _learn(self, value: bytes, at: int) -> tuple[bytes, int, FieldsT]:
        cursor = Cursor(value, at)
        fields = self._read(cursor)
        run = (value[at : cursor.at], cursor.at - at, fields)
        if len(self._seen) >= MEMO_MAX // 8:
            self._seen.clear()
        runs = self._seen.setdefault(value[at : at + KEY_BYTES], [])
        if len(runs) >= RUNS_PER_KEY_MAX:
            runs.clear()
        runs.insert(0, run)
        return run
