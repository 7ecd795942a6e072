"""Addresses without memory: a range that pages of an arena are mapped into, and taken out of again.

The arena is one file in memory, so a page is an offset in it, and any pages become neighbours in a range. What is not
mapped cannot be read: a model that is not there ends its process instead of answering nonsense.
"""

from __future__ import annotations

import ctypes
import mmap
import os

PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
MAP_POPULATE = 0x8000
"""Linux: all page tables are made at once, which takes a fifth of the time that faults take."""
MREMAP_MAYMOVE = 1
MREMAP_FIXED = 2
MREMAP_DONTUNMAP = 4
"""Linux 5.13: the source keeps its addresses, so that nobody else's memory lands there meanwhile."""
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


class AddressRange:
    """`size` bytes of addresses, a multiple of the machine's page. Raises OSError when the kernel has none left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = _map(None, size, PROT_NONE, _NOTHING, -1, 0)

    def unmap(self) -> None:
        """The addresses stay reserved."""
        _map(self.address, self.size, PROT_NONE, _NOTHING | MAP_FIXED, -1, 0)

    def release(self) -> None:
        """Nobody may use them any more."""
        _libc.munmap(self.address, self.size)


_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE


def _map(at: int | None, size: int, protection: int, flags: int, file: int, offset: int) -> int:
    address = _libc.mmap(at, size, protection, flags, file, offset)
    if address == FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size} bytes: {os.strerror(number)}")
    return address


def map_file(file: int, size: int) -> int:
    """Where its first `size` bytes are now, shared and writable. Page table entries are made at first use. Raises
    OSError."""
    return _map(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)


def map_file_at(address: int, file: int, offset: int, size: int, flags: int = 0) -> None:
    """In place of what is there; flags: MAP_POPULATE makes all page table entries. Raises OSError."""
    _map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED | flags, file, offset)


def move(source: int, target: int, size: int) -> bool:
    """What is mapped at `source` is mapped at `target` with the page table entries it has, and has none at `source`
    any more. False: the kernel cannot do that here, and what was at the target may be gone."""
    flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
    return bool(_libc.mremap(source, size, size, flags, target) == target)


def bytes_at(address: int, size: int) -> memoryview:
    """Writable, and valid as long as the caller keeps what lies there."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def copy(target: int, source: int, size: int) -> None:
    """Other threads run meanwhile."""
    ctypes.memmove(target, source, size)
