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
from sie_stream.records import LogRecord
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
    """Readers of a work topic whose beginning is at 2 when it is read, and at `later` afterwards."""

    lost = ()

    def __init__(self, later: int) -> None:
        self._beginnings = [2, later]
        self.records: Any = self

    def partitions_of(self, topic: str) -> int:
        return 1

    def bounds(self, places: list[TopicPartition]) -> dict[TopicPartition, Bounds]:
        begins = self._beginnings.pop(0)
        return {place: Bounds(begins, 5, 5) for place in places}

    def read(self, spans: list[Span], moved: Callable[[int], None], stop: StopFlag) -> Iterator[list[LogRecord]]:
        yield [LogRecord("sie.work.m", 0, at, 0, None, encode_work(work_item(f"r{at}"))) for at in READ]


class Idle:
    def tend(self) -> None: ...

    def finish(self) -> None: ...


def replayed(later: int) -> Report:
    tally, scratch = Tally(), Scratch()
    readers: Any = Shrinking(later)
    engines: Any = Idle()
    protection = Protection(lambda: pytest.fail("no key is asked for"), DeclaredOutputs(()))
    replay = Replay(
        readers, Settings(), VersionBook([]), Job(None, 0.0, Pace()), scratch, tally, None, StopFlag(), protection
    )
    scratch.add([msgspec.structs.replace(result(0, at), status="expired") for at in ANSWERED])
    replay.run(Choice("x", [], lambda one: True), engines, lambda count: None)
    scratch.close()
    return tally.finish("x", "", 1.0, partial=False)


@pytest.mark.parametrize("later", [2, 4, 5])
def test_what_is_deleted_after_it_was_read_is_not_absent(later: int) -> None:
    report = replayed(later)
    assert report.causes == {"retention": 2}
    assert report.unscored == {"expired": 3}
