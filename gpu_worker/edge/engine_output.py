"""Standard output and error of an engine process on their way to the log of its worker, through an OutputGate."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterable
from typing import Protocol

from gpu_worker.output_gate import WINDOW_MS, OutputGate
from sie_stream.ports import Clock

READ_BYTES = 1 << 16


class EngineOutput:
    """A pipe and the thread that reads it. The engine never waits for more than the log itself, and whether it lives
    is seen at its socket, not here.
    """

    def __init__(self, name: str, log_fd: int, clock: Clock) -> None:
        """log_fd: where lines go; stays open as long as the engine has the pipe."""
        self._read_fd, self.write_fd = os.pipe()
        self._gate = OutputGate(name, clock.monotonic_ms())
        self._log_fd = log_fd
        self._clock = clock
        self._thread = threading.Thread(target=self._pass_on, name=f"output of {name}", daemon=True)

    def start(self) -> None:
        """The engine has its end now; ours of it is closed, so that its end is the end of the pipe."""
        os.close(self.write_fd)
        self._thread.start()

    def give_up(self) -> None:
        """There is no engine."""
        os.close(self.write_fd)
        os.close(self._read_fd)

    @property
    def open(self) -> bool:
        """Whether more may come."""
        return self._thread.is_alive()

    def last_lines(self) -> list[str]:
        return [line.decode(errors="replace") for line in self._gate.last_lines]

    def join(self, timeout_s: float) -> None:
        """Until all is read. Whoever the engine started may hold the pipe for longer."""
        self._thread.join(timeout_s)

    def _pass_on(self) -> None:
        ready = select.poll()
        ready.register(self._read_fd, select.POLLIN)
        while True:
            if not ready.poll(WINDOW_MS if self._gate.owes else None):
                self._write(self._gate.read(b"", self._clock.monotonic_ms()))
                continue
            data = os.read(self._read_fd, READ_BYTES)
            if not data:
                break
            self._write(self._gate.read(data, self._clock.monotonic_ms()))
        self._write(self._gate.ended())
        os.close(self._read_fd)

    def _write(self, text: bytes) -> None:
        written = 0
        try:
            while written < len(text):
                written += os.write(self._log_fd, text[written:])
        except OSError:  # a full disk, a closed log: reading goes on all the same, since the engine must not wait
            return


class Joins(Protocol):
    """What can be waited for, for at most so many seconds."""

    def join(self, timeout_s: float) -> None: ...


def join_all(outputs: Iterable[Joins], timeout_s: float, clock: Clock) -> None:
    """Wait for all of them, together no longer than `timeout_s`: a stop must not take that long for each."""
    until_ms = clock.monotonic_ms() + 1_000.0 * timeout_s
    for output in outputs:
        output.join(max(0.0, (until_ms - clock.monotonic_ms()) / 1_000.0))
