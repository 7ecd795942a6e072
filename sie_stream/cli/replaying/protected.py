"""Replay of models whose fields are hashed or encrypted: compared by what they say, told without saying it.

Encrypted values of the log are opened in memory and compared with the new ones, within the tolerance too; hashed ones
are compared as hashes under the same key. What leaves the replay (report, files, topic) holds hashes under a key that
ends with it, so equal values still look equal there and nobody can lead one back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from secrets import token_bytes
from typing import Any

from msgspec.structs import replace

from sie_stream.auditing.pii import hidden
from sie_stream.control import ModelLaunch
from sie_stream.privacy.forms import Hashed, Sealed, changed, changed_forms, hashed_text, sealed_in
from sie_stream.privacy.rules import WITHHELD, Rules, rules_of
from sie_stream.privacy.vault import KeyUnavailable, Opener
from sie_stream.replay.compare import Again, Cause, Original, Verdict, verdict

SECRET_BYTES = 32


class Protection:
    """`load`: reads the data keys, called when the first protected value is met."""

    def __init__(self, load: Callable[[], Opener]) -> None:
        self._load = load
        self._secret = token_bytes(SECRET_BYTES)
        self._rules: dict[tuple[bytes, bytes], Rules | None] = {}

    @cached_property
    def _opener(self) -> Opener:
        return self._load()

    def barrier(self, original: Original) -> tuple[Cause, str] | None:
        """Why an answer cannot be compared: its subject was shredded, or the keys are not here."""
        if not _protected(original.outputs):
            return None
        if any(self._opener.table.shredded(by) for by in sealed_in(original.outputs)):
            return "shredded", "the data of its subject was shredded: nobody can read it"
        try:
            self._opened(original, {})
            for kek in _keks(original.outputs):
                self._opener.hashed_as(Hashed(kek, ""), None)
        except KeyUnavailable as error:
            return "no_key", str(error)
        return None

    def judged(
        self, original: Original, again: Again, launch: ModelLaunch, tolerance: float
    ) -> tuple[Verdict, Original, Again]:
        """The verdict, and both answers as they may be told. Behind `barrier`."""
        rules = self._rules_of(launch)
        if rules is None and not _protected(original.outputs):
            return verdict(original, again, tolerance), original, again
        fields: dict[str, str] = {} if rules is None else dict(rules.outputs)
        plain = self._opened(original, fields)
        compared = self._as_hashed(again, fields, _keks(original.outputs))
        found = verdict(plain, compared, tolerance)
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
            original if original.outputs is None else replace(original, outputs=changed_forms(original.outputs, plain))
        )

    def _as_hashed(self, again: Again, fields: dict[str, str], keks: list[str]) -> Again:
        """New values of hashed fields, as they would have been written then."""
        paths = [path for path, how in fields.items() if how == "hash"]
        if again.outputs is None or not paths or not keks:
            return again
        known = Hashed(keks[0], "")
        outputs = changed(again.outputs, paths, lambda _, value: self._opener.hashed_as(known, value))
        return replace(again, outputs=outputs)

    def _hidden(self, outputs: bytes | None, fields: dict[str, str]) -> bytes | None:
        return None if outputs is None else hidden(outputs, fields, self._secret)


def _protected(outputs: bytes | None) -> bool:
    return outputs is not None and (b'"aes-256-gcm:' in outputs or b'"hmac-sha256:' in outputs)


def _keks(outputs: bytes | None) -> list[str]:
    """Keys that hashes of this answer were made with."""
    found: dict[str, None] = {}

    def note(_path: str, form: Sealed | Hashed) -> Any:
        if isinstance(form, Hashed):
            found.setdefault(form.kek)

    changed_forms(outputs or b"null", note)
    return list(found)
