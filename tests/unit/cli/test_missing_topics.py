"""What `doctor` and `describe` say of a topic that workers with a key ring do nothing without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from sie_stream.cli.doctor import topics_finding
from sie_stream.cli.models import missing_topics
from sie_stream.edge.connection import Connection
from sie_stream.ids import TopicNames
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from topics.catalog import system_topics
from topics.plan import CreateTopic

KEYS = TopicNames().keys


def test_doctor_says_what_stands_still_without_the_data_keys() -> None:
    missing = topics_finding([CreateTopic(KEYS, 1, {})], KEYS)
    assert (missing.state, missing.found) == ("wrong", "1 differences: sie.keys: create with 1 partitions")
    assert "topics apply" in missing.advice
    assert "workers with a key ring (pii_keys) load no model" in missing.advice
    assert "key ring" not in topics_finding([CreateTopic("sie.tokens", 1, {})], KEYS).advice
    assert topics_finding([], KEYS).advice == ""


def test_describe_says_so_too() -> None:
    log = SimLog()
    connection = cast(Connection, SimpleNamespace(settings=Settings(), reader=lambda: log.reader("g")))
    (said,) = missing_topics(connection)
    assert "sie.keys does not exist" in said
    assert "sie-stream topics apply" in said
    log.admin().ensure(system_topics(Settings()))
    assert missing_topics(connection) == []
