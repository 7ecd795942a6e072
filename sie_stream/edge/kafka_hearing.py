"""Notices a reader that hears nothing although there is something to hear.

librdkafka 2.16 can lose a lone broker for good when that stood still for longer than its session and came back: no
record arrives, no error is told, and calls may never return (its re-bootstrap keeps asking brokers that it has already
given up; mended upstream after 2.16, librdkafka #5600). Seen in 3 of 180 readers within nine such moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sie_stream.errors import LogError

ASK_AFTER_S = 10.0
"""So long may a reader hear nothing before it asks whether there is anything."""
ASK_AGAIN_S = 5.0
"""What is there at one look should have come by the next."""
LOOK_EVERY_S = 0.5
"""How often a question under way is looked at."""
STUCK_S = 30.0
"""A question without an answer for so long never gets one: longer than its own time limit."""
UNANSWERED_S = 60.0
"""Silence and questions that fail: after so long a new client cannot be worse."""
ENOUGH_LOOKS = 2


class Hearing:
    """Of one reader. `heard` whenever something came, `deaf` whenever nothing did. Questions have their own thread."""

    def __init__(self, unread: Callable[[], bool]) -> None:
        """`unread`: whether the log holds what the reader has not got. May block, may raise LogError."""
        self._unread = unread
        self.heard()

    def heard(self) -> None:
        self._heard_at = time.monotonic()
        self._due_at = self._heard_at + ASK_AFTER_S
        self._question: _Question | None = None
        self._looks = 0

    def deaf(self) -> bool:
        """Whether only a new client helps. Never waits."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        if self._question is None:
            self._question = _Question(self._unread, now)
        self._due_at = now + LOOK_EVERY_S
        if not self._question.ended:
            return now - self._question.asked_at > STUCK_S
        unread, self._question = self._question.unread, None
        if unread is False:
            self.heard()
            return False
        self._due_at = now + ASK_AGAIN_S
        if unread is None:
            return now - self._heard_at > UNANSWERED_S
        self._looks += 1
        return self._looks >= ENOUGH_LOOKS


class _Question:
    """One look at the ends of the partitions, beside the owner's loop."""

    def __init__(self, unread: Callable[[], bool], asked_at: float) -> None:
        self.asked_at = asked_at
        self.ended = False
        self.unread: bool | None = None
        """None: no answer, as while the broker is away."""
        threading.Thread(target=self._ask, args=(unread,), name="hearing", daemon=True).start()

    def _ask(self, unread: Callable[[], bool]) -> None:
        try:
            self.unread = unread()
        except (LogError, RuntimeError):  # RuntimeError: the client is closed
            pass
        finally:
            self.ended = True
