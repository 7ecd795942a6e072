"""The weights of one model as one block of bytes, in host memory or in a file without a name.

The file is made once, when the image leaves host memory for the first time. It has no name, so it ends with the process
that wrote it, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gpu_worker.backends.slots.address_space import bytes_at, copy
from gpu_worker.backends.slots.weights import Weight

ALIGNMENT = 64
"""Vector instructions and oneDNN want whole cache lines."""
CHUNK_BYTES = 16 * 1024 * 1024


def offsets_of(weights: Sequence[Weight]) -> tuple[list[int], int]:
    """(where each begins, size of all)"""
    offsets: list[int] = []
    end = 0
    for weight in weights:
        offsets.append(end)
        end = -(-(end + weight.size_bytes) // ALIGNMENT) * ALIGNMENT
    return offsets, end


class Image:
    """`folder`: where its file goes, if it needs one."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._folder = folder
        self._host: mmap.mmap | None = _host_memory(size)
        self._file: int | None = None

    @property
    def tier(self) -> Literal["host", "disk"]:
        return "disk" if self._host is None else "host"

    def take(self, weight: Weight, offset: int) -> None:
        """Copy the bytes of one weight into host memory."""
        assert self._host is not None, "weights are taken before the image moves"
        copy(_address(self._host) + offset, weight.address, weight.size_bytes)

    def write_to(self, address: int) -> None:
        """All of it, from whatever tier it is in. Raises OSError."""
        if self._host is not None:
            copy(address, _address(self._host), self.size)
        else:
            self._read_file(bytes_at(address, self.size))

    def to_disk(self) -> None:
        """Raises OSError; then it is still in host memory."""
        if self._host is None:
            return
        if self._file is None:
            self._file = self._written(self._host)
        self._host.close()
        self._host = None

    def to_host(self) -> None:
        """Raises OSError; then it is still on the disk."""
        if self._host is not None:
            return
        memory = _host_memory(self.size)
        with memoryview(memory) as view:
            self._read_file(view)
        self._host = memory

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _written(self, memory: mmap.mmap) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file, memoryview(memory) as view:
            done = 0
            while done < self.size:
                done += os.pwrite(file.fileno(), view[done : done + CHUNK_BYTES], done)
            return os.dup(file.fileno())

    def _read_file(self, target: memoryview) -> None:
        assert self._file is not None, "an image that is not in host memory has a file"
        done = 0
        while done < self.size:
            count = os.preadv(self._file, [target[done : done + CHUNK_BYTES]], done)
            if not count:
                raise OSError(f"the image file ends after {done} of {self.size} bytes")
            done += count


def _host_memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
