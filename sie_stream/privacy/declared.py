"""Where protected values can be: what each version of a model declares. Pure.

A text that looks like a protected value proves nothing: a model may answer with any text. What stands at a place that
the version of the result declares as protected was written by a worker's guard; everything else is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sie_stream.privacy.datakeys import KeyTable
from sie_stream.privacy.forms import Places, may_be_sealed
from sie_stream.privacy.rules import rules_of
from sie_stream.problems import SpecError
from sie_stream.records import Result

Declaration = tuple[str, str, bytes]
"""Model, version, output_schema."""
NO_SCHEMA = b"{}"


def _none() -> Iterable[Declaration]:
    return ()


class DeclaredOutputs:
    """`in_force`: declarations at hand. `history`: all that can be found, asked for once, when a version is not among
    them. A version that was declared more than once protects what any of its declarations does."""

    def __init__(self, in_force: Iterable[Declaration], history: Callable[[], Iterable[Declaration]] = _none) -> None:
        self._places: dict[tuple[str, str], frozenset[str]] = {}
        self._history = history
        self._complete = False
        self._take(in_force)

    def of(self, model: str, version: str) -> Places:
        """Paths of its protected outputs, as Rules has them; None: no declaration of that version is left."""
        if (model, version) not in self._places and not self._complete:
            self._complete = True
            self._take(self._history())
        return self._places.get((model, version))

    def _take(self, declarations: Iterable[Declaration]) -> None:
        for model, version, schema in declarations:
            try:
                rules = rules_of(NO_SCHEMA, schema, "")
            except SpecError:
                continue  # of a later release: as if nobody had declared it
            known = self._places.get((model, version), frozenset())
            self._places[model, version] = known | frozenset(() if rules is None else rules.outputs)


class Shreds:
    """Which results hold values that nobody can read any more."""

    def __init__(self, keys: KeyTable, declared: DeclaredOutputs) -> None:
        self._keys = keys
        self._declared = declared

    def reach(self, result: Result) -> bool:
        if not may_be_sealed(result.outputs):
            return False
        return self._keys.any_shredded(result.outputs, self._declared.of(result.model, result.version))
