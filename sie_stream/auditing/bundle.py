"""The manifest of an audit bundle: what is in it, and whether what is there is what was signed. Pure.

A bundle is a folder. `manifest.json` names every other file with its size and SHA-256; `manifest.sig` is the Ed25519
signature (RFC 8032) of the manifest's bytes, in hexadecimal; `public_key.pem` is the key it can be checked with.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from sie_stream.errors import ConfigError

MANIFEST, SIGNATURE, PUBLIC_KEY = "manifest.json", "manifest.sig", "public_key.pem"
UNLISTED = (MANIFEST, SIGNATURE, PUBLIC_KEY)
FORMAT = 1


class FileEntry(Struct, frozen=True):
    """One file. `rows` of a Parquet file; -1: another kind."""

    sha256: str
    size: int
    rows: int = -1


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was exported, when, by which release, from which stretch of which topics."""

    format: int
    made_at_ms: int
    release: str
    cluster_id: str
    topic_prefix: str
    from_ms: int
    """0: from the oldest request there was."""
    to_ms: int
    spans: dict[str, tuple[int, int]]
    """{topic/partition: (first offset, one past the last)}."""
    models: tuple[str, ...]
    """Versions whose declarations are here: those declared when it was made, and all that answered."""
    pii: dict[str, tuple[str, ...]]
    """{model: fields that are keyed hashes in this bundle, or encrypted as their results were written}."""
    pii_key_kept: bool
    """False: the key was made for this bundle and thrown away, so no hash can be led back or compared with others."""
    left_out: dict[str, int]
    """Payloads that are not here, and results whose declaration is not, counted by why."""
    signer: str
    """SHA-256 of the public key."""
    files: dict[str, FileEntry]
    shredded: int = 0
    """Results in it whose encrypted values nobody could read when it was made: their subjects had been shredded."""


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes that are signed."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def read_manifest(text: bytes) -> Manifest:
    """Raises ConfigError for what is no manifest, or one of a later format."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{MANIFEST}: {error}") from error
    if manifest.format != FORMAT:
        raise ConfigError(f"{MANIFEST}: format = {manifest.format}; this release reads {FORMAT}")
    return manifest


def differences(manifest: Manifest, found: Mapping[str, FileEntry]) -> tuple[str, ...]:
    """What is not as signed, by file name: changed, missing, or nobody's. `found`: the files that are there."""
    problems = []
    for name in sorted({*manifest.files, *found}):
        wanted, there = manifest.files.get(name), found.get(name)
        if wanted is None:
            problems.append(f"{name}: not in the manifest")
        elif there is None:
            problems.append(f"{name}: missing")
        elif there.size != wanted.size:
            problems.append(f"{name}: {there.size} bytes, signed were {wanted.size}")
        elif there.sha256 != wanted.sha256:
            problems.append(f"{name}: changed (SHA-256 {there.sha256}, signed was {wanted.sha256})")
    return tuple(problems)
