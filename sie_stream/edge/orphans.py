"""No process outlives whoever started it, even when that one is killed without a chance to clean up (Linux)."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def stop_with_parent() -> None:
    """For subprocess.Popen(preexec_fn=...): the kernel sends the child SIGTERM when the starting thread ends.

    Elsewhere than on Linux it does nothing, and a killed parent leaves its children running.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
