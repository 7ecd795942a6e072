"""When to commit: at once while little is going on, in larger groups under load.

A commit costs the same whether it covers one result or a thousand, so the interval between commits grows with what is
pending: `commit_ms * (1 + pending / GROUP_UNIT)`, at most `GROUP_FACTOR_MAX` times the measured duration of a commit
(which bounds its share of the time to about 1/8) and always between the two settings.

Only a worker that is behind its topics takes longer: every result is late then, what counts is throughput, and each
transaction costs the broker about 14 ms of a core, however little is in it (measured, four partitions).
"""

from __future__ import annotations

from dataclasses import dataclass

from sie_stream.ports import TRANSACTION_REST_MS

GROUP_UNIT = 32
"""Pending results that double the interval."""
GROUP_FACTOR_MAX = 8.0
SMOOTHING = 0.2
HOLD_MS_MAX = 3.0
"""Longest time a result waits for a batch that is about to finish."""
BEHIND_INTERVAL_MS = 200.0
"""Between commits of a worker that is behind."""
BEHIND_FOR_MS = 50.0
"""How long after a full poll a worker counts as behind."""
ABORT_PAUSE_MS = 100.0
"""After an aborted transaction, so that a broker in trouble is not hammered."""


@dataclass(slots=True)
class CommitPacer:
    """Durations and times in milliseconds on the monotonic clock."""

    interval_ms_min: float
    interval_ms_max: float
    commit_ms: float = 5.0
    """Smoothed duration of a commit."""
    started_at: float = float("-inf")
    waiting_since: float | None = None
    """When the oldest result not yet in a commit was finished."""
    rested_at: float = float("-inf")
    """From when on the next may start without disturbing the last."""
    blocked_until: float = float("-inf")
    behind_until: float = float("-inf")

    def fell_behind(self, at_ms: float) -> None:
        """A poll brought as much as it may: there is more in the topics."""
        self.behind_until = at_ms + BEHIND_FOR_MS

    def pending(self, at_ms: float) -> None:
        """Something is there to be committed."""
        if self.waiting_since is None:
            self.waiting_since = at_ms

    def started(self, at_ms: float) -> None:
        self.started_at = at_ms
        self.waiting_since = None

    def succeeded(self, at_ms: float, took_ms: float) -> None:
        self.rested_at = at_ms + TRANSACTION_REST_MS
        self.commit_ms += SMOOTHING * (min(took_ms, 1_000.0) - self.commit_ms)

    def aborted(self, at_ms: float) -> None:
        self.blocked_until = at_ms + ABORT_PAUSE_MS
        self.pending(at_ms)

    def blocked_for_ms(self, at_ms: float) -> float:
        """What is left of the pause after an aborted transaction."""
        return max(0.0, self.blocked_until - at_ms)

    def interval_ms(self, pending: int) -> float:
        """Time between the starts of two commits when `pending` results wait."""
        factor = min(GROUP_FACTOR_MAX, 1.0 + pending / GROUP_UNIT)
        return min(self.interval_ms_max, max(self.interval_ms_min, self.commit_ms * factor))

    def due_in_ms(self, at_ms: float, pending: int, next_finish_ms: float | None) -> float | None:
        """Milliseconds until a commit should start (0: now); None when nothing waits.

        `next_finish_ms`: expected time until a running batch finishes, None when none runs. A result that will be there
        in a moment is worth a short wait, because missing this commit costs it a whole one.
        """
        if self.waiting_since is None:
            return None
        interval = self.interval_ms(pending)
        if at_ms < self.behind_until:
            interval = max(interval, BEHIND_INTERVAL_MS)
        wait = max(max(self.blocked_until, self.started_at + interval, self.rested_at) - at_ms, 0.0)
        if next_finish_ms is not None:
            hold_ms = min(HOLD_MS_MAX, self.commit_ms / 2)
            if next_finish_ms <= hold_ms:
                wait = max(wait, self.waiting_since + hold_ms - at_ms)
        return wait
