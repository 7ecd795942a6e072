"""Protects values, and reads them again: the data keys in use, over a cipher that is given. Pure but for the cipher.

Writing needs no look-up that waits: a subject without a known data key gets a new one, whose record goes into the
transaction of the first values that it encrypts. Either both are there, or neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from sie_stream.errors import SieError
from sie_stream.input_schema.language import Protection
from sie_stream.privacy.datakeys import KeyTable, WrappedKey, key_write
from sie_stream.privacy.forms import DataKeyId, Hashed, Sealed, changed, hashed_text, sealed_text
from sie_stream.privacy.rules import Rules
from sie_stream.records import LogWrite, WorkItem

SUBJECTS_MAX = 100_000
"""Data keys that a writer remembers, wrapped and in use."""


class KeyUnavailable(SieError):
    """A value cannot be read: its data key was shredded, or its key-encryption key is not on the key ring."""

    code = "key_unavailable"

    def __init__(self, message: str, *, shredded: bool) -> None:
        super().__init__(message)
        self.shredded = shredded


class Cipher(Protocol):
    """The key ring and the algorithms. `about`: what a sealed value is bound to; elsewhere it cannot be opened."""

    @property
    def current(self) -> str:
        """Name of the key-encryption key that new data keys are wrapped with."""
        ...

    def subject_of(self, subject: bytes) -> str:
        """Keyed hash of a data subject, the same whatever rotates: 32 hexadecimal digits."""
        ...

    def digest(self, kek: str, value: bytes) -> str:
        """Keyed hash of a value: 64 hexadecimal digits. Raises KeyUnavailable."""
        ...

    def make(self, subject: str) -> tuple[WrappedKey, bytes]:
        """A new data key, wrapped and plain."""
        ...

    def unwrap(self, wrapped: WrappedKey) -> bytes:
        """The plain data key. Raises KeyUnavailable."""
        ...

    def seal(self, data_key: bytes, plain: bytes, about: bytes) -> bytes: ...

    def open(self, data_key: bytes, content: bytes, about: bytes) -> bytes:
        """Raises KeyUnavailable for what was not sealed with that key about that."""
        ...


class Vault:
    """Of a process that writes. `topic`: sie.keys."""

    def __init__(self, cipher: Cipher, topic: str, subjects_max: int = SUBJECTS_MAX) -> None:
        self.cipher = cipher
        self._topic = topic
        self._table = KeyTable(subjects_max)
        self._in_use: dict[str, tuple[DataKeyId, bytes]] = {}
        self._subjects_max = subjects_max

    def heed(self, key: bytes | None, value: bytes | None) -> None:
        """One record of sie.keys, in order. A data key that is shredded is not used for another value."""
        gone = self._table.heed(key, value)
        if gone is not None and self._in_use.get(gone.subject, (None,))[0] == gone:
            del self._in_use[gone.subject]

    def data_key(self, subject: bytes, writes: list[LogWrite]) -> tuple[DataKeyId, bytes]:
        """The key that a subject's values are encrypted with now; the record of a new one is added to `writes`."""
        name = self.cipher.subject_of(subject)
        found = self._in_use.get(name)
        if found is None:
            found = self._known(name)
            if found is None:
                wrapped, plain = self.cipher.make(name)
                writes.append(key_write(self._topic, wrapped))
                found = wrapped.by, plain
            self._in_use[name] = found
            if len(self._in_use) > self._subjects_max:
                del self._in_use[next(iter(self._in_use))]
        return found

    def _known(self, subject: str) -> tuple[DataKeyId, bytes] | None:
        for wrapped in self._table.of(subject):
            try:
                return wrapped.by, self.cipher.unwrap(wrapped)
            except KeyUnavailable:
                continue  # of a key ring that this process does not have
        return None


class Guard:
    """Protects what is written about the requests of one model."""

    def __init__(self, model: str, rules: Rules, vault: Vault) -> None:
        self.rules = rules
        self._model = model
        self._vault = vault

    @property
    def hides_outputs(self) -> bool:
        return bool(self.rules.outputs)

    def outputs(self, work: WorkItem, outputs: bytes, writes: list[LogWrite]) -> bytes | None:
        """The outputs object as it may be written; None for what is no JSON and must not be. New data keys go into
        `writes`."""
        return self._protected(work, outputs, self.rules.outputs, "outputs", writes)

    def work(self, work: WorkItem, writes: list[LogWrite]) -> WorkItem:
        """The work item as a dead letter may keep it: without what its inputs could be read from. Parameters are
        free JSON that no schema marks, such as words to stop at."""
        if not self.rules.inputs:
            return work
        inputs = self._protected(work, work.inputs, self.rules.inputs, "inputs", writes)
        return replace(work, inputs=inputs or b"null", token_ids=None, parameters=None)

    def _protected(
        self, work: WorkItem, payload: bytes, fields: Mapping[str, Protection], side: str, writes: list[LogWrite]
    ) -> bytes | None:
        if not fields:
            return payload
        cipher = self._vault.cipher

        @cache
        def key_in_use() -> tuple[DataKeyId, bytes]:
            """Of the subject, which takes reading the inputs: once, however many values there are."""
            return self._vault.data_key(self.rules.subject_of(work), writes)

        def protect(path: str, value: Any) -> str:
            plain = _plain(value)
            if fields[path] == "hash":
                return hashed_text(Hashed(cipher.current, cipher.digest(cipher.current, plain)))
            by, data_key = key_in_use()
            return sealed_text(Sealed(by, cipher.seal(data_key, plain, bound_to(self._model, side, path, by))))

        return changed(payload, fields, protect)


class Opener:
    """Of a process that reads: the whole table, and the key ring where there is one."""

    def __init__(self, table: KeyTable, cipher: Cipher | None) -> None:
        self.table = table
        self._cipher = cipher
        self._in_use: dict[DataKeyId, bytes] = {}

    def opened(self, model: str, side: str, path: str, sealed: Sealed) -> Any:
        """The plain value. Raises KeyUnavailable, which says whether the subject was shredded."""
        cipher = self._ring()
        data_key = self._in_use.get(sealed.by)
        if data_key is None:
            wrapped = self.table.find(sealed.by)
            if wrapped is None:
                raise _missing(sealed.by, shredded=self.table.shredded(sealed.by))
            data_key = self._in_use[sealed.by] = cipher.unwrap(wrapped)
        return msgspec.json.decode(cipher.open(data_key, sealed.content, bound_to(model, side, path, sealed.by)))

    def hashed_as(self, known: Hashed, value: Any) -> str:
        """A plain value as it would be written beside `known`. Raises KeyUnavailable."""
        return hashed_text(Hashed(known.kek, self._ring().digest(known.kek, _plain(value))))

    def _ring(self) -> Cipher:
        if self._cipher is None:
            raise KeyUnavailable("no key ring here: set pii_keys (SIE_STREAM_PII_KEYS=DIR)", shredded=False)
        return self._cipher


def bound_to(model: str, side: str, path: str, by: DataKeyId) -> bytes:
    """What a sealed value is authenticated with: moved to another field, model or subject it cannot be opened."""
    return "\0".join((model, side, path, by.subject, by.data_key)).encode()


def _plain(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


def _missing(by: DataKeyId, *, shredded: bool) -> KeyUnavailable:
    if shredded:
        return KeyUnavailable(f"the data of subject {by.subject} was shredded", shredded=True)
    return KeyUnavailable(f"data key {by.data_key} of subject {by.subject} is not on sie.keys", shredded=False)
