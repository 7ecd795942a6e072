"""A cgroup for each engine: the kernel ends an engine that goes over its memory, with all it started, and counts that.

Needs a cgroup v2 folder that may be written to and passes the memory controller on; no process may be in it itself (the
rule of "no internal processes"). systemd makes one with `Delegate=memory`. Source: Linux, cgroup-v2.rst.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from sie_stream.errors import ConfigError


class EngineGroup:
    """The group of one engine process and its children."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def oom_kills(self) -> int:
        """Processes of the group that the kernel has ended for memory."""
        try:
            text = (self._folder / "memory.events").read_text()
        except OSError:
            return 0
        counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
        return int(counts.get("oom_kill", 0))

    def remove(self) -> bool:
        """Whether it is gone: the kernel keeps a group while a process in it has not quite ended."""
        try:
            self._folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class EngineGroups:
    """Groups for the engines of one worker, below a folder of the operator's."""

    def __init__(self, parent: Path, worker: str, log: structlog.stdlib.BoundLogger) -> None:
        """Raises ConfigError when the folder is no cgroup v2 that hands the memory controller on and may be used."""
        self._parent = parent
        self._worker = worker
        self._log = log
        try:
            controllers = (parent / "cgroup.controllers").read_text().split()
            if "memory" not in controllers:
                raise ConfigError(
                    f"setting engine_cgroup = {str(parent)!r}: it has no memory controller (Delegate=memory)"
                )
            (parent / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            raise ConfigError(f"setting engine_cgroup = {str(parent)!r}: {error.strerror or error}") from error

    def hold(self, pid: int, memory_bytes: int) -> EngineGroup | None:
        """The process in a group of its own, with that limit (0: none). None, and a warning, if the kernel refuses."""
        folder = self._parent / f"{self._worker}-{pid}"
        try:
            folder.mkdir(exist_ok=True)
            if memory_bytes:
                (folder / "memory.max").write_text(str(memory_bytes))
                _write_if_there(folder / "memory.swap.max", "0")
            _write_if_there(folder / "memory.oom.group", "1")
            (folder / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            self._log.warning("engine_without_cgroup", pid=pid, reason=os.strerror(error.errno or 0))
            return None
        return EngineGroup(folder)


def _write_if_there(file: Path, text: str) -> None:
    """Files that kernels without swap, or older ones, do not have."""
    if file.exists():
        file.write_text(text)
