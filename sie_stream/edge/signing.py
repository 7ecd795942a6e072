"""Ed25519 keys in PEM files, and signatures with them. A key file is made once and never written over."""

from __future__ import annotations

import os
import secrets
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from sie_stream.errors import ConfigError

__all__ = [
    "Ed25519PrivateKey",
    "fingerprint",
    "load_private",
    "load_public",
    "make_key",
    "make_secret",
    "public_pem",
    "read_secret",
    "signed_by",
]

SECRET_BYTES = 32


def make_key(path: Path) -> str:
    """A new private key at `path`, its public key beside it (`.pub`); the fingerprint. Raises ConfigError, also when
    either file is there."""
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = public_pem(private.public_key())
    beside = path.with_name(path.name + ".pub")
    if beside.exists():
        raise ConfigError(f"{beside} exists; a key is never written over. Choose another name.")
    write_new(path, pem)
    write_new(beside, public, mode=0o644)
    return fingerprint(public)


def make_secret(path: Path) -> None:
    """32 random bytes, in hexadecimal: a key for hashes of personal data."""
    write_new(path, secrets.token_hex(SECRET_BYTES).encode() + b"\n")


def write_new(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Raises ConfigError when the file is there, or cannot be made; half a file is not left behind."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; a key is never written over. Choose another name.") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def read_secret(path: Path) -> bytes:
    """Raises ConfigError for anything but 32 bytes in hexadecimal."""
    try:
        key = bytes.fromhex(_read(path).decode("ascii").strip())
    except ValueError as error:
        raise ConfigError(f"{path}: no key for hashes: 64 hexadecimal digits are expected") from error
    if len(key) != SECRET_BYTES:
        raise ConfigError(
            f"{path}: {len(key)} bytes, a key for hashes has {SECRET_BYTES}. `audit keygen --pii` makes one"
        )
    return key


def load_private(path: Path) -> Ed25519PrivateKey:
    """Raises ConfigError."""
    try:
        key = load_pem_private_key(_read(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path}: no unencrypted private key in PEM: {error}. `audit keygen` makes one") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: the key is no Ed25519 key. `audit keygen` makes one")
    return key


def load_public(pem: bytes, name: str) -> Ed25519PublicKey:
    """Raises ConfigError."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{name}: no public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{name}: the key is no Ed25519 key")
    return key


def public_pem(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(pem: bytes) -> str:
    """SHA-256 of the raw 32 bytes of a public key, whatever its PEM looks like."""
    raw = load_public(pem, "public key").public_bytes(Encoding.Raw, PublicFormat.Raw)
    return "sha256:" + sha256(raw).hexdigest()


def signed_by(key: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
