"""Legal holds: topics of which nothing may be removed. Who asked, why and when is on the log; Kafka keeps the records.

The fold only remembers and says so. Whoever asked sets the topic's configuration, and every plan of topics leaves it
as it is (topics/plan.py), so a hold stays in force through restarts and upgrades.
"""

from __future__ import annotations

import re

from scheduler.actors import named
from scheduler.step import VALUE_CHARS_MAX, Step, shortened
from scheduler.worker_state import Hold
from sie_stream.control import HoldTopic, ReleaseTopic
from sie_stream.errors import did_you_mean

HOLDS_MAX = 1_000
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def change_hold(step: Step, record: HoldTopic | ReleaseTopic) -> None:
    if isinstance(record, HoldTopic):
        _hold(step, record)
    else:
        _release(step, record)


def _hold(step: Step, record: HoldTopic) -> None:
    holds = step.state.holds
    problem = _problem(step, record)
    if problem:
        _refuse(step, record.topic, problem)
        return
    found = holds.get(record.topic)
    if found is not None:
        step.decide(
            "topic_held",
            record.topic,
            f"Held already, since {named(found.actor)} asked for it: {found.reason}",
            chosen={"actor": found.actor, "since_ms": found.since_ms},
            facts=(step.fact(found.offset, "HoldTopic"),),
        )
        return
    reason = shortened(record.reason, VALUE_CHARS_MAX)
    actor = shortened(record.actor, VALUE_CHARS_MAX)
    holds[record.topic] = Hold(reason, actor, step.now_ms, step.offset)
    step.decide(
        "topic_held",
        record.topic,
        f"Asked for by {named(actor)}: {reason}",
        chosen={"actor": actor, "since_ms": step.now_ms},
        do_nothing="Its records would be removed when their time is over.",
    )


def _release(step: Step, record: ReleaseTopic) -> None:
    found = step.state.holds.pop(record.topic, None)
    if found is None:
        hint = did_you_mean(record.topic[:VALUE_CHARS_MAX], list(step.state.holds))
        _refuse(step, record.topic, f"It is not held.{hint}")
        return
    actor = shortened(record.actor, VALUE_CHARS_MAX)
    step.decide(
        "topic_released",
        record.topic,
        f"Asked for by {named(actor)}. It was held for: {found.reason}",
        chosen={"actor": actor, "held_by": found.actor, "since_ms": found.since_ms},
        do_nothing="Nothing of it would ever be removed.",
        facts=(step.fact(found.offset, "HoldTopic"),),
        took_ms=step.now_ms - found.since_ms,
    )


def _problem(step: Step, record: HoldTopic) -> str:
    """Why it cannot be held; empty: it can."""
    if not _TOPIC.fullmatch(record.topic):
        return "That is no name of a topic: 1 to 249 letters, digits, dots, underscores and hyphens."
    if not record.reason.strip():
        return "A hold needs a reason."
    if record.topic not in step.state.holds and len(step.state.holds) >= HOLDS_MAX:
        return f"There are {HOLDS_MAX} holds already."
    return ""


def _refuse(step: Step, topic: str, reason: str) -> None:
    step.decide("hold_refused", topic, reason)
