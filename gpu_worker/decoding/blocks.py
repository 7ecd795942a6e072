"""Who holds which block of the paged KV pool, and which blocks can be used again for an equal prefix.

A block keeps the keys and values of a fixed number of consecutive tokens. A full block may be published under the
digest of all tokens up to its end; who starts with the same tokens shares it. Blocks that nobody holds keep their
content until somebody needs the room; the one that was given back first goes first. The scheme is that of vLLM's
automatic prefix caching.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from msgspec import Struct

DIGEST_BYTES = 16


class Activation(Struct, frozen=True):
    """From token `start` of a sequence on, something else decides keys and values as well: `adapter` names it."""

    start: int
    adapter: bytes

    @property
    def name(self) -> bytes:
        """The start is part of it: the same tokens under an adapter that began elsewhere have other keys."""
        return b"%s from %d on" % (self.adapter, self.start)


def chained_digests(
    salt: bytes,
    tokens: Sequence[int],
    block_tokens: int,
    known: Sequence[bytes] = (),
    activation: Activation | None = None,
) -> list[bytes]:
    """One digest per full block of `tokens`, each over everything before it too.

    salt:  names what besides the tokens decides keys and values: weights, dtype, layout.
    known: digests of the first blocks, where they were computed before.
    activation: covered by the digests from the block on that has its first token; those before are as without.
    """
    digests = list(known)
    for number in range(len(digests), len(tokens) // block_tokens):
        part = array("q", tokens[number * block_tokens : (number + 1) * block_tokens]).tobytes()
        before = digests[-1] if digests else salt
        if activation is not None and number == activation.start // block_tokens:
            before = hashlib.blake2b(before + activation.name, digest_size=DIGEST_BYTES).digest()
        digests.append(hashlib.blake2b(before + part, digest_size=DIGEST_BYTES).digest())
    return digests


class BlockPool:
    """Blocks 0..count-1, shared by all models of one arena. Pure bookkeeping: it never sees the memory."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"a pool needs at least one block, not {count}")
        self.count = count
        self._holders = [0] * count
        self._digests: list[bytes | None] = [None] * count
        self._published: dict[bytes, int] = {}
        self._empty = list(range(count - 1, -1, -1))
        """Held by nobody, nothing in them."""
        self._idle: dict[int, None] = {}
        """Held by nobody, published; the one to be overwritten first is first."""

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._empty) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their digest, held or not."""
        return len(self._published)

    def has(self, digest: bytes) -> bool:
        """Whether this block is published."""
        return digest in self._published

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The longest run of published blocks from the start of `digests`; the caller holds them from now on."""
        found: list[int] = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            self._hold(block)
            found.append(block)
        return found

    def take(self, count: int) -> list[int] | None:
        """`count` blocks to write to, held by the caller; None when there are not as many. All or nothing."""
        if count > self.free:
            return None
        taken: list[int] = []
        for _ in range(count):
            block = self._empty.pop() if self._empty else self._evict()
            self._holders[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, digest: bytes) -> None:
        """`block` is full and computed. Of two blocks with the same content the first stays the one that is found."""
        if self._digests[block] is None and digest not in self._published:
            self._digests[block] = digest
            self._published[digest] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Give a sequence's blocks back. Its last block is overwritten first: shorter prefixes serve more requests."""
        for block in reversed(blocks):
            if self._holders[block] <= 0:
                raise ValueError(f"block {block} is given back, but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._digests[block] is None:
                    self._empty.append(block)
                else:
                    self._idle[block] = None

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] += 1

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        digest = self._digests[block]
        assert digest is not None, "idle blocks are published"
        del self._published[digest]
        self._digests[block] = None
        return block
