"""Pages of a device arena: which are free. A slot is a table of page numbers, in any order and with gaps.

After the memory of processes (P. J. Denning, Virtual Memory, 1970): pages of one size leave no holes too small to use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

PAGE_BYTES_MIN = 64 * 1024
PAGE_BYTES_MAX = 2 * 1024 * 1024
PAGES_WANTED = 4_096
"""Small pages waste less at the end of a slot, few pages make short tables: the size of a page follows the arena's."""


class PagePool:
    """Pages 0 to count - 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._taken = bytearray(count)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """The free pages with the lowest numbers, ascending. Raises ValueError when there are not so many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} of {self.count} are free")
        pages = tuple(heapq.heappop(self._free) for _ in range(count))
        for page in pages:
            self._taken[page] = 1
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Raises ValueError for a page that is free already, or none of this arena."""
        for page in pages:
            if not 0 <= page < self.count or not self._taken[page]:
                raise ValueError(f"page {page} is not taken")
            self._taken[page] = 0
            heapq.heappush(self._free, page)


def page_bytes_for(arena_bytes: int) -> int:
    """A power of two: about a PAGES_WANTED-th of the arena, within PAGE_BYTES_MIN and PAGE_BYTES_MAX."""
    wanted = max(1, arena_bytes // PAGES_WANTED)
    return min(PAGE_BYTES_MAX, max(PAGE_BYTES_MIN, 1 << (wanted - 1).bit_length()))


def arena_of(size_bytes: int) -> tuple[int, int]:
    """(bytes of the arena, bytes of a page): what is left over after whole pages is not used."""
    page_bytes = page_bytes_for(size_bytes)
    return size_bytes // page_bytes * page_bytes, page_bytes


def pages_of(size: int, page_bytes: int) -> int:
    """How many pages hold `size` bytes."""
    return -(-size // page_bytes)


def runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    """(first page, count) of neighbours in the table that are neighbours in the arena: each is mapped at once."""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and page == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found
