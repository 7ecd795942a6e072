"""How much of what an engine process writes goes to the log of its worker. Pure.

An engine, or a library in it, may write without end; the log must not fill the disk, and reading must cost the worker
next to nothing. Of each second the first lines are passed on, the others are counted. The last ones are kept: they say
why a process ended.
"""

from __future__ import annotations

from collections import deque

LINES_PER_S = 200
BYTES_PER_S = 64 * 1024
LINE_BYTES = 2_000
LAST_LINES = 20
CUT = b" ..."
WINDOW_MS = 1_000.0


class OutputGate:
    """Of one process. Texts are bytes: nobody knows in which encoding a library writes."""

    def __init__(self, name: str, now_ms: float) -> None:
        """name: of the process, for what is said about it."""
        self._name = name
        self._window_ms = now_ms
        self._lines = 0
        self._bytes = 0
        self._part = b""
        """A line that has not ended, not longer than needed."""
        self._withheld = False
        """Whether any line was left out since the start."""
        self._left_out = 0
        """Lines since they were last told of."""
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)

    @property
    def owes(self) -> bool:
        """Whether lines were left out of which nothing was said yet."""
        return self._left_out > 0

    @property
    def last_lines(self) -> list[bytes]:
        """Whether they were passed on or not, without what a line has beyond LINE_BYTES."""
        return list(self._last)

    def read(self, data: bytes, now_ms: float) -> bytes:
        """What of `data` is to be written. Empty `data`: time has passed."""
        passed = self._renewed(now_ms)
        text = self._part + data
        lines: list[bytes] = []
        start, end = 0, text.rfind(b"\n") + 1
        self._part = text[end : end + LINE_BYTES + 1]
        while start < end and not self._full:
            newline = text.index(b"\n", start)
            lines.append(self._taken(text[start:newline]))
            start = newline + 1
        if start < end:
            self._leave_out(text[start : end - 1])
        return passed + b"".join(lines)

    def ended(self) -> bytes:
        """The rest, now that nothing more will come; if lines were left out, the last of all once more."""
        line = self._taken(self._part) if self._part else b""
        self._part = b""
        passed = line + self._told()
        if not self._withheld:
            return passed
        last = b"".join(b"  " + one + b"\n" for one in self._last)
        return passed + b"%s ended; its last lines were:\n" % self._name.encode() + last

    @property
    def _full(self) -> bool:
        return self._lines >= LINES_PER_S or self._bytes >= BYTES_PER_S

    def _renewed(self, now_ms: float) -> bytes:
        if now_ms - self._window_ms < WINDOW_MS:
            return b""
        self._window_ms, self._lines, self._bytes = now_ms, 0, 0
        return self._told()

    def _told(self) -> bytes:
        count, self._left_out = self._left_out, 0
        return b"%s: %d lines left out\n" % (self._name.encode(), count) if count else b""

    def _taken(self, line: bytes) -> bytes:
        line = shortened(line)
        self._lines += 1
        self._bytes += len(line) + 1
        self._last.append(line)
        return line + b"\n"

    def _leave_out(self, whole: bytes) -> None:
        """Lines are counted, not looked at, but for the last."""
        self._left_out += whole.count(b"\n") + 1
        self._withheld = True
        self._last.extend(shortened(line) for line in whole[-LAST_LINES * LINE_BYTES :].split(b"\n")[-LAST_LINES:])


def shortened(line: bytes) -> bytes:
    return line if len(line) <= LINE_BYTES else line[:LINE_BYTES] + CUT
