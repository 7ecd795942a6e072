"""A topic of results is refused, with the topic that holds the requests; everything else is replayed as ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.codec import encode_result
from sie_stream.cli.replaying.requested import refuse_topic_without_requests
from sie_stream.edge.stop import StopFlag
from sie_stream.errors import ConfigError
from sie_stream.ids import TopicNames
from sie_stream.provenance import result_json
from sie_stream.records import LogRecord
from sie_stream.replay.plan import Span
from tests.unit.replay.test_scratch import result
from tests.unit.replay.test_variants import Topics

NAMES = TopicNames()
RESULT = result(0, 1)
AGAIN = msgspec.structs.replace(RESULT, provenance=msgspec.structs.replace(RESULT.provenance, worker="replay"))
INGRESS = msgspec.structs.replace(
    RESULT, provenance=msgspec.structs.replace(RESULT.provenance, work_topic="", source_topic="scores-in")
)


class Readable(Topics):
    def first_of(self, span: Span, stop: StopFlag) -> LogRecord | None:
        return self._records[0] if self._records else None


def look(topic: str, value: bytes | None = None, inputs: frozenset[str] = frozenset()) -> None:
    readers: Any = Readable([] if value is None else [LogRecord(topic, 0, 0, 0, None, value)])
    refuse_topic_without_requests(readers, NAMES, topic, inputs, (), StopFlag())


@pytest.mark.parametrize("value", [encode_result(RESULT), result_json(RESULT)], ids=["avro", "json"])
def test_results_name_the_topic_of_their_requests(value: bytes) -> None:
    with pytest.raises(ConfigError, match="results, not requests") as found:
        look("scores", value)
    assert "--topic sie.requests, or --topic sie.work.m for what m worked on" in str(found.value)


def test_what_ingress_answered_names_the_work_topic_of_its_model() -> None:
    with pytest.raises(ConfigError, match=r"--topic scores-in, or --topic sie\.work\.m "):
        look("scores", encode_result(INGRESS))


def test_the_output_of_a_replay_names_what_was_replayed() -> None:
    with pytest.raises(ConfigError, match=r"results of a replay, not requests\. Give --topic sie\.work\.m,"):
        look("again", encode_result(AGAIN))


@pytest.mark.parametrize("topic", ["sie.deadletter", "sie.outputs", "sie.decisions"])
def test_topics_of_its_own_without_requests_are_named(topic: str) -> None:
    with pytest.raises(ConfigError, match=r"holds no requests\. Give --topic sie\.requests"):
        look(topic)


@pytest.mark.parametrize("topic", ["", "sie.requests", "sie.results", "sie.work.m", "sie.work.m.CANARY"])
def test_topics_that_hold_work_are_not_looked_at(topic: str) -> None:
    look(topic, encode_result(RESULT))


def test_results_of_one_model_may_be_the_requests_of_the_next() -> None:
    look("scores", encode_result(RESULT), inputs=frozenset({"scores"}))


@pytest.mark.parametrize("value", [None, b"", b"{}", b'{"inputs":{"x":1}}', b"\xff\x00", b"\x00\x00\x00\x00\x01"])
def test_requests_and_what_is_neither_are_replayed(value: bytes | None) -> None:
    look("my-requests", value)
