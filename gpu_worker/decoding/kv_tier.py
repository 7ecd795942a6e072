"""Full KV blocks in memory that outlives the engine: a ring of entries, each with its digest.

    two headers (64 each), written by turns: magic | version | offset and number of the oldest entry | digest of these
    entry: header (64): magic | kind | number | length | key | digest of the content | digest of these; content; padding

A writer may be killed at any instruction. The oldest entries are given up before their place is written to, and the
header of an entry is written after its content, so whoever opens the ring next finds a run of whole entries with
consecutive numbers, from the oldest on. Contents are compared with their digests when they are read. What has lain
there longest is overwritten first.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from gpu_worker.decoding.image import DIGEST_BYTES, Bytes, digest

MAGIC = b"SIEKVRNG"
VERSION = 1
ALIGNMENT = 64
_HEAD = struct.Struct("<8sIQQ")
_ENTRY = struct.Struct("<4sBQQ16s16s")
ENTRY_MAGIC = b"SIKE"
KINDS = ("block", "state", "filler")
Kind = Literal["block", "state", "filler"]
"""block: keys and values of a full block, by the digest of all tokens up to its end. state: where a request stands, by
a digest that names the request; the newest counts. filler: the end of the ring that the next entry did not fit into."""
NO_KEY = bytes(DIGEST_BYTES)
SIZE_MIN = 64 * ALIGNMENT
BEGIN = 2 * ALIGNMENT
"""Of the first entry."""


class _Entry(NamedTuple):
    kind: Kind
    key: bytes
    start: int
    """Of its header."""
    length: int
    number: int
    content_digest: bytes

    @property
    def content_at(self) -> int:
        return self.start + ALIGNMENT

    @property
    def end(self) -> int:
        return _aligned(self.content_at + self.length)


class KvTier:
    """The ring in `memory`, of which one process at a time is the writer. Opens what is there, or makes it empty."""

    def __init__(self, memory: memoryview) -> None:
        if len(memory) < SIZE_MIN:
            raise ValueError(f"a ring needs at least {SIZE_MIN} bytes, not {len(memory)}")
        self._memory = memory[: len(memory) // ALIGNMENT * ALIGNMENT]
        self._entries: deque[_Entry] = deque()
        """Oldest first."""
        self._found: dict[tuple[Kind, bytes], _Entry] = {}
        self._at = BEGIN
        self._number = 1
        self._turn = 0
        self._open()

    @property
    def count(self) -> int:
        """Entries that can be found."""
        return len(self._found)

    def holds(self, kind: Kind, key: bytes) -> bool:
        return (kind, key) in self._found

    def put(self, kind: Kind, key: bytes, content: Bytes) -> bool:
        """False for what is longer than half of the ring. An equal key is overwritten: the newest content counts."""
        room = _aligned(ALIGNMENT + len(content))
        if 2 * room > len(self._memory) - BEGIN:
            return False
        if self._at + room > len(self._memory):
            self._fill()
        self._give_up(self._at + room)
        entry = _Entry(kind, key, self._at, len(content), self._number, digest(content))
        self._memory[entry.content_at : entry.content_at + entry.length] = content
        self._append(entry)
        return True

    def find(self, kind: Kind, key: bytes) -> memoryview | None:
        """The content, compared with its digest, until the next put; a damaged one is forgotten."""
        entry = self._found.get((kind, key))
        if entry is None:
            return None
        content = self._memory[entry.content_at : entry.content_at + entry.length]
        if digest(content) == entry.content_digest:
            return content
        del self._found[kind, key]
        return None

    def run_of(self, digests: Sequence[bytes]) -> int:
        """How many of the first of these blocks are here, undamaged."""
        return next((n for n, one in enumerate(digests) if self.find("block", one) is None), len(digests))

    def block(self, key: bytes) -> memoryview:
        """One that run_of has just compared. Raises KeyError."""
        entry = self._found["block", key]
        return self._memory[entry.content_at : entry.content_at + entry.length]

    # ------------------------------------------------------------ the ring

    def _open(self) -> None:
        """Takes over the run of whole entries from the oldest on."""
        heads = [(*head, turn) for turn in (0, 1) if (head := self._head(turn)) is not None]
        if not heads:
            self._set_oldest(BEGIN, 1)
            return
        number, at, turn = max(heads)
        self._turn = 1 - turn
        first = at
        while (entry := self._entry_at(at, number)) is not None:
            self._remember(entry)
            at = entry.end if entry.end < len(self._memory) else BEGIN
            number += 1
            if at == first:
                break
        self._at, self._number = at, number

    def _head(self, turn: int) -> tuple[int, int] | None:
        """Number and offset of the oldest entry by one of the headers; None: it is none."""
        start = turn * ALIGNMENT
        head = self._memory[start : start + _HEAD.size]
        if digest(head) != self._memory[start + _HEAD.size : start + _HEAD.size + DIGEST_BYTES]:
            return None
        magic, version, at, number = _HEAD.unpack(head)
        if (magic, version) != (MAGIC, VERSION) or not BEGIN <= at <= len(self._memory):
            return None
        return number, at

    def _entry_at(self, at: int, number: int) -> _Entry | None:
        if at + ALIGNMENT > len(self._memory):
            return None
        head = self._memory[at : at + _ENTRY.size]
        magic, kind, found, length, key, content_digest = _ENTRY.unpack(head)
        if digest(head)[: ALIGNMENT - _ENTRY.size] != self._memory[at + _ENTRY.size : at + ALIGNMENT]:
            return None
        if magic != ENTRY_MAGIC or found != number or at + ALIGNMENT + length > len(self._memory):
            return None
        return _Entry(KINDS[kind], key, at, length, number, content_digest)

    def _fill(self) -> None:
        """Give the rest of the ring to a filler, and go on at the beginning."""
        left = len(self._memory) - self._at
        if left:
            self._give_up(len(self._memory))
            self._append(_Entry("filler", NO_KEY, self._at, left - ALIGNMENT, self._number, NO_KEY))
        self._at = BEGIN

    def _give_up(self, end: int) -> None:
        """Forget entries that begin in what is to be written, before it is written."""
        given_up = 0
        while self._entries and self._at <= self._entries[0].start < end:
            old = self._entries.popleft()
            given_up += 1
            if self._found.get((old.kind, old.key)) is old:
                del self._found[old.kind, old.key]
        if given_up:
            oldest = self._entries[0] if self._entries else None
            self._set_oldest(self._at if oldest is None else oldest.start, oldest.number if oldest else self._number)

    def _append(self, entry: _Entry) -> None:
        kind = KINDS.index(entry.kind)
        head = _ENTRY.pack(ENTRY_MAGIC, kind, entry.number, entry.length, entry.key, entry.content_digest)
        self._memory[entry.start + _ENTRY.size : entry.start + ALIGNMENT] = digest(head)[: ALIGNMENT - _ENTRY.size]
        self._memory[entry.start : entry.start + _ENTRY.size] = head
        self._remember(entry)
        self._at, self._number = entry.end, self._number + 1

    def _remember(self, entry: _Entry) -> None:
        self._entries.append(entry)
        if entry.kind != "filler":
            self._found[entry.kind, entry.key] = entry

    def _set_oldest(self, at: int, number: int) -> None:
        head = _HEAD.pack(MAGIC, VERSION, at, number)
        start = self._turn * ALIGNMENT
        self._memory[start : start + _HEAD.size + DIGEST_BYTES] = head + digest(head)
        self._turn = 1 - self._turn


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
