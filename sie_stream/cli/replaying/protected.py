"""Replay of models whose fields are hashed or encrypted: compared by what they say, told without saying it.

Encrypted values of the log are opened in memory and compared with the new ones, within the tolerance too; hashed ones
are compared as hashes under the same key. What leaves the replay (report, files, topic) holds hashes under a key that
ends with it, so equal values still look equal there and nobody can lead one back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cached_property
from secrets import token_bytes
from typing import Any

from msgspec.structs import replace

from sie_stream.auditing.pii import hidden
from sie_stream.control import ModelLaunch
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.privacy.forms import (
    Hashed,
    Places,
    Sealed,
    changed,
    changed_forms,
    hashed_text,
    may_be_sealed,
    sealed_in,
)
from sie_stream.privacy.rules import WITHHELD, Rules, rules_of
from sie_stream.privacy.vault import KeyUnavailable, Opener
from sie_stream.replay.compare import Again, Cause, Original, Verdict, verdict

SECRET_BYTES = 32
_STEP = re.compile(r"\.|\[")
"""Where a path of a difference, such as `people[0].name`, goes one level down."""
_INDEX = re.compile(r"\[\d+\]")


class Protection:
    """`load`: reads the data keys, called when the first protected value is met. `declared`: where such values are."""

    def __init__(self, load: Callable[[], Opener], declared: DeclaredOutputs) -> None:
        self._load = load
        self._declared = declared
        self._secret = token_bytes(SECRET_BYTES)
        self._rules: dict[tuple[bytes, bytes], Rules | None] = {}

    @cached_property
    def _opener(self) -> Opener:
        return self._load()

    def barrier(self, original: Original) -> tuple[Cause, str] | None:
        """Why an answer cannot be compared: its subject was shredded, or the keys are not here."""
        if not self._protected(original):
            return None
        if self._opener.table.any_shredded(original.outputs, self._places(original)):
            return "shredded", "the data of its subject was shredded: nobody can read it"
        try:
            self._opened(original, {})
            for kek in self._keks(original).values():
                self._opener.hashed_as(Hashed(kek, ""), None)
        except KeyUnavailable as error:
            return "no_key", str(error)
        return None

    def judged(
        self, original: Original, again: Again, launch: ModelLaunch, tolerance: float
    ) -> tuple[Verdict, Original, Again]:
        """The verdict, and both answers as they may be told. Behind `barrier`."""
        rules = self._rules_of(launch)
        if rules is None and not self._protected(original):
            return verdict(original, again, tolerance), original, again
        fields: dict[str, str] = {} if rules is None else dict(rules.outputs)
        plain = self._opened(original, fields)
        compared = self._as_hashed(again, fields, self._keks(original))
        found = _cut_to(fields, verdict(plain, compared, tolerance))
        message = WITHHELD if again.error_message and not again.schema_refused else again.error_message
        told = replace(compared, outputs=self._hidden(compared.outputs, fields), error_message=message)
        return found, replace(plain, outputs=self._hidden(plain.outputs, fields)), told

    def concerns(self, launch: ModelLaunch) -> bool:
        """Whether any field of this version is protected."""
        return self._rules_of(launch) is not None

    def _rules_of(self, launch: ModelLaunch) -> Rules | None:
        key = bytes(launch.input_schema), bytes(launch.output_schema)
        if key not in self._rules:
            self._rules[key] = rules_of(*key, launch.privacy_subject)
        return self._rules[key]

    def _opened(self, original: Original, fields: dict[str, str]) -> Original:
        """With encrypted values in plain; the places of protected values go into `fields`. Raises KeyUnavailable."""

        def plain(path: str, form: Sealed | Hashed) -> Any:
            if isinstance(form, Hashed):
                fields[path] = "hash"
                return hashed_text(form)
            fields[path] = "encrypt"
            return self._opener.opened(original.model, "outputs", path, form)

        return (
            original
            if original.outputs is None
            else replace(original, outputs=changed_forms(original.outputs, plain, self._places(original)))
        )

    def _places(self, original: Original) -> Places:
        return self._declared.protected(original.model, original.version)

    def _protected(self, original: Original) -> bool:
        outputs = original.outputs
        if outputs is None or not (may_be_sealed(outputs) or b'"hmac-sha256:' in outputs):
            return False
        return bool(sealed_in(outputs, self._places(original)) or self._keks(original))

    def _keks(self, original: Original) -> dict[str, str]:
        """Keys that hashes of this answer were made with, by the path of the field. A worker may learn of a rotation
        between two fields."""
        found: dict[str, str] = {}

        def note(path: str, form: Sealed | Hashed) -> None:
            if isinstance(form, Hashed):
                found.setdefault(path, form.kek)

        changed_forms(original.outputs or b"null", note, self._places(original))
        return found

    def _as_hashed(self, again: Again, fields: dict[str, str], keks: dict[str, str]) -> Again:
        """New values of hashed fields, as they would have been written then."""
        paths = [path for path, how in fields.items() if how == "hash"]
        if again.outputs is None or not paths or not keks:
            return again
        newest = max(keks.values())

        def hashed(path: str, value: Any) -> str:
            return self._opener.hashed_as(Hashed(keks.get(path, newest), ""), value)

        return replace(again, outputs=changed(again.outputs, paths, hashed))

    def _hidden(self, outputs: bytes | None, fields: dict[str, str]) -> bytes | None:
        return None if outputs is None else hidden(outputs, fields, self._secret)


def _cut_to(fields: Collection[str], found: Verdict) -> Verdict:
    """What lies below a protected field may be named by what it holds: differences are told of the field itself."""
    told = dict.fromkeys(_cut(fields, path) for path in found.fields)
    return replace(found, fields=tuple(told))


def _cut(fields: Collection[str], path: str) -> str:
    for end in (*(match.start() for match in _STEP.finditer(path)), len(path)):
        if _INDEX.sub("[]", path[:end]) in fields:
            return path[:end]
    return path
