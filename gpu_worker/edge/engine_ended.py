"""Why an engine process ended, as the kernel tells it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

EXIT_WAIT_S = 2.0


def cause_of(process: subprocess.Popen[bytes], out_of_memory: Callable[[], bool]) -> str:
    """Its exit code, or the signal, or memory; waits for its end, and brings it about after EXIT_WAIT_S.

    out_of_memory: asked only after SIGKILL.
    """
    try:
        code = process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "closed its socket"
    if code >= 0:
        return f"exit {code}"
    if -code == signal.SIGKILL:
        return "SIGKILL (out of memory)" if out_of_memory() else "SIGKILL"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def oom_kills() -> int:
    """Processes the kernel has killed for memory since boot; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0
