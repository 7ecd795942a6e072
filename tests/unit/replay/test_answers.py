"""Equal answers are counted by the batch; those of a model with protected fields go through its protection."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpu_worker.backends.base import EngineOutput
from gpu_worker.engine_port import EngineKey
from sie_stream.cli.replaying.answers import Token, drawn_by_chance
from sie_stream.cli.replaying.engines import Target
from sie_stream.cli.replaying.protected import Protection
from sie_stream.cli.replaying.run import Job, Replay
from sie_stream.cli.replaying.scratch import Scratch
from sie_stream.control import ModelLaunch
from sie_stream.edge.stop import StopFlag
from sie_stream.postprocess import stage2_of
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.records import LogRecord, WorkItem
from sie_stream.replay.compare import Original
from sie_stream.replay.pace import Pace
from sie_stream.replay.report import ModelReport, Report, Tally
from sie_stream.replay.versions import VersionBook
from sie_stream.settings import Settings

ASKED = WorkItem("r", "mi", "m", "1", "stable", 1, 0, b"{}", b"", "sie.requests", 0, 1, 0, 0, 0)


@pytest.mark.parametrize(
    ("parameters", "seed", "backend", "by_chance"),
    [
        (b'{"temperature":0.8}', None, "mine", True),
        (b'{"temperature":0.8,"top_p":0.9}', None, "oip", True),
        (b'{"temperature":0.8}', 5, "mine", False),
        (b'{"temperature":0.8,"seed":5}', None, "mine", False),
        (b'{"temperature":0.8}', None, "torch", False),
        (b'{"temperature":0.0}', None, "mine", False),
        (b"{}", None, "mine", False),
        (None, None, "mine", False),
        (b'{"temperature":"hot"}', None, "mine", False),
        (b"\xff", None, "mine", False),
    ],
)
def test_who_draws_by_chance(parameters: bytes | None, seed: int | None, backend: str, by_chance: bool) -> None:
    work = msgspec.structs.replace(ASKED, parameters=parameters, seed=seed)
    assert drawn_by_chance(work, backend) is by_chance


PROTECTED = {"type": "object", "properties": {"score": {"type": "number", "pii": "hash"}}}
SCORES = (0.25, 0.5, 0.75)


def answered(schema: dict[str, Any], changed: int = -1) -> Report:
    """Three answers in one batch, number `changed` of them another one than then."""
    launch = ModelLaunch("m", "1", "mi", "sim", "folder", "sha256:w", {}, "scoring", 1, 1, 4)
    launch = msgspec.structs.replace(launch, output_schema=msgspec.Raw(msgspec.json.encode(schema)))
    target = Target(launch, EngineKey("cpu:0", "sim"), 1, stage2_of(1_000_000), 4, "sha256:w", "sim")
    tally, readers = Tally(), Any
    protection = Protection(lambda: pytest.fail("no key is asked for"), DeclaredOutputs(()))
    book, job, scratch = VersionBook([]), Job(None, 0.0, Pace()), Scratch()
    replay = Replay(readers, Settings(), book, job, scratch, tally, None, StopFlag(), protection)  # type: ignore[arg-type]
    outputs = [b'{"score":%.2f}' % score for score in SCORES]
    tokens = [
        Token(
            Original(f"r{at}", "ok", "m", "1", "sha256:w", "sim", outputs[at], "", None, 4, 1.0, 2.0, 0),
            LogRecord("sie.work.m", 0, at, 0, None, b""),
            WorkItem(f"r{at}", "mi", "m", "1", "stable", 1, 0, b"{}", b"", "sie.requests", 0, at, 0, 0, 0),
        )
        for at in range(3)
    ]
    given = [EngineOutput(f"r{at}", b'{"score":0.99}' if at == changed else outputs[at]) for at in range(3)]
    replay.answered(target, tokens, given, 1.5)
    scratch.close()
    return tally.finish("x", "", 1.0, partial=False)


def only(report: Report) -> ModelReport:
    (model,) = report.models
    return model


def test_equal_answers_and_a_different_one_of_a_batch_are_each_counted_once() -> None:
    report = answered({"type": "object"}, changed=1)
    assert (report.replayed, report.equal, report.different) == (3, 2, 1)
    assert report.causes == {"numeric": 1}
    assert [one.request_id for one in report.differences] == ["r1"]
    spread = only(report).scores
    assert spread is not None
    assert (spread.seen, spread.before_p50) == (3, 0.5)
    assert only(report).before_versions == only(report).after_versions == ("1",)


def test_scores_of_a_protected_field_are_in_no_report() -> None:
    report = answered(PROTECTED)
    assert (report.replayed, report.equal) == (3, 3)
    assert only(report).scores is None
