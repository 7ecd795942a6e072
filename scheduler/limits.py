"""Numbers of the scheduler's policy that nobody has needed to set yet. All times are log time."""

from __future__ import annotations

NEVER_MS = 1 << 62
"""A time that does not come."""

DELETE_LINGER_MS = 5_000
"""A deleted model goes on as before this long, because ingress may still hold its route. What is in its topic then is
worked off to the end, however long that takes; only then is it dropped. Not waited for is what an ingress adds that
stood still for longer, with a transaction open all the while.
"""

DELETE_GIVE_UP_MS = 600_000
"""A deleted model that had a place, and has no replica because no device has room or its topic cannot be widened, is
dropped after this long, with what is left in its topic. One whose replicas were given up after failures, or that no
device can hold and none ever held, is dropped at once.
"""

REPLACE_AFTER_MS = 10_000
"""A model that still serves waits this long for a lost worker to come back before it gets a replica elsewhere."""

PLAN_CALM_MS = 5_000
"""Moves that make room are looked for at most this often, and not sooner after a plan has ended."""

PLAN_CALM_MS_MAX = 300_000
"""After plans that were given up: the calm doubles with each up to this."""

PLAN_MS_MAX = 600_000
"""A plan that takes longer is given up."""

RETRIES_MAX = 3
"""A replica that failed is placed again this often."""

RETRY_BACKOFF_MS = 1_000
"""Before the first retry; doubles with each."""

LOAD_GRACE_MS = 10_000
"""A worker reports its own load timeouts; one that says nothing for this much longer is not believed any more."""

TOPIC_TIMEOUT_MS = 15_000
"""EnsureTopic is emitted again when nothing came back for this long."""

TOPIC_BACKOFF_MS = 1_000
TOPIC_BACKOFF_MAX_MS = 30_000
"""After TopicFailed; doubles with each failure up to the maximum."""

RECONNECT_MS = 10_000
"""Longest extra time that workers get to be heard again after the log stood still."""

ENGINE_DEATHS_MAX = 3
ENGINE_DEATHS_MS = 60_000
"""An engine that ended so often within this time, for nothing that is to blame, gives its replicas up."""

ENGINE_AWAY_MS = 10_000
"""A version whose engines load again for longer than this is bypassed, and its keys come back when an engine has stood
for as long: what killed it may be among the requests that it runs first.
"""

UNSTABLE_CALM_MS = 600_000
"""A model that left an unstable engine leaves no other one within this time: it may be the model itself."""

FORGET_WORKER_MS = 600_000
"""A worker that ended this long ago is dropped from the state."""


def plan_calm_ms(failures: int) -> int:
    """Calm after `failures` plans in a row were given up."""
    return min(PLAN_CALM_MS << min(failures, 16), PLAN_CALM_MS_MAX)


def retry_backoff_ms(failures: int) -> int:
    """Wait after the `failures`-th failure of a replica, counted from 1."""
    return RETRY_BACKOFF_MS << (failures - 1)


def topic_backoff_ms(failures: int) -> int:
    """Wait after the `failures`-th TopicFailed in a row, counted from 1."""
    return min(TOPIC_BACKOFF_MS << min(failures - 1, 16), TOPIC_BACKOFF_MAX_MS)
