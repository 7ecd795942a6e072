"""Objects behind references: the one home of fsspec. Credentials are fsspec's own matter (its configuration, or that
of the store's package), never ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from os.path import dirname, isfile, realpath, samestat
from stat import S_ISREG
from typing import Any
from uuid import uuid4

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from sie_stream.errors import ConfigError, InvalidRequest, SieError
from sie_stream.records import InputsRef
from sie_stream.references import FIELD, check_content, check_reference, place_of, too_large

CHUNK_BYTES = 1024 * 1024
REPLACED_MAX = 5
"""A file may be replaced while it is opened, also by the same bytes, so it is looked at again."""


class StoreUnavailable(SieError):
    """A store cannot be used: the message says why."""

    code = "reference_unavailable"


def read(ref: InputsRef, places: Sequence[str], bytes_max: int) -> bytes:
    """What a reference names, if it may be read and is what was meant. Raises InvalidRequest and nothing else."""
    check_reference(ref, places, bytes_max)
    try:
        with _errors_of(ref.url):
            content = _bytes_of(ref, places, bytes_max)
    except FileNotFoundError as error:
        raise InvalidRequest("reference_missing", f"{ref.url} does not exist.", FIELD) from error
    except StoreUnavailable as error:
        raise InvalidRequest(error.code, str(error), FIELD) from error
    if len(content) > bytes_max:
        raise too_large(ref, bytes_max)
    check_content(ref, content, bytes_max)
    return content


def put(store: str, content: bytes) -> InputsRef:
    """Write an object named by its digest, unless it is there. Raises ConfigError and StoreUnavailable."""
    digest = sha256(content).hexdigest()
    url = f"{place_of(store)}{digest}.json"
    with _errors_of(url):
        files, path = url_to_fs(url, **_options(url))
        if _size(files, path) == len(content):
            return InputsRef(url, digest, len(content))
        if isinstance(files, LocalFileSystem):
            files.makedirs(dirname(path), exist_ok=True)
            part = f"{path}.{uuid4().hex}.part"
            files.pipe_file(part, content)
            files.mv(part, path)  # whole under its name: another client's request may name it already
        else:
            files.pipe_file(path, content)
    return InputsRef(url, digest, len(content))


def describe(url: str, bytes_max: int) -> InputsRef:
    """The reference to an object that is there, read to know its digest. Raises ConfigError and StoreUnavailable."""
    url = place_of(url).removesuffix("/")
    try:
        with _errors_of(url):
            content = _up_to(*url_to_fs(url, **_options(url)), bytes_max + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{url} does not exist") from error
    if len(content) > bytes_max:
        raise ConfigError(f"{url} has more than {bytes_max} bytes (setting reference_bytes_max)")
    return InputsRef(url, sha256(content).hexdigest(), len(content))


def _bytes_of(ref: InputsRef, places: Sequence[str], bytes_max: int) -> bytes:
    """At most one byte more than allowed, whatever the store says of its size."""
    files, path = url_to_fs(ref.url, **_options(ref.url))
    if not isinstance(files, LocalFileSystem):
        return _up_to(files, path, bytes_max + 1)
    for _ in range(REPLACED_MAX):
        real = _inside(ref, path, places)
        if not isfile(real):  # a pipe or a device would be read for ever
            raise InvalidRequest("reference_missing", f"there is no file {ref.url}.", FIELD)
        with open(real, "rb", opener=_without_waiting) as file:
            # Whoever may write there can put a link or a pipe in its place between the look and the opening.
            opened = os.fstat(file.fileno())
            if S_ISREG(opened.st_mode) and samestat(opened, os.lstat(_inside(ref, path, places))):
                return file.read(bytes_max + 1)
    raise StoreUnavailable(f"{ref.url} is replaced again and again")


def _without_waiting(path: str, flags: int) -> int:
    """Opening a pipe would wait for somebody to write to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _up_to(files: fsspec.AbstractFileSystem, path: str, size: int) -> bytes:
    found = bytearray()
    with files.open(path, "rb") as file:
        while len(found) < size and (chunk := file.read(min(CHUNK_BYTES, size - len(found)))):
            assert isinstance(chunk, bytes)
            found += chunk
    return bytes(found)


def _options(url: str) -> dict[str, Any]:
    """A server that redirects could lead to an address that nobody allowed."""
    return {"allow_redirects": False} if url.startswith(("http://", "https://")) else {}


def _inside(ref: InputsRef, path: str, places: Sequence[str]) -> str:
    """Where the file is behind all links; it must be below a place itself. Raises InvalidRequest."""
    real = realpath(path)
    local = [realpath(place.removeprefix("file://")) for place in places if place.startswith("file://")]
    if not any(real.startswith(f"{folder}/") for folder in local):
        raise InvalidRequest("reference_not_allowed", f"{ref.url} is a link that leads out of its place.", FIELD)
    return real


def _size(files: fsspec.AbstractFileSystem, path: str) -> int | None:
    """None: there is no such object, or nobody says."""
    try:
        return files.size(path)
    except FileNotFoundError:
        return None


@contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """Every store has errors of its own: all but FileNotFoundError become StoreUnavailable."""
    try:
        yield
    except (FileNotFoundError, SieError):
        raise
    except Exception as error:
        scheme = url.partition("://")[0]
        if isinstance(error, ImportError):
            why = f"the package for {scheme}:// is not installed here. {error}"
        elif isinstance(error, ValueError) and "Protocol not known" in str(error):
            why = f"fsspec knows no {scheme}://"
        else:
            why = f"{type(error).__name__}: {error}"[:500]
        raise StoreUnavailable(f"{url}: {why}") from error
