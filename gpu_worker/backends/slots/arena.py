"""The memory of a device as one engine process has it: pages that are lent to models and come back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpu_worker.backends.slots.address_space import MAP_POPULATE, map_file, map_file_at, move
from gpu_worker.memory.pages import runs


class Arena:
    """file: descriptor of all its pages. folder: for images that leave host memory. For one thread.

    Every page has a place of its own in this process. From there it goes to a model, and back, with its entries of the
    page table: the kernel makes an entry in 0.3 us and moves it in a fiftieth of that, and copying 4 KiB takes 0.4.
    """

    def __init__(self, file: int, page_bytes: int, folder: Path) -> None:
        self.file = file
        self.page_bytes = page_bytes
        self.folder = folder
        self._home: int | None = None
        self._ready = bytearray()
        """By page: 1 when it has its entries, at home or where it is lent to."""

    @property
    def pages(self) -> int:
        return os.fstat(self.file).st_size // self.page_bytes

    def lend(self, pages: Sequence[int], address: int) -> None:
        """Map the pages in this order. They are at home. Raises OSError; then they are there still."""
        home = self._opened()
        at = address
        lent = 0
        try:
            for first, count in runs(pages):
                size = count * self.page_bytes
                offset = first * self.page_bytes
                if 0 in self._ready[first : first + count] or not move(home + offset, at, size):
                    map_file_at(at, self.file, offset, size, MAP_POPULATE)
                    self._ready[first : first + count] = b"\1" * count
                at += size
                lent += count
        except OSError:
            self.take_back(pages[:lent], address)
            raise

    def take_back(self, pages: Sequence[int], address: int) -> None:
        """The pages that were lent to this address. What is mapped there now is not to be used. Raises OSError."""
        at = address
        for first, count in runs(pages):
            home = self._opened()
            size = count * self.page_bytes
            offset = first * self.page_bytes
            if not move(at, home + offset, size):
                map_file_at(home + offset, self.file, offset, size)
                self._ready[first : first + count] = bytes(count)
            at += size

    def _opened(self) -> int:
        if self._home is None:
            self._home = map_file(self.file, self.pages * self.page_bytes)
            self._ready = bytearray(self.pages)
        return self._home
