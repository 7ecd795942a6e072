"""A lock between processes of one machine; the kernel lets go of it when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock at `path`. `say` is told when another process has it: that this one waits, for what and for whom.

    `what`: what its holder does, as in "building models into .models". Raises OSError where the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: {_holder(path)} is {what}; this goes on when it is done (lock {path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def to_stderr(text: str) -> None:
    """A line at once, in a pipe as well, and never among what a command prints for scripts."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _holder(path: Path) -> str:
    """Earlier releases did not write who holds it, and a new holder may not have written it yet."""
    pid = path.read_text().strip()
    return f"another process (pid {pid})" if pid.isdecimal() else "another process"
