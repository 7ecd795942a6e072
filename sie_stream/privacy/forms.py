"""How a protected value is written in place of the plain one, and how such texts are found again. Pure.

    hmac-sha256:KEK:DIGEST                a keyed hash (RFC 2104); equal values stay equal under one key
    aes-256-gcm:SUBJECT:DATA_KEY:SEALED   encrypted (NIST SP 800-38D) with a data key of that subject; SEALED is
                                          nonce (12 bytes), ciphertext and tag (16 bytes) in URL-safe Base64

Such a text proves nothing by itself, since a model may answer with any text: it is a protected value where the version
that answered declares one (sie_stream/privacy/declared.py).

KEK names a key of the key ring, SUBJECT is a keyed hash of the data subject, DATA_KEY names one of its keys.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

_HASHED = re.compile(r"hmac-sha256:([a-z0-9-]{1,64}):([0-9a-f]{64})")
_SEALED = re.compile(r"aes-256-gcm:([0-9a-f]{32}):([0-9a-f]{16}):([A-Za-z0-9_-]{38,})")
Places = Collection[str] | None
"""Dotted paths, `people[].name` inside arrays, that may hold protected values; None: anywhere, as nobody knows."""


class DataKeyId(NamedTuple):
    subject: str
    """32 hexadecimal digits."""
    data_key: str
    """16 hexadecimal digits."""


class Sealed(NamedTuple):
    """An encrypted value."""

    by: DataKeyId
    content: bytes


class Hashed(NamedTuple):
    kek: str
    digest: str


def sealed_text(value: Sealed) -> str:
    content = base64.urlsafe_b64encode(value.content).rstrip(b"=").decode()
    return f"aes-256-gcm:{value.by.subject}:{value.by.data_key}:{content}"


def hashed_text(value: Hashed) -> str:
    return f"hmac-sha256:{value.kek}:{value.digest}"


def read_form(value: object) -> Sealed | Hashed | None:
    """None: a plain value."""
    if not isinstance(value, str):
        return None
    if found := _SEALED.fullmatch(value):
        text = found.group(3)
        try:
            content = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            return None
        return Sealed(DataKeyId(found.group(1), found.group(2)), content)
    if found := _HASHED.fullmatch(value):
        return Hashed(found.group(1), found.group(2))
    return None


def may_be_sealed(payload: bytes | None) -> bool:
    """False: no encrypted value is in that JSON text. No parsing, so it costs little."""
    return payload is not None and b'"aes-256-gcm:' in payload


def sealed_in(payload: bytes | None, places: Places = None) -> frozenset[DataKeyId]:
    """The data keys that a JSON text needs to be read whole."""
    if payload is None or not may_be_sealed(payload):
        return frozenset()
    found: set[DataKeyId] = set()

    def note(_path: str, form: Sealed | Hashed) -> None:
        if isinstance(form, Sealed):
            found.add(form.by)

    changed_forms(payload, note, places)
    return frozenset(found)


Change = Callable[[str, Any], Any]
"""(path, value) -> what is to stand there."""


def changed(payload: bytes, paths: Collection[str], change: Change) -> bytes | None:
    """The JSON text with every value at one of `paths` changed; None for what is no JSON. Null stays null.

    paths: dotted, as InputValidator.pii_fields has them, `people[].name` inside arrays.
    """
    wanted = frozenset(paths)
    return _rewritten(payload, lambda path, value: change(path, value) if path in wanted else _DESCEND)


def changed_forms(payload: bytes, change: Callable[[str, Sealed | Hashed], Any], places: Places = None) -> bytes | None:
    """The same for every value at `places` that is written in a protected form."""

    def form(path: str, value: Any) -> Any:
        found = read_form(value) if places is None or path in places else None
        return _DESCEND if found is None else change(path, found)

    return _rewritten(payload, form)


_DESCEND = object()


def _rewritten(payload: bytes, change: Change) -> bytes | None:
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.json.encode(_walk(value, "", change))


def _walk(value: Any, path: str, change: Change) -> Any:
    if isinstance(value, list):
        return [_member(inner, f"{path}[]", change) for inner in value]
    if isinstance(value, dict):
        return dict(_members(value, path, change))
    return value


def _members(value: dict[str, Any], path: str, change: Change) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        yield name, _member(inner, f"{path}.{name}" if path else name, change)


def _member(value: Any, path: str, change: Change) -> Any:
    if value is None:
        return None
    found = change(path, value)
    return _walk(value, path, change) if found is _DESCEND else found
