"""How a process lets others of this machine go first."""

from __future__ import annotations

import os
import sys
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def lower_priority(by: int) -> None:
    """Let others on this machine go first. Where the kernel weighs sessions against each other (autogroup), a niceness
    within a session says nothing to the others: the process gets a session of its own, and that is lowered.
    """
    if by == 0:
        return
    os.nice(by)
    try:
        if os.getsid(0) != os.getpid():  # who starts us may have given us one already
            os.setsid()
        AUTOGROUP.write_text(str(by))
    except OSError as error:  # a kernel without autogroups, or a process that leads a group already
        sys.stderr.write(f"no session of its own with niceness {by}: {error}\n")
