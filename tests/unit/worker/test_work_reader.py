"""What a worker's reader looks up before it reads: a topic it has not met would be found only seconds later."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from gpu_worker.edge import work_reader
from gpu_worker.edge.work_reader import FETCH_WAIT_MS, FETCH_WAIT_UNWOKEN_MS, MEET_MS, WorkReader, fetch_wait_ms
from sie_stream.edge import kafka_reader
from sie_stream.edge.clock import SystemClock
from sie_stream.errors import Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.records import LogWrite
from tests.waiting import wait_until

NOWHERE, NAMES = "127.0.0.1:1", TopicNames("sie.")
ONE, TWO = TopicPartition("sie.work.one", 0), TopicPartition("sie.work.two", 1)


class Bells:
    """Implements Wakeups, and counts."""

    def __init__(self) -> None:
        self.rung = 0
        self.topics: dict[str, int] = {}

    def write(self, writes: Iterable[LogWrite]) -> None:
        self.rung += 1

    def partitions_of(self, topic: str) -> int:
        return self.topics.get(topic, 0)


@pytest.fixture
def bells() -> Bells:
    return Bells()


@pytest.fixture
def reader(bells: Bells) -> Iterator[WorkReader]:
    made = WorkReader(NOWHERE, NAMES, {}, bells, SystemClock(), FETCH_WAIT_MS)
    yield made
    made.close()


def test_the_leaders_of_what_is_assigned_are_looked_for_first(
    reader: WorkReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[TopicPartition], int]] = []

    def look_up(
        consumer: object, places: list[TopicPartition], spec: int, timeout_ms: int
    ) -> dict[TopicPartition, int]:
        asked.append((list(places), timeout_ms))
        return dict.fromkeys(places, 0)

    monkeypatch.setattr(work_reader, "list_offsets", look_up)
    monkeypatch.setattr(kafka_reader, "list_offsets", look_up)
    reader.assign({ONE: 5})
    assert asked == [([ONE], MEET_MS)]
    asked.clear()
    reader.beginning_offsets([TWO])
    asked.clear()
    reader.assign({TWO: 0})
    assert asked == [], "the look-up of its offsets has met it"
    reader.unassign([TWO])
    reader.assign({TWO: 0})
    assert asked == [([TWO], MEET_MS)], "the client may have forgotten it since"


def test_what_cannot_be_looked_up_is_assigned_all_the_same(reader: WorkReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*asked: object) -> dict[TopicPartition, int]:
        raise Retriable("nobody answers")

    monkeypatch.setattr(work_reader, "list_offsets", look_up)
    reader.assign({ONE: 5})
    assert reader.position(ONE) == 5


def test_wake_ups_go_on_until_a_look_up_is_answered(
    reader: WorkReader, bells: Bells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its requests may stand behind another fetch."""
    monkeypatch.setattr(work_reader, "RING_S", 0.001)

    def look_up(*asked: object) -> dict[TopicPartition, int]:
        wait_until(lambda: bells.rung >= 5, "five wake-ups")
        return {ONE: 0}

    monkeypatch.setattr(kafka_reader, "list_offsets", look_up)
    assert reader.end_offsets([ONE]) == {ONE: 0}
    assert all(thread.name != "wakeups" for thread in threading.enumerate()), "nobody rings afterwards"


def test_fetches_wait_long_only_where_they_can_be_ended(bells: Bells, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, a look-up of offsets would keep the loop from its heartbeats."""
    assert fetch_wait_ms(bells, NAMES) == FETCH_WAIT_UNWOKEN_MS
    bells.topics[NAMES.wakeups] = 6
    assert fetch_wait_ms(bells, NAMES) == FETCH_WAIT_MS

    def unknown(topic: str) -> int:
        raise Retriable(topic)

    monkeypatch.setattr(bells, "partitions_of", unknown)
    assert fetch_wait_ms(bells, NAMES) == FETCH_WAIT_UNWOKEN_MS


def test_questions_about_topics_do_not_wait_behind_a_fetch(reader: WorkReader, bells: Bells) -> None:
    """They go by the connection of the writer. Kafka is nowhere: the reader's own would never be answered."""
    bells.topics["answers"] = 4
    assert reader.partitions_of("answers") == 4
    assert reader.partitions_of("missing") == 0


def test_the_signs_are_met_before_anything_waits_in_a_fetch(
    reader: WorkReader, bells: Bells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could end a fetch behind which the client looks for the leader of sie.wakeups."""
    asked: list[TopicPartition] = []

    def look_up(
        consumer: object, places: list[TopicPartition], spec: int, timeout_ms: int
    ) -> dict[TopicPartition, int]:
        asked.extend(places)
        return dict.fromkeys(places, 0)

    monkeypatch.setattr(work_reader, "list_offsets", look_up)
    bells.topics = {NAMES.wakeups: 2, NAMES.placements: 1}
    assert reader.poll(10, 0) == []
    assert asked == [
        *(TopicPartition(NAMES.wakeups, number) for number in range(2)),
        TopicPartition(NAMES.placements, 0),
    ]
