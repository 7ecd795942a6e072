"""The bytes of a sequence on its way to another engine: what is known of it, and the pages of its keys and values.

    magic (8) | version (2) | length of state (4) | bytes of a page (4) | pages (4) | digest (16) of all before and
    of the next two parts | state | digests (16 each) of the pages | pages

Numbers are little-endian. Every byte is covered by a digest (SHA-256, cut), so an image that was cut off, altered or
made by another release is recognised before anything of it is used.
"""

from __future__ import annotations

import hashlib
import struct

from msgspec import Struct

from sie_stream.errors import SieError

MAGIC = b"SIEKVSEQ"
VERSION = 1
_PREFIX = struct.Struct("<8sHIII")
DIGEST_BYTES = 16
Bytes = bytes | bytearray | memoryview


class ImageRefused(SieError):
    """An image that cannot be taken over.

    code: image_damaged (cut off or altered), image_version, image_foreign (of other weights, precision or layout),
    image_unfit (this engine has no room for it, or lacks what it needs).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Image(Struct, frozen=True):
    """state: of the sequence, without its keys and values. pages: all of them, one after the other."""

    state: bytes
    page_bytes: int
    pages: memoryview

    @property
    def count(self) -> int:
        return len(self.pages) // self.page_bytes if self.page_bytes else 0


def digest(*parts: Bytes) -> bytes:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.digest()[:DIGEST_BYTES]


def packed_bytes(state_bytes: int, page_bytes: int, count: int) -> int:
    """How long the image of such a state and so many pages is."""
    return _PREFIX.size + DIGEST_BYTES + state_bytes + count * (DIGEST_BYTES + page_bytes)


def packed(state: bytes, page_bytes: int, pages: Bytes) -> bytes:
    """The image. `pages`: all of them, one after the other; empty for a sequence of which nothing was computed."""
    view = memoryview(pages)
    count = len(view) // page_bytes if page_bytes else 0
    if count * page_bytes != len(view):
        raise ValueError(f"{len(view)} bytes are no whole number of pages of {page_bytes} bytes")
    prefix = _PREFIX.pack(MAGIC, VERSION, len(state), page_bytes, count)
    table = b"".join(digest(view[number * page_bytes : (number + 1) * page_bytes]) for number in range(count))
    return b"".join((prefix, digest(prefix, state, table), state, table, view))


def unpacked(image: Bytes) -> Image:
    """Raises ImageRefused for anything but a whole, unaltered image of this version."""
    view = memoryview(image)
    if len(view) < _PREFIX.size + DIGEST_BYTES:
        raise _damaged(f"{len(view)} bytes are less than its first part")
    magic, version, state_bytes, page_bytes, count = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise _damaged(f"it begins with {bytes(magic)!r} instead of {MAGIC!r}")
    if version != VERSION:
        message = f"the image is of version {version}, this engine reads version {VERSION}: both need one release."
        raise ImageRefused("image_version", message)
    state_at = _PREFIX.size + DIGEST_BYTES
    table_at = state_at + state_bytes
    pages_at = table_at + count * DIGEST_BYTES
    wanted = pages_at + count * page_bytes
    if len(view) != wanted:
        raise _damaged(f"it has {len(view)} bytes, and says that it has {wanted}")
    state, table, pages = view[state_at:table_at], view[table_at:pages_at], view[pages_at:]
    if digest(view[: _PREFIX.size], state, table) != view[_PREFIX.size : state_at]:
        raise _damaged("its state does not have the digest it should have")
    for number in range(count):
        page = pages[number * page_bytes : (number + 1) * page_bytes]
        if digest(page) != table[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            raise _damaged(f"page {number} of {count} does not have the digest it should have")
    return Image(bytes(state), page_bytes, pages)


def _damaged(why: str) -> ImageRefused:
    return ImageRefused("image_damaged", f"the image of a sequence is damaged: {why}.")
