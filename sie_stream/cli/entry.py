"""Where `sie-stream` begins: everything is imported only once Ctrl-C ends the process quietly.

This module itself imports what an interpreter that has just started holds already: `signal`, `contextlib` or `pkgutil`
took long enough to be met by a Ctrl-C, and showed a traceback. What comes before is Python's own start.
"""

import os
from importlib import import_module

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main() -> None:
    """Entry point of the console script."""
    quick = import_module("_signal")  # without the enums of `signal`, which take longer than all else here
    before = quick.signal(quick.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    command_line = import_module("sie_stream.cli.main").main
    quick.signal(quick.SIGINT, before)
    command_line()
