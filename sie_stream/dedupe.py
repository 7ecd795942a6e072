"""Remembers request ids for a while, so that a repeated request is answered once.

An id is kept as an 8-byte digest, so a window of millions costs little; two different ids of one window collide with
a chance of about n^2 / 2^65 (10^-7 for two million), which is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

SLICES = 32
"""The window is forgotten in this many pieces: an id lives for the window and at most 1/32 of it longer."""


_empty = blake2b(digest_size=8)


def digest_of(request_id: str) -> bytes:
    """8-byte blake2b of the id. Copying an empty hash is cheaper than making one."""
    state = _empty.copy()
    state.update(request_id.encode())
    return state.digest()


class DedupeWindow:
    """Digests of the ids seen during the last `window_ms`, at most `entries_max` of them (the oldest go first).

    Time is what callers say it is; it may step back a little, but the newest time seen decides what is forgotten.
    Every operation is O(1) amortised.
    """

    def __init__(self, window_ms: int, entries_max: int) -> None:
        self.evicted_early = 0
        """Ids forgotten before their time, because the cap was reached."""
        self._entries_max = entries_max
        self._slice_ms = max(1, -(-window_ms // SLICES))
        self._kept = -(-window_ms // self._slice_ms)
        self._slice_of: dict[bytes, int] = {}
        self._slices: dict[int, list[bytes]] = {}
        self._newest = 0
        self._oldest = 0
        self._enabled = window_ms > 0

    def __len__(self) -> int:
        return len(self._slice_of)

    def __contains__(self, request_id: str) -> bool:
        return digest_of(request_id) in self._slice_of

    def seen(self, request_id: str, timestamp_ms: int) -> bool:
        """True if the id is remembered; otherwise remembers it as of `timestamp_ms` and returns False."""
        digest = digest_of(request_id)
        number = timestamp_ms // self._slice_ms
        if number > self._newest:
            self._advance(number)
        if digest in self._slice_of:
            return True
        if self._enabled and number >= self._newest - self._kept:
            self._add(digest, number)
        return False

    def remember(self, entries: Iterable[tuple[str, int]]) -> None:
        """Many (request id, time) pairs at once, as read back from the log."""
        slice_ms, slice_of, newest = self._slice_ms, self._slice_of, self._newest
        for request_id, timestamp_ms in entries:
            number = timestamp_ms // slice_ms
            if number > newest:
                self._advance(number)
                newest = number
            digest = digest_of(request_id)
            if digest not in slice_of and self._enabled and number >= newest - self._kept:
                self._add(digest, number)

    def forget(self, request_ids: Iterable[str]) -> None:
        """As if these ids had never been seen: the transaction that took them up was aborted."""
        for request_id in request_ids:
            self._slice_of.pop(digest_of(request_id), None)

    def _add(self, digest: bytes, number: int) -> None:
        if len(self._slice_of) >= self._entries_max:
            self._make_room()
        self._slice_of[digest] = number
        try:
            self._slices[number].append(digest)
        except KeyError:
            self._slices[number] = [digest]
            self._oldest = min(self._oldest, number) if len(self._slices) > 1 else number

    def _advance(self, number: int) -> None:
        self._newest = number
        if self._oldest < number - self._kept:
            for old in sorted(self._slices):
                if old >= number - self._kept:
                    break
                self._drop(old)
            self._oldest = min(self._slices, default=number)

    def _make_room(self) -> None:
        while len(self._slice_of) >= self._entries_max:
            before = len(self._slice_of)
            self._drop(min(self._slices))
            self.evicted_early += before - len(self._slice_of)
        self._oldest = min(self._slices, default=self._newest)

    def _drop(self, number: int) -> None:
        """Forget one slice, except ids that were forgotten and seen again in another one."""
        slice_of = self._slice_of
        for digest in self._slices.pop(number):
            if slice_of.get(digest) == number:
                del slice_of[digest]
