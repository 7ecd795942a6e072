"""Stands between an engine process and a server it started, so that the server never outlives the engine.

Run as a file, with the standard library only: `python -I -S guard.py PARENT_PID COMMAND...`. Servers start processes of
their own (stubs, engine cores), and the kernel's PR_SET_PDEATHSIG reaches only a direct child. The guard is the
subreaper of all of them: when its parent or the server ends it kills what is left, then ends with the server's code.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_EXECUTE = 127


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children() -> list[int]:
    """Our children, adopted ones too; those of one thread, since the guard has only one."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def kill_all() -> None:
    """Kill children until there are none: what a killed child leaves behind becomes ours."""
    while True:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def end(_number: int, _frame: FrameType | None) -> NoReturn:
    kill_all()
    os._exit(0)


def start(command: list[str], parent: int) -> int:
    """The server as our child, which the kernel kills with us. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the engine ignores them, and a program inherits that
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the engine's limit is not the server's: it has its own
    if os.getppid() == parent:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"cannot start {command[0]}: {error}\n")
            sys.stderr.flush()
    os._exit(CANNOT_EXECUTE)


def main(arguments: list[str]) -> int:
    parent, command = int(arguments[0]), arguments[1:]
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host
    signal.signal(signal.SIGTERM, end)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1  # it ended before we could ask
    server = start(command, os.getpid())
    while True:
        pid, status = os.wait()
        if pid == server:
            kill_all()
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
