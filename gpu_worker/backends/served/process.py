"""A server started by an engine process: its ports, its log, its readiness, its end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_worker.backends.base import ModelRefused
from sie_stream.ports import Clock

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.05
END_WAIT_S = 10.0
LOG_TAIL_BYTES = 4_000
LOG_TAIL_LINES = 12
LOG_LINE_CHARS = 160


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now. Somebody may take one before the server does: it then says so and ends."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


class ServerProcess:
    """One running server. Its standard output and error go to `log`, a file that stays after a failure."""

    def __init__(self, name: str, command: Sequence[str], environment: Sequence[str] = ()) -> None:
        self.name = name
        self.log = Path(tempfile.mkdtemp(prefix=f"sie-{name}-")) / "server.log"
        self._command = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command]
        self._environment = {**os.environ, **dict(pair.split("=", 1) for pair in environment)}
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        # The kernel ends a child with the thread that started it, so that thread stays until the server has ended.
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watcher", daemon=True)
        self._watcher.start()
        self._started.wait()

    def _watch(self) -> None:
        try:
            with self.log.open("wb") as log:
                process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
                )
        except OSError as error:
            self._failure = error
            self._started.set()
            return
        self._process = process
        self._started.set()
        process.wait()

    @property
    def pid(self) -> int:
        """Of the guard, whose child the server is."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._watcher.is_alive()

    def wait_ready(self, ready: Callable[[], bool], timeout_ms: int, clock: Clock) -> None:
        """Returns when `ready` says so. Raises ModelRefused when the server ends or the time does; it is stopped then.

        Codes: server_ended, server_start_timeout. Both messages hold the end of the log and say where it is.
        """
        until = clock.monotonic_ms() + timeout_ms
        while not ready():
            if not self.alive:
                raise ModelRefused("server_ended", f"{self.name} ended before it was ready. {self.last_words()}")
            if clock.monotonic_ms() > until:
                self.stop()
                message = f"{self.name} was not ready after {timeout_ms} ms. {self.last_words()}"
                raise ModelRefused("server_start_timeout", f"{message} Raise backend.config.start_timeout_ms?")
            self._watcher.join(POLL_S)

    def last_words(self) -> str:
        """The end of the log, and where all of it is."""
        if self._failure is not None:
            return str(self._failure)
        if not self.log.exists():
            return "It was stopped for good, and its log is gone."
        with self.log.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - LOG_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return f"Its log ({self.log}) ends with:\n" + "\n".join(line[:LOG_LINE_CHARS].rstrip() for line in lines)

    def stop(self) -> None:
        """End the server and all it started, and wait for that."""
        if self._process is not None and self.alive:
            self._process.terminate()
            self._watcher.join(END_WAIT_S)

    def close(self) -> None:
        """Stop it for good, log and all."""
        self.stop()
        shutil.rmtree(self.log.parent, ignore_errors=True)
