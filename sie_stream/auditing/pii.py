"""Personal data in bundles: fields marked `pii` become keyed hashes, everything else stays. Pure.

HMAC-SHA256 (RFC 2104), so that equal values stay equal under one key and nobody without the key can try values out.
A value that is protected already (sie_stream/privacy/forms.py) stays as it was written, where the caller knows that
values are protected there: any text can look like one.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from hashlib import sha256
from typing import Any

import msgspec

from sie_stream.privacy.forms import changed, read_form

PREFIX = "hmac-sha256:"


def hidden(payload: bytes, pii_fields: Collection[str], key: bytes, protected: Collection[str] = ()) -> bytes | None:
    """The JSON object with every marked value replaced; None for what is no JSON. Null stays null.

    pii_fields: dotted paths as InputValidator.pii_fields has them, `people[].name` inside arrays.
    protected: those of them that are written in a protected form, unless the value is older than its protection.
    """

    def hide(path: str, value: Any) -> Any:
        return value if path in protected and read_form(value) is not None else keyed(value, key)

    return changed(payload, pii_fields, hide)


def keyed(value: Any, key: bytes) -> str | None:
    """Hash of one value, whatever its type; two types never hash alike."""
    if value is None:
        return None
    return PREFIX + hmac.new(key, msgspec.json.encode(value, order="deterministic"), sha256).hexdigest()
