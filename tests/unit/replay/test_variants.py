"""Requests that a variant of the model answered are replayed like those of the model's own topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from schemas.codec import encode_cluster, encode_work
from sie_stream.cli.replaying.choosing import Choice, Question, choose
from sie_stream.cli.replaying.declared import declarations
from sie_stream.cli.replaying.protected import Protection
from sie_stream.cli.replaying.run import SHADOW_COPY, Job, Replay
from sie_stream.cli.replaying.scratch import Scratch
from sie_stream.commands import ApplyModel, DeleteModel, StartRollout
from sie_stream.edge.stop import StopFlag
from sie_stream.ids import TopicNames, TopicPartition, variant_unit
from sie_stream.ports import TopicSpec
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.records import LogRecord, LogWrite, Result
from sie_stream.replay.pace import Pace
from sie_stream.replay.plan import Bounds, Span, span_of
from sie_stream.replay.report import Tally
from sie_stream.replay.versions import Declared, VersionBook
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from tests.unit.replay.test_scratch import result
from tests.unit.scheduler.kit import spec_json
from tests.unit.scheduler.test_adapter_bases import ONE, TWO, chat, support
from tests.unit.worker.rig import work_item

NAMES = TopicNames()
OWN, CANARY = NAMES.work("churn"), NAMES.work(variant_unit("churn", "canary"))
TOPICS = (NAMES.results, OWN, CANARY, NAMES.work("churn.eu"), NAMES.work(variant_unit("churn.eu", "b")))
END = 5


class Topics:
    """Readers of topics with one partition of END records each."""

    lost = ()

    def __init__(self, records: Sequence[LogRecord] = ()) -> None:
        self.records: Any = self
        self._records = list(records)

    def topics(self) -> list[str]:
        return sorted(TOPICS)

    def partitions_of(self, topic: str) -> int:
        return 1

    def partitions(self, topic: str, only: Sequence[int] = ()) -> list[TopicPartition]:
        return [TopicPartition(topic, number) for number in only or (0,)]

    def bounds(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, Bounds]:
        return dict.fromkeys(places, Bounds(0, END, END))

    def spans(
        self, places: Sequence[TopicPartition], first: Callable[..., Any], until: Callable[..., Any]
    ) -> list[Span]:
        return [span_of(place, first(place), until(place), Bounds(0, END, END)) for place in places]

    def offsets_at(self, places: Sequence[TopicPartition], at_ms: int) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 0)

    def first_times(self, spans: Sequence[Span], stop: StopFlag) -> list[int]:
        return []

    def read(self, spans: Sequence[Span], moved: Callable[[int], None], stop: StopFlag) -> Iterator[list[LogRecord]]:
        yield self._records


def chosen(**question: Any) -> Choice:
    readers: Any = Topics()
    return choose(readers, NAMES, Question(**question), StopFlag())


def answer(topic: str) -> Result:
    found = result(0, 1)
    return msgspec.structs.replace(found, provenance=msgspec.structs.replace(found.provenance, work_topic=topic))


@pytest.mark.parametrize("first", ["", "1h"])
def test_what_variants_of_the_model_answered_is_in_the_range(first: str) -> None:
    choice = chosen(model="churn", first=first)
    assert [span.topic for span in choice.work] == [OWN, CANARY]
    assert [choice.wanted(answer(topic)) for topic in TOPICS] == [False, True, True, False, False]
    assert all(choice.needle in topic.encode() for topic in (OWN, CANARY))
    assert "and 1 of variants" in choice.title


@pytest.mark.parametrize("question", [{"first": "2"}, {"until": "4"}, {"partitions": (0,)}, {"topic": OWN}])
def test_an_offset_is_one_of_the_topic_that_was_named(question: dict[str, Any]) -> None:
    choice = chosen(model="churn", **question)
    assert [span.topic for span in choice.work] == [OWN]
    assert not choice.wanted(answer(CANARY))


def test_copies_for_a_shadow_are_not_missing() -> None:
    tally, scratch = Tally(), Scratch()
    items = [work_item("r0"), msgspec.structs.replace(work_item("r1"), variant="~canary")]
    readers: Any = Topics([LogRecord(CANARY, 0, at, 0, None, encode_work(item)) for at, item in enumerate(items)])
    engines: Any = type("Idle", (), {"tend": lambda self: None, "finish": lambda self: None})()
    protection = Protection(lambda: pytest.fail("no key is asked for"), DeclaredOutputs(()))
    replay = Replay(
        readers, Settings(), VersionBook([]), Job(None, 0.0, Pace()), scratch, tally, None, StopFlag(), protection
    )
    replay.run(Choice("x", [], lambda one: True, [Span(CANARY, 0, 0, 2)]), engines, lambda count: None)
    scratch.close()
    assert (tally.causes, tally.unscored) == ({"missing": 1}, {SHADOW_COPY: 1})


def test_a_version_that_rollout_start_brought_is_declared() -> None:
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    commands = (ApplyModel(Raw(spec_json())), StartRollout(Raw(spec_json(version="1.1.0")), "b", 2_000))
    log.plain_writer().write([LogWrite(NAMES.cluster, encode_cluster(one), b"churn", 0) for one in commands])
    history = list(declarations(log.reader("test"), NAMES))
    assert [(one.launch.version, one.beside) for one in history if isinstance(one, Declared)] == [
        ("1.0.0", False),
        ("1.1.0", True),
    ]
    assert VersionBook(history).pinned("churn", "1.1.0").launch.version == "1.1.0"


def test_an_adapter_is_declared_over_the_base_that_its_results_name() -> None:
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    specs = [chat(), chat("2.0.0", TWO), support()]
    commands = [ApplyModel(Raw(spec)) for spec in specs]
    log.plain_writer().write([LogWrite(NAMES.cluster, encode_cluster(one), b"chat", 0) for one in commands])
    book = VersionBook(declarations(log.reader("test"), NAMES))
    for digest, base in ((ONE, "chat@1.0.0"), (TWO, "chat@2.0.0")):
        found = book.as_it_was("support", "1.0.0", f"sha256:own over {digest}", 10**15)
        assert isinstance(found, Declared)
        assert (found.launch.config["base_model"], found.launch.config["base_digest"]) == (base, digest)
    assert book.pinned("support", "").launch.config["base_model"] == "chat@2.0.0"


def test_an_adapter_that_is_refused_after_its_base_was_deleted_is_replayed_as_it_went_on() -> None:
    log = SimLog()
    log.admin().ensure([TopicSpec(NAMES.cluster, 1, {})])
    commands = [ApplyModel(Raw(chat())), ApplyModel(Raw(support())), DeleteModel("chat"), ApplyModel(Raw(support()))]
    log.plain_writer().write([LogWrite(NAMES.cluster, encode_cluster(one), b"chat", 0) for one in commands])
    book = VersionBook(declarations(log.reader("test"), NAMES))
    found = book.as_it_was("support", "1.0.0", f"sha256:own over {ONE}", 10**15)
    assert isinstance(found, Declared)
    assert found.launch.config["base_model"] == "chat@1.0.0"
    assert book.pinned("support", "1.0.0").launch.config["base_model"] == "chat@1.0.0"
