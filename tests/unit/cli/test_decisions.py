"""`sie-stream decisions`: which ones, from when, and every part of them in words."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest

from schemas.codec import encode_decision
from sie_stream.cli.decisions import Logged, as_json, lines, logged, wanted
from sie_stream.cli.since import since_ms
from sie_stream.decisions import Decision, Fact, MemoryChange, Move, SolverRun
from sie_stream.errors import ConfigError
from sie_stream.ids import instance_id
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from topics.catalog import system_topics

NOW_MS = 1_760_000_000_000
FULL = Decision(
    "d-7-1",
    "plan",
    "churn",
    "It is cheaper.",
    7,
    NOW_MS,
    {"worker": "w1", "epoch": 7},
    ("w2/gpu0: full.", "w3/gpu0: cordoned."),
    "It would stay dear.",
    "ann",
    (Fact("sie.cluster", 0, 7, "Tick"), Fact("sie.cluster", 0, 3, "ApplyModel")),
    (Move("churn", "replica", "w0/gpu0", "w1/gpu1"), Move("churn", "partitions 0, 1", "w0", "")),
    (MemoryChange("w1", "gpu1", 80 * 2**20, 10 * 2**20, 30 * 2**20),),
    12,
    SolverRun("cp-sat 9.14", "optimal", 5, {"moves": 2, "sla": 3}, 4, 9, {"sla": 9}),
    "d-1-0",
)


@pytest.mark.parametrize(
    ("text", "ago_ms"), [("90s", 90_000), ("10m", 600_000), ("2h", 7_200_000), (" 7d ", 604_800_000), ("0s", 0)]
)
def test_since_is_how_long_ago(text: str, ago_ms: int) -> None:
    assert since_ms(text, NOW_MS) == NOW_MS - ago_ms


def test_since_is_an_iso_time() -> None:
    assert (
        since_ms("2026-03-01T12:00:00+01:00", NOW_MS) == since_ms("2026-03-01T11:00:00Z", NOW_MS) == 1_772_362_800_000
    )
    local = datetime(2026, 3, 1, 12).astimezone()
    assert since_ms("2026-03-01T12:00:00", NOW_MS) == round(local.timestamp() * 1_000)


@pytest.mark.parametrize("text", ["yesterday", "10", "m", "-5m", "10w", "2026-13-01", "99999-01-01"])
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--since .*10m.*ISO"):
        since_ms(text, NOW_MS)


def test_every_part_is_told() -> None:
    said = "\n".join(lines(Logged(4, 3, FULL)))
    for part in (
        *("d-7-1", "plan", "churn", "ann", "It is cheaper.", "It would stay dear.", "undoes    d-1-0"),
        *("Tick sie.cluster/0@7", "ApplyModel sie.cluster/0@3", "worker w1, epoch 7"),
        *("rejected  w2/gpu0: full.", "rejected  w3/gpu0: cordoned."),
        *("replica of churn: w0/gpu0 -> w1/gpu1", "partitions 0, 1 of churn: w0 -> nowhere"),
        *("w1/gpu1: 10.0 MiB -> 30.0 MiB of 80.0 MiB", "cp-sat 9.14: optimal, cost 5 (moves 2, sla 3)"),
        *("no plan can cost less than 4", "doing nothing costs 9", "12 ms; published 3 ms after"),
    ):
        assert part in said, part


def test_an_old_record_leaves_out_what_it_does_not_know() -> None:
    old = Decision("d-3-0", "replica_ready", "churn", "Ready.", 3, NOW_MS, {})
    said = list(lines(Logged(0, 1, old)))
    assert [line.split()[0] for line in said] == ["d-3-0", "facts", "because", "took"]
    assert "record 3" in said[1]


def test_json_has_every_field() -> None:
    found = as_json(Logged(4, 3, FULL))
    assert found["offset"] == 4
    assert set(Decision.__struct_fields__) < found.keys()
    assert found["moves"][0] == {"model": "churn", "what": "replica", "source": "w0/gpu0", "target": "w1/gpu1"}


def write(log: SimLog, number: int) -> None:
    decision = Decision(f"d-{number}-0", "plan", "churn", "Why.", number, log.clock.now_ms(), {})
    log.plain_writer().write([LogWrite("sie.decisions", encode_decision(decision), key=b"churn")])


def test_they_come_from_the_beginning_or_from_a_time_and_go_on_without_a_repeat() -> None:
    log = SimLog()
    log.admin().ensure(system_topics(Settings()))
    for number in range(3):
        write(log, number)
    log.plain_writer().write([LogWrite("sie.decisions", b"no decision", key=b"x")])
    log.clock.advance(3_600_000)
    late_ms = log.clock.now_ms()
    write(log, 3)
    reader = log.reader("tools")
    assert [entry.decision.cause_offset for entry in logged(reader, "sie.decisions", 0, follow=False)] == [0, 1, 2, 3]
    assert [e.decision.cause_offset for e in logged(reader, "sie.decisions", late_ms, follow=False)] == [3]
    following = logged(log.reader("tools"), "sie.decisions", 0, follow=True)
    assert [entry.decision.cause_offset for entry in itertools.islice(following, 4)] == [0, 1, 2, 3]
    write(log, 4)
    assert next(following).decision.cause_offset == 4


@pytest.mark.parametrize("model", ["churn", instance_id("churn"), "churn.CANARY"])
def test_decisions_of_a_model_are_those_of_its_variants_too(model: str) -> None:
    placed = Decision("d-8-0", "replica_placed", "churn.CANARY", "2 wanted.", 8, NOW_MS, {})
    assert wanted(placed, model, 0)
    assert not wanted(placed, "risk", 0)
