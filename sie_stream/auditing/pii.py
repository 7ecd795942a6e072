"""Personal data in payloads: fields marked `pii` become keyed hashes, everything else stays. Pure.

HMAC-SHA256 (RFC 2104), so that equal values stay equal under one key and nobody without the key can try values out.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from hashlib import sha256
from typing import Any

import msgspec

PREFIX = "hmac-sha256:"


def hidden(payload: bytes, pii_fields: Collection[str], key: bytes) -> bytes | None:
    """The JSON object with every marked value replaced; None for what is no JSON. Null stays null.

    pii_fields: dotted paths as InputValidator.pii_fields has them, `people[].name` inside arrays.
    """
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.json.encode(_walk(value, "", frozenset(pii_fields), key))


def _walk(value: Any, path: str, pii_fields: frozenset[str], key: bytes) -> Any:
    if isinstance(value, dict):
        found = {}
        for name, inner in value.items():
            here = f"{path}.{name}" if path else name
            found[name] = keyed(inner, key) if here in pii_fields else _walk(inner, here, pii_fields, key)
        return found
    if isinstance(value, list):
        return [_walk(inner, f"{path}[]", pii_fields, key) for inner in value]
    return value


def keyed(value: Any, key: bytes) -> str | None:
    """Hash of one value, whatever its type; two types never hash alike."""
    if value is None:
        return None
    return PREFIX + hmac.new(key, msgspec.json.encode(value, order="deterministic"), sha256).hexdigest()
