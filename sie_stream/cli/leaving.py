"""Ctrl-C while commands are imported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sie_stream.cli.entry import INTERRUPTED


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
