"""What hosts know about topics while Kafka cannot say."""

from __future__ import annotations

from processors.turns import LITTLE, PACE_MS, TOPIC_MISSING_MS, Pace, TopicLookup
from sie_stream.errors import Retriable
from sie_stream.ports import TRANSACTION_REST_MS, TopicSpec
from sie_stream.sim.clock import SimClock
from sie_stream.sim.log import SimLog


class Trouble:
    """Fault hook: while on, nothing is known of topics."""

    def __init__(self, log: SimLog) -> None:
        self.on = False
        log.cluster.before = self

    def __call__(self, operation: str, client: str) -> None:
        if self.on and operation == "metadata":
            raise Retriable("no metadata now")


def test_the_last_answer_stands_while_kafka_cannot_say() -> None:
    log = SimLog()
    trouble = Trouble(log)
    log.admin().ensure([TopicSpec("here", 3, {})])
    lookup = TopicLookup(log.reader("g"), log.clock)
    assert lookup("here")
    assert not lookup("gone")
    trouble.on = True
    lookup.forget()
    assert lookup("here")
    assert lookup.partitions("here") == 3
    assert not lookup("gone")


def test_a_topic_never_asked_about_is_believed_to_exist() -> None:
    """Believing the contrary would end good requests for good, only because Kafka did not answer at once."""
    log = SimLog()
    trouble = Trouble(log)
    lookup = TopicLookup(log.reader("g"), log.clock)
    trouble.on = True
    assert lookup("unknown")
    assert lookup.partitions("unknown") == 0
    trouble.on = False
    assert not lookup("unknown")


def test_a_missing_topic_is_found_once_it_exists() -> None:
    log = SimLog()
    lookup = TopicLookup(log.reader("g"), log.clock)
    assert not lookup("new")
    log.admin().ensure([TopicSpec("new", 1, {})])
    assert not lookup("new")
    log.clock.advance(TOPIC_MISSING_MS)
    assert lookup("new")


def test_turns_that_find_little_keep_a_distance() -> None:
    clock = SimClock()
    pace = Pace(clock)
    assert pace.pause_ms() == 0
    pace.began()
    clock.advance(1)
    pace.ended(1)
    assert pace.pause_ms() == PACE_MS - 1


def test_a_turn_rests_after_a_long_transaction_until_its_markers_are_written() -> None:
    clock = SimClock()
    pace = Pace(clock)
    pace.began()
    clock.advance(30)
    pace.ended(LITTLE - 1)
    assert pace.pause_ms() == TRANSACTION_REST_MS
    clock.advance(int(TRANSACTION_REST_MS))
    assert pace.pause_ms() == 0


def test_a_turn_that_finds_nothing_or_much_is_followed_at_once() -> None:
    clock = SimClock()
    pace = Pace(clock)
    pace.began()
    assert pace.pause_ms() == 0
    pace.ended(LITTLE)
    assert pace.pause_ms() == 0
