"""The records of sie.keys and the table they make: wrapped data keys, and which subjects were shredded. Pure.

    key:SUBJECT:DATA_KEY   WrappedKey: a data key, encrypted with a key-encryption key; a tombstone when it was shredded
    shred:SUBJECT          Shredded: that it happened, when, by whom; kept for ever

A subject may have more than one data key: two workers may meet it at the same time. Without its wrapped keys nothing
that they encrypted can be read again, whoever holds the key ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from sie_stream.privacy.forms import DataKeyId, Places, sealed_in
from sie_stream.records import LogWrite

_KEY, _SHRED = "key", "shred"


class WrappedKey(Struct, frozen=True):
    """A data key that only the holder of `kek` can use."""

    subject: str
    data_key: str
    kek: str
    wrapped: bytes
    """Nonce, encrypted key and tag; the ids above are authenticated with it."""

    @property
    def by(self) -> DataKeyId:
        return DataKeyId(self.subject, self.data_key)


class Shredded(Struct, frozen=True):
    """The data keys of a subject are gone."""

    subject: str
    data_keys: tuple[str, ...]
    at_ms: int
    actor: str
    reason: str = ""


class KeyTable:
    """Fold of sie.keys. `subjects_max`: forget the data keys of those first seen beyond that, for writers, who can
    always make another one."""

    def __init__(self, subjects_max: int | None = None) -> None:
        self.shreds: dict[str, Shredded] = {}
        self.unreadable = 0
        """Records that nobody who writes here would write."""
        self._keys: dict[str, dict[str, WrappedKey]] = {}
        self._subjects_max = subjects_max

    def heed(self, key: bytes | None, value: bytes | None) -> DataKeyId | None:
        """Take in one record, in the order of the topic. Returns the data key that it shreds, if it does."""
        kind, _, rest = (key or b"").decode("utf-8", "replace").partition(":")
        subject, _, data_key = rest.partition(":")
        if kind == _KEY and value is None:
            self._drop(subject, data_key)
            return DataKeyId(subject, data_key)
        try:
            if kind == _KEY:
                self._add(msgspec.json.decode(value or b"", type=WrappedKey))
            elif kind == _SHRED:
                self.shreds[subject] = msgspec.json.decode(value or b"", type=Shredded)
            else:
                self.unreadable += 1
        except msgspec.DecodeError:
            self.unreadable += 1
        return None

    def __iter__(self) -> Iterator[WrappedKey]:
        for keys in self._keys.values():
            yield from keys.values()

    def of(self, subject: str) -> tuple[WrappedKey, ...]:
        """Oldest first."""
        return tuple(self._keys.get(subject, {}).values())

    def find(self, by: DataKeyId) -> WrappedKey | None:
        return self._keys.get(by.subject, {}).get(by.data_key)

    def shredded(self, by: DataKeyId) -> bool:
        """Whether that key is gone on purpose. Neither found nor shredded: it never came here."""
        fact = self.shreds.get(by.subject)
        return fact is not None and by.data_key in fact.data_keys

    def any_shredded(self, payload: bytes | None, places: Places = None) -> bool:
        """Whether a JSON text holds values at `places` that can never be read again."""
        return any(self.shredded(by) for by in sealed_in(payload, places))

    def _add(self, wrapped: WrappedKey) -> None:
        self._keys.setdefault(wrapped.subject, {})[wrapped.data_key] = wrapped
        if self._subjects_max is not None and len(self._keys) > self._subjects_max:
            del self._keys[next(iter(self._keys))]

    def _drop(self, subject: str, data_key: str) -> None:
        keys = self._keys.get(subject, {})
        keys.pop(data_key, None)
        if not keys:
            self._keys.pop(subject, None)


def key_write(topic: str, wrapped: WrappedKey) -> LogWrite:
    return LogWrite(topic, msgspec.json.encode(wrapped), _key_of(wrapped.by))


def shred_writes(topic: str, table: KeyTable, fact: Shredded) -> list[LogWrite]:
    """Tombstones of every data key of the subject, and the fact, which is that of `shredded_now`."""
    writes = [LogWrite(topic, None, _key_of(wrapped.by)) for wrapped in table.of(fact.subject)]
    return [*writes, LogWrite(topic, msgspec.json.encode(fact), f"{_SHRED}:{fact.subject}".encode())]


def shredded_now(table: KeyTable, subject: str, at_ms: int, actor: str, reason: str) -> Shredded:
    """The fact that follows from what the table holds of a subject."""
    earlier = table.shreds.get(subject)
    gone: Iterable[str] = () if earlier is None else earlier.data_keys
    data_keys = dict.fromkeys([*gone, *(wrapped.data_key for wrapped in table.of(subject))])
    return Shredded(subject, tuple(data_keys), at_ms, actor, reason)


def rewrapped(wrapped: WrappedKey, kek: str, content: bytes) -> WrappedKey:
    """The same data key under another key-encryption key."""
    return replace(wrapped, kek=kek, wrapped=content)


def _key_of(by: DataKeyId) -> bytes:
    return f"{_KEY}:{by.subject}:{by.data_key}".encode()
