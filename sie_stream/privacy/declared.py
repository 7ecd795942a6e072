"""Where protected values can be: what each version of a model declares. Pure.

A text that looks like a protected value proves nothing: a model may answer with any text. What stands at a place that
the version of the result declares as protected was written by a worker's guard; everything else is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from sie_stream.input_schema import compile_schema
from sie_stream.privacy.datakeys import KeyTable
from sie_stream.privacy.forms import Places, may_be_sealed
from sie_stream.problems import SpecError
from sie_stream.records import Result

Declaration = tuple[str, str, bytes]
"""Model, version, output_schema."""
NO_SCHEMA = b"{}"


def _none() -> Iterable[Declaration]:
    return ()


class Marks(NamedTuple):
    """Paths of outputs, as InputValidator has them."""

    protected: frozenset[str] = frozenset()
    """Marked `hash` or `encrypt`: written in a protected form."""
    personal: frozenset[str] = frozenset()
    """Marked `pii` in any way."""


class DeclaredOutputs:
    """`in_force`: declarations at hand. `history`: all that can be found, asked for once, when a version is not among
    them. A version that was declared more than once has the marks of all its declarations."""

    def __init__(self, in_force: Iterable[Declaration], history: Callable[[], Iterable[Declaration]] = _none) -> None:
        self._marks: dict[tuple[str, str], Marks] = {}
        self._history = history
        self._complete = False
        self._take(in_force)

    def of(self, model: str, version: str) -> Marks | None:
        """None: no declaration of that version is left."""
        if (model, version) not in self._marks and not self._complete:
            self._complete = True
            self._take(self._history())
        return self._marks.get((model, version))

    def protected(self, model: str, version: str) -> Places:
        """Where its outputs are protected."""
        marks = self.of(model, version)
        return None if marks is None else marks.protected

    def _take(self, declarations: Iterable[Declaration]) -> None:
        for model, version, schema in declarations:
            try:
                made = _marks_of(schema)
            except (SpecError, msgspec.DecodeError):
                continue  # of a later release: as if nobody had declared it
            known = self._marks.get((model, version), Marks())
            self._marks[model, version] = Marks(known.protected | made.protected, known.personal | made.personal)


def _marks_of(output_schema: bytes) -> Marks:
    if b'"pii"' not in output_schema:
        return Marks()
    found = compile_schema(msgspec.json.decode(output_schema, type=dict[str, object]))
    return Marks(frozenset(found.protected), frozenset(found.pii_fields))


class Shreds:
    """Which results hold values that nobody can read any more."""

    def __init__(self, keys: KeyTable, declared: DeclaredOutputs) -> None:
        self._keys = keys
        self._declared = declared

    def reach(self, result: Result) -> bool:
        if not may_be_sealed(result.outputs):
            return False
        return self._keys.any_shredded(result.outputs, self._declared.protected(result.model, result.version))
