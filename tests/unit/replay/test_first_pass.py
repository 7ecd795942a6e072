"""The first pass over results: what is wanted is kept, what is not is not even decoded, what is no result is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from schemas.codec import decode_result, encode_result
from sie_stream.cli.replaying import run
from sie_stream.cli.replaying.choosing import Choice
from sie_stream.cli.replaying.protected import Protection
from sie_stream.cli.replaying.run import Job, Replay
from sie_stream.cli.replaying.scratch import Scratch
from sie_stream.edge.stop import StopFlag
from sie_stream.ids import TopicPartition
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.records import LogRecord, Result
from sie_stream.replay.pace import Pace
from sie_stream.replay.plan import Span
from sie_stream.replay.report import Tally
from sie_stream.replay.versions import VersionBook
from sie_stream.settings import Settings
from tests.unit.replay.test_scratch import result

PLACE = TopicPartition("sie.work.m", 0)


class Canned:
    """Readers of one batch."""

    def __init__(self, values: list[bytes | None]) -> None:
        self._records = [LogRecord("sie.results", 0, at, 0, None, value) for at, value in enumerate(values)]

    def read(self, spans: list[Span], moved: Callable[[int], None], stop: StopFlag) -> Iterator[list[LogRecord]]:
        yield self._records


class NoEngines:
    def prepare(self, launch: object) -> None:
        raise AssertionError("no version is declared, so none can be prepared")


def first_pass(values: list[bytes | None], wanted: Callable[[Result], bool], needle: bytes) -> tuple[Scratch, Tally]:
    scratch, tally = Scratch(), Tally()
    job = Job(None, 0.0, Pace())
    protection = Protection(lambda: pytest.fail("no key is asked for"), DeclaredOutputs(()))
    readers: Any = Canned(values)
    replay = Replay(readers, Settings(), VersionBook([]), job, scratch, tally, None, StopFlag(), protection)
    choice = Choice("x", [], wanted, needle=needle)
    replay.find_results(choice, NoEngines(), lambda count: None)  # type: ignore[arg-type]
    return scratch, tally


def test_results_without_the_needle_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes | None] = []

    def watched(value: bytes | None) -> Result:
        decoded.append(value)
        return decode_result(value)

    monkeypatch.setattr(run, "decode_result", watched)
    ours = encode_result(result(0, 1))
    other = ours.replace(b"sie.work.m", b"sie.work.n")
    scratch, tally = first_pass([other, ours], lambda one: one.provenance.work_topic == "sie.work.m", b"sie.work.m")
    assert decoded == [ours]
    assert list(scratch.offsets(PLACE)) == [1]
    assert tally.notes == []


def test_what_is_no_result_is_told_even_without_the_needle() -> None:
    scratch, tally = first_pass([b"garbage", None, encode_result(result(0, 3))], lambda one: True, b"sie.work.m")
    assert list(scratch.offsets(PLACE)) == [3]
    assert len(tally.notes) == 2
    assert "sie.results[0] offset 0: no result" in tally.notes[0]
