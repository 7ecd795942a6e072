"""The key ring: a folder of secret files, and the ciphers over it. Implements privacy.vault.Cipher.

    index.key      keyed hashes of data subjects; it never rotates, or nobody would find a subject again
    kek-0001.key   key-encryption keys; the highest number is the one in use, older ones still read

Each file holds 32 random bytes in hexadecimal, readable by its owner only. From every key-encryption key two keys are
derived (HKDF-SHA256, RFC 5869): one wraps data keys, the other hashes values.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from sie_stream.edge.signing import make_secret, read_secret
from sie_stream.errors import ConfigError
from sie_stream.privacy.datakeys import WrappedKey, rewrapped
from sie_stream.privacy.vault import KeyUnavailable

INDEX = "index.key"
KEKS = "kek-[0-9][0-9][0-9][0-9].key"
KEY_BYTES = 32
NONCE_BYTES = 12
SUBJECT_DIGITS = 32
DATA_KEY_BYTES_OF_ID = 8


class Keyring:
    """Read when it is made, and again when a key is named that was not there: a newer key is the current one then.

    `tell`: hears why a file that came later is not used, once for each reason. The keys that are in use stay in use.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] | None = None) -> None:
        """Raises ConfigError for a folder that is no key ring, or that others may read."""
        self._folder = folder
        self._tell = tell
        self._refused: dict[str, str] = {}
        """Why each file that came later is not used."""
        self._index = _secret(folder / INDEX)
        self._keks = {path.stem: _kek_of(path) for path in self._files()}
        if not self._keks:
            raise ConfigError(f"{folder}: no key-encryption key (kek-0001.key). `sie-stream keys create` makes one")

    @property
    def keks(self) -> tuple[str, ...]:
        """Oldest first."""
        return tuple(sorted(self._keks))

    @property
    def current(self) -> str:
        return self.keks[-1]

    def subject_of(self, subject: bytes) -> str:
        return hmac.new(self._index, subject, sha256).hexdigest()[:SUBJECT_DIGITS]

    def digest(self, kek: str, value: bytes) -> str:
        return hmac.new(self._kek(kek)[1], value, sha256).hexdigest()

    def make(self, subject: str) -> tuple[WrappedKey, bytes]:
        plain = secrets.token_bytes(KEY_BYTES)
        wrapped = WrappedKey(subject, secrets.token_hex(DATA_KEY_BYTES_OF_ID), self.current, b"")
        return self._wrapped(wrapped, self.current, plain), plain

    def unwrap(self, wrapped: WrappedKey) -> bytes:
        return self.open(self._kek(wrapped.kek)[0], wrapped.wrapped, _about(wrapped))

    def rewrap(self, wrapped: WrappedKey) -> WrappedKey:
        """The same data key under the current key-encryption key. Raises KeyUnavailable."""
        return self._wrapped(wrapped, self.current, self.unwrap(wrapped))

    def seal(self, data_key: bytes, plain: bytes, about: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + AESGCM(data_key).encrypt(nonce, plain, about)

    def open(self, data_key: bytes, content: bytes, about: bytes) -> bytes:
        try:
            return AESGCM(data_key).decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], about)
        except (InvalidTag, ValueError) as error:
            message = "a protected value is not what was written: another key, place or content"
            raise KeyUnavailable(message, shredded=False) from error

    def _wrapped(self, wrapped: WrappedKey, kek: str, plain: bytes) -> WrappedKey:
        return rewrapped(wrapped, kek, self.seal(self._kek(kek)[0], plain, _about(wrapped)))

    def _kek(self, name: str) -> tuple[bytes, bytes]:
        """(for wrapping, for hashing)."""
        if name not in self._keks:
            self._read_newer()
        found = self._keks.get(name)
        if found is None:
            missing = f"is not in {self._folder}; there are: {', '.join(self.keks)}"
            message = f"key-encryption key {name!r} {self._refused.get(name) or missing}"
            raise KeyUnavailable(message, shredded=False)
        return found

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(KEKS))

    def _read_newer(self) -> None:
        """What came since. A file that cannot be used is no reason to stop: somebody may be copying it just now."""
        for path in self._files():
            name = path.stem
            if name in self._keks:
                continue
            try:
                self._keks[name] = _kek_of(path)
            except ConfigError as error:
                why = f"is not used: {error}"
                if self._tell is not None and self._refused.get(name) != why:
                    self._tell(f"key-encryption key {name!r} {why}; {self.current} stays in use")
                self._refused[name] = why


def create_keyring(folder: Path) -> Keyring:
    """A new folder with a first key. Raises ConfigError when a key ring is there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from error
    for path in (folder / INDEX, *folder.glob(KEKS)):
        if path.exists():  # before anything is made beside it
            raise ConfigError(f"{path} exists; a key is never written over. Choose another folder.")
    make_secret(folder / INDEX)
    make_secret(folder / _kek_file(1))
    return Keyring(folder)


def add_kek(folder: Path) -> Keyring:
    """A further key-encryption key, which is the current one from now on."""
    number = int(Keyring(folder).current.removeprefix("kek-")) + 1
    make_secret(folder / _kek_file(number))
    return Keyring(folder)


def _kek_file(number: int) -> str:
    return f"kek-{number:04d}.key"


def _secret(path: Path) -> bytes:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. `sie-stream keys create` makes a key ring") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: mode {mode:04o} lets others read it; allowed is 0600: chmod 600 {path}")
    return read_secret(path)


def _kek_of(path: Path) -> tuple[bytes, bytes]:
    """(for wrapping, for hashing). Raises ConfigError for a file that is no key, or that others may read."""
    secret = _secret(path)
    return _derived(secret, b"sie-stream wrap"), _derived(secret, b"sie-stream hash")


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDFExpand(SHA256(), KEY_BYTES, purpose).derive(secret)


def _about(wrapped: WrappedKey) -> bytes:
    return f"{wrapped.subject}:{wrapped.data_key}".encode()
