"""The memory of a cpu device with a budget: one file in memory, whose pages engine processes map."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from gpu_worker.memory.pages import arena_of
from sie_stream.errors import ConfigError


class DeviceArena:
    """All bytes of the device, taken at once: what is declared is there. folder: for images that go to the disk."""

    def __init__(self, size_bytes: int, folder: Path) -> None:
        """Raises ConfigError when the machine has not so much."""
        self.size_bytes, self.page_bytes = arena_of(size_bytes)
        self.folder = folder
        # Asked for first: the kernel gives a file in memory all there is, and then ends some process for want of more.
        available = psutil.virtual_memory().available
        if self.size_bytes > available:
            raise _too_large(size_bytes, f"{available >> 20} MiB are left")
        self.file = os.memfd_create("device-arena", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.file, 0, self.size_bytes)
        except OSError as error:
            os.close(self.file)
            raise _too_large(size_bytes, str(error)) from error

    def close(self) -> None:
        """Engine processes keep what they have mapped until they end."""
        with suppress(OSError):
            os.close(self.file)


def _too_large(size_bytes: int, why: str) -> ConfigError:
    return ConfigError(
        f"setting device_memory_mb = {size_bytes >> 20}: this machine has not so much memory left ({why}). "
        "Set less, or 0 for no budget."
    )
