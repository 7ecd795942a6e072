"""Life of one worker incarnation, as the scheduler sees it: a table, and nothing but the table.

    joined --> LIVE --silent, exited--> LOST --fenced--> FENCED
                 |                        |
                 +-------- left ----------+--> LEFT

LOST is not an end: the incarnation may still be able to commit, so it keeps its partitions until it is FENCED (Kafka
refuses it from then on) or LEFT (it says that it will never commit again). There is no way back to LIVE: a late
heartbeat changes nothing, the process has to join again as a new incarnation.

A new incarnation joins after `init_transactions` succeeded on the worker's transactional id, and that fences its
predecessor; so the join of one is the end of the other, without a FenceWorker.
"""

from __future__ import annotations

import enum
from typing import Literal

WorkerStatus = Literal["live", "lost", "fenced", "left"]


class WorkerEvent(enum.Enum):
    """What can happen to an incarnation after it joined."""

    HEARD = "heard"
    SILENT = "silent"
    EXITED = "exited"
    FENCED = "fenced"
    LEFT = "left"


LIFECYCLE: dict[tuple[WorkerStatus, WorkerEvent], WorkerStatus] = {
    ("live", WorkerEvent.HEARD): "live",
    ("live", WorkerEvent.SILENT): "lost",
    ("live", WorkerEvent.EXITED): "lost",
    ("live", WorkerEvent.FENCED): "fenced",
    ("live", WorkerEvent.LEFT): "left",
    ("lost", WorkerEvent.HEARD): "lost",
    ("lost", WorkerEvent.EXITED): "lost",
    ("lost", WorkerEvent.FENCED): "fenced",
    ("lost", WorkerEvent.LEFT): "left",
    ("fenced", WorkerEvent.HEARD): "fenced",
    ("fenced", WorkerEvent.EXITED): "fenced",
    ("fenced", WorkerEvent.FENCED): "fenced",
    ("fenced", WorkerEvent.LEFT): "fenced",
    ("left", WorkerEvent.HEARD): "left",
    ("left", WorkerEvent.EXITED): "left",
    ("left", WorkerEvent.FENCED): "left",
    ("left", WorkerEvent.LEFT): "left",
}
"""A pair that is not listed cannot happen: only live workers are watched for silence."""


def next_status(status: WorkerStatus, event: WorkerEvent) -> WorkerStatus:
    """The status after `event`. Raises KeyError for a pair outside the table, which is a bug here."""
    return LIFECYCLE[status, event]


def may_commit(status: WorkerStatus) -> bool:
    """Whether a transaction of this incarnation could still succeed, so that its partitions are not free."""
    return status in ("live", "lost")


def silence_ends_ms(last_heard_ms: int, lost_after_ms: int) -> int:
    """The first moment at which a worker last heard at `last_heard_ms` counts as silent."""
    return last_heard_ms + lost_after_ms + 1
