"""Where `sie-stream` begins: the rest is imported only once Ctrl-C ends the process quietly."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the process with 130, without a word: there is nothing to clean up yet.

    A library that is interrupted while it is imported may turn that into an ImportError, or print a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only that one may change what signals do
        return
    before = signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Entry point of the console script."""
    with leaving_at_once():
        command_line = resolve_name("sie_stream.cli.main:main")
    command_line()
