"""Clean stop of a process: SIGTERM and SIGINT ask the loop to finish its turn."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from sie_stream.errors import SieError

EXIT_FENCED = 75
"""Exit code of a process that was fenced (EX_TEMPFAIL): its supervisor starts a new incarnation."""
EXIT_CONFIG = 78
"""Wrong settings (EX_CONFIG): another life would end the same way."""
EXIT_FAILED = 1
"""Anything else."""


class Interrupted(SieError):
    """Somebody pressed Ctrl-C, or asked this process to stop."""

    code = "interrupted"


class StopFlag:
    """True once the process was asked to stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @classmethod
    def on_signals(cls) -> StopFlag:
        flag = cls()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, flag._ask)
        return flag

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._event.set()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Raises Interrupted once the process was asked to stop; for waits that can be given up."""
        if self:
            raise Interrupted("interrupted")

    def __bool__(self) -> bool:
        return self._event.is_set()
