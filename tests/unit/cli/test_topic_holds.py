"""`sie-stream topics holds`: the log and Kafka held against each other, and which topics can be held."""

from __future__ import annotations

import pytest

from scheduler.worker_state import Hold
from sie_stream.cli.topic_holds import declared, hold_rows
from sie_stream.errors import ConfigError
from sie_stream.ports import TopicSpec
from sie_stream.settings import Settings
from topics.plan import HELD_CONFIG

HOLD = Hold("case 17", "ann", 1_760_000_000_000, 5)


def test_a_row_says_whether_the_hold_is_in_force() -> None:
    topics = [
        TopicSpec("sie.results", 1, HELD_CONFIG | {"segment.ms": "5"}),
        TopicSpec("sie.requests", 1, {"retention.ms": "-1"}),
        TopicSpec("sie.outputs", 1, dict(HELD_CONFIG)),
        TopicSpec("sie.tokens", 1, {}),
    ]
    rows = hold_rows({"sie.results": HOLD, "sie.requests": HOLD}, topics)
    assert {row["topic"]: row["in_force"] for row in rows} == {
        "sie.outputs": "yes, but nobody asked for it on the log",
        "sie.requests": "no: hold it again",
        "sie.results": "yes",
    }
    assert [row["reason"] for row in rows] == ["", "case 17", "case 17"]


def test_only_topics_of_the_installation_can_be_held() -> None:
    settings = Settings(topic_prefix="x.")
    assert declared(settings, "x.results").config["cleanup.policy"] == "delete"
    assert declared(settings, "x.work.wine").topic == "x.work.wine"
    with pytest.raises(ConfigError, match=r"x\.resluts.*Did you mean 'x\.results'"):
        declared(settings, "x.resluts")
