"""Inputs that a request names instead of carrying them: which places may be read, and whether it is what was meant.

Who may write to sie.requests could otherwise have any file or address read that ingress can reach. So an operator names
the places (settings.reference_prefixes), and without them none is read. Pure; edge/reference_store.py reads.

Codes: bad_reference, reference_not_allowed, reference_missing, reference_too_large, reference_mismatch,
reference_timeout, reference_unavailable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256

from sie_stream.errors import ConfigError, InvalidRequest
from sie_stream.records import InputsRef

FIELD = "inputs_ref"
URL_CHARS_MAX = 1_024
NOT_TO_BE_HAD = frozenset(
    (
        "reference_missing",
        "reference_mismatch",
        "reference_not_allowed",
        "reference_timeout",
        "reference_unavailable",
    )
)
"""The bytes that were meant cannot be read, any more or by this process."""

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\x00-\x20\x7f?#\\]+")
"""No query and no fragment: what follows them can choose another object, or hold a secret that results repeat."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HIDDEN = re.compile(r"%(2e|2f|5c|25|00|3b|c0|c1)", re.IGNORECASE)
"""A dot, a slash, a backslash, a percent sign, a zero or a semicolon, written so that only the server sees it; c0 and
c1 begin a longer form of any of them."""


def parse_prefixes(text: str) -> tuple[str, ...]:
    """Places from `s3://bucket/inputs,/data/inputs`; each ends with a slash. Raises ConfigError."""
    return tuple(place_of(part.strip()) for part in text.split(",") if part.strip())


def place_of(text: str) -> str:
    """One place as the URL of a folder; an absolute path is a local one. Raises ConfigError."""
    url = f"file://{text}" if text.startswith("/") else text
    folder = url if url.endswith("/") else url + "/"
    problem = _wrong_with(folder.removesuffix("/"))
    if problem:
        raise ConfigError(f"{text!r} {problem}. A place is a folder such as /data/inputs or s3://bucket/inputs")
    return folder


def check_reference(ref: InputsRef, prefixes: Sequence[str], size_max: int) -> None:
    """Everything that can be said without reading. Raises InvalidRequest."""
    problem = _wrong_with(ref.url)
    if problem:
        raise InvalidRequest("bad_reference", f"the URL {problem}.", f"{FIELD}.url")
    if not _DIGEST.fullmatch(ref.sha256):
        raise InvalidRequest("bad_reference", "sha256 must be 64 hexadecimal digits in lower case.", f"{FIELD}.sha256")
    if ref.size is not None and ref.size < 0:
        raise InvalidRequest("bad_reference", f"size = {ref.size}: must be a number of bytes.", f"{FIELD}.size")
    if not any(ref.url.startswith(prefix) for prefix in prefixes):
        raise InvalidRequest("reference_not_allowed", _not_allowed(ref, prefixes), f"{FIELD}.url")
    if ref.size is not None and ref.size > size_max:
        raise too_large(ref, size_max)


def check_content(ref: InputsRef, content: bytes, size_max: int) -> None:
    """Whether these are the bytes that were meant. Raises InvalidRequest."""
    if len(content) > size_max:
        raise too_large(ref, size_max)
    if ref.size is not None and len(content) != ref.size:
        raise InvalidRequest(
            "reference_mismatch", f"{ref.url} has {len(content)} bytes, the request says {ref.size}.", f"{FIELD}.size"
        )
    found = sha256(content).hexdigest()
    if found != ref.sha256:
        raise InvalidRequest(
            "reference_mismatch",
            f"{ref.url} has the SHA-256 {found}, the request says {ref.sha256}: it was changed after it was named.",
            f"{FIELD}.sha256",
        )


def too_large(ref: InputsRef, size_max: int) -> InvalidRequest:
    return InvalidRequest(
        "reference_too_large",
        f"{ref.url} has more than {size_max} bytes (setting reference_bytes_max).",
        f"{FIELD}.size" if ref.size is not None else FIELD,
    )


def how_to_refer(prefixes: Sequence[str]) -> str:
    """What to do with inputs that are too large for a record, for error messages."""
    if not prefixes:
        return "let an operator name places for large inputs (setting reference_prefixes) and send a reference"
    return f"put the inputs below {' or '.join(prefixes)} and send inputs_ref (url, sha256) instead of inputs"


def _wrong_with(url: str) -> str:
    """Empty for a plain URL. Whatever could lead out of the folder that it seems to be in is refused."""
    shown = f"{url[:URL_CHARS_MAX]!r}"
    if len(url) > URL_CHARS_MAX:
        return f"has more than {URL_CHARS_MAX} characters"
    if not _URL.fullmatch(url) or not url.isprintable():  # results repeat it, and people read them on terminals
        return f"{shown} must be like s3://bucket/name or file:///folder/name, without ? # \\ and spaces"
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    if "::" in url or "@" in parts[0]:
        return f"{shown} must be one plain URL, without :: and without a user"
    if scheme == "file":
        if parts[0]:
            return f"{shown} must have three slashes: file:///folder/name"
        parts = parts[1:]
    if not all(parts) or any(_leads_up(part) for part in parts) or _HIDDEN.search(rest):
        return f"{shown} must have no empty part and none that is . or .. (also not written with %)"
    return ""


def _leads_up(part: str) -> bool:
    """Servers drop what follows a semicolon before they look at the dots."""
    return part.partition(";")[0] in (".", "..")


def _not_allowed(ref: InputsRef, prefixes: Sequence[str]) -> str:
    if not prefixes:
        return f"{ref.url} may not be read: no place is allowed. An operator sets reference_prefixes."
    return f"{ref.url} may not be read. Allowed is what is below {', '.join(prefixes)}"
