"""Results whose work item is not there are counted once, and by why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from schemas.codec import encode_work
from sie_stream.cli.replaying.choosing import Choice
from sie_stream.cli.replaying.protected import Protection
from sie_stream.cli.replaying.run import Job, Replay
from sie_stream.cli.replaying.scratch import Scratch
from sie_stream.edge.stop import StopFlag
from sie_stream.ids import TopicPartition
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.records import LogRecord, Status
from sie_stream.replay.pace import Pace
from sie_stream.replay.plan import Bounds, Span
from sie_stream.replay.report import Report, Tally
from sie_stream.replay.versions import VersionBook
from sie_stream.settings import Settings
from tests.unit.replay.test_scratch import result
from tests.unit.worker.rig import work_item

READ = (2, 3, 4)
ANSWERED = (0, 1, 2, 3, 4)


class Shrinking:
    """Readers of a work topic whose beginning is at `first` when it is read, and at `later` afterwards. Of its records
    2, 3 and 4 are there."""

    lost = ()

    def __init__(self, first: int, later: int, partitions: int = 1) -> None:
        self._beginnings = [first, later]
        self._partitions = partitions
        self.records: Any = self

    def partitions_of(self, topic: str) -> int:
        return self._partitions

    def bounds(self, places: list[TopicPartition]) -> dict[TopicPartition, Bounds]:
        begins = self._beginnings.pop(0)
        return {place: Bounds(begins, 5, 5) for place in places}

    def read(self, spans: list[Span], moved: Callable[[int], None], stop: StopFlag) -> Iterator[list[LogRecord]]:
        yield [LogRecord("sie.work.m", 0, at, 0, None, encode_work(work_item(f"r{at}"))) for at in READ]


class Idle:
    def tend(self) -> None: ...

    def finish(self) -> None: ...


def replayed(
    readers: Any, status: Status = "expired", asked: Choice | None = None, stop: StopFlag | None = None
) -> Report:
    """Five results, of work items 0 to 4."""
    tally, scratch = Tally(), Scratch()
    engines: Any = Idle()
    protection = Protection(lambda: pytest.fail("no key is asked for"), DeclaredOutputs(()))
    replay = Replay(
        readers,
        Settings(),
        VersionBook([]),
        Job(None, 0.0, Pace()),
        scratch,
        tally,
        None,
        stop or StopFlag(),
        protection,
    )
    scratch.add([msgspec.structs.replace(result(0, at), status=status) for at in ANSWERED])
    replay.run(asked or Choice("x", [], lambda one: True), engines, lambda count: None)
    scratch.close()
    return tally.finish("x", "", 1.0, partial=False)


def test_what_a_stop_left_unanswered_says_nothing_of_its_version() -> None:
    """An engine that was not waited for is no other version."""
    assert replayed(Shrinking(2, 2), "ok").causes == {"retention": 2, "version": 3}
    stop = StopFlag()
    stop.set()
    assert replayed(Shrinking(2, 2), "ok", stop=stop).causes == {}


@pytest.mark.parametrize("later", [2, 4, 5])
def test_what_is_deleted_after_it_was_read_is_not_absent(later: int) -> None:
    report = replayed(Shrinking(2, later))
    assert report.causes == {"retention": 2}
    assert report.unscored == {"expired": 3}
    assert [one.place.offset for one in report.differences] == [0, 1]


def test_work_items_that_compaction_took_from_the_middle_are_gone_by_retention() -> None:
    report = replayed(Shrinking(0, 0))
    assert report.causes == {"retention": 2}
    assert any("2 results whose work item is not there" in note for note in report.notes)


def test_work_items_of_a_deleted_topic_are_gone_by_retention() -> None:
    report = replayed(Shrinking(0, 0, partitions=0))
    assert report.causes == {"retention": 5}
    assert {one.after for one in report.differences} == {"its work topic is deleted"}


def test_ids_without_a_terminal_record_are_missing() -> None:
    choice = Choice("x", [], lambda one: True, by_ids=True, ids_left={"never-sent"})
    report = replayed(Shrinking(2, 2), asked=choice)
    assert report.causes == {"missing": 1, "retention": 2}
    assert [one.request_id for one in report.differences if one.cause == "missing"] == ["never-sent"]


def test_answers_whose_declaration_is_gone_count_as_another_version() -> None:
    report = replayed(Shrinking(2, 2), status="ok")
    assert report.causes == {"retention": 2, "version": 3}
    assert all("not on the control log" in reason for reason in report.reasons)
