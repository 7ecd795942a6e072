"""A worker with nothing to commit is told by nobody that it was fenced: it reads it in the control log."""

from __future__ import annotations

import pytest

from sie_stream.control import WorkerFenced, WorkerHeartbeat, WorkerJoined
from sie_stream.errors import Fenced
from sie_stream.records import LogWrite
from tests.unit.gpu_worker.over_sim_log import NAMES, Worker, new_log, say


def joined(incarnation: str) -> WorkerJoined:
    return WorkerJoined("w0", incarnation, "host", 1, (), (), {})


def test_an_idle_worker_ends_when_the_scheduler_has_fenced_it() -> None:
    log = new_log()
    worker = Worker(log)
    worker.turns()
    log.clock.advance(30_000)  # paused
    say(log, WorkerFenced("w0", "i1", took_ms=80))
    with pytest.raises(Fenced, match="i1"):
        worker.turns()


def test_an_idle_worker_ends_when_a_newer_incarnation_has_joined() -> None:
    log = new_log()
    worker = Worker(log)
    worker.turns()
    say(log, joined("i2"))
    with pytest.raises(Fenced, match="i2"):
        worker.turns()


def test_a_verdict_from_before_the_first_look_is_found() -> None:
    log = new_log()
    worker = Worker(log)
    say(log, WorkerFenced("w0", "i1", took_ms=80))
    with pytest.raises(Fenced):
        worker.turns()


def test_a_fence_of_an_earlier_life_that_ends_after_this_one_joined_has_hit_it() -> None:
    log = new_log()
    worker = Worker(log)
    worker.turns()
    say(log, WorkerFenced("w0", "i0", took_ms=80))
    with pytest.raises(Fenced, match="a fence of i0 ended after i1 had begun"):
        worker.turns()


def test_a_fence_of_an_earlier_life_that_ends_before_this_one_tells_that_it_joined_has_hit_it() -> None:
    """The log's clock is not the worker's: the time between its start and its report counts."""
    log = new_log()
    worker = Worker(log)
    log.clock.advance(5)
    say(log, WorkerFenced("w0", "i0", took_ms=80))
    with pytest.raises(Fenced, match="a fence of i0"):
        worker.turns()


def test_what_concerns_others_or_the_past_does_not_matter() -> None:
    log = new_log()
    say(log, joined("i0"))
    say(log, WorkerFenced("w0", "i0", took_ms=80))
    worker = Worker(log)
    worker.turns()
    say(log, WorkerFenced("w1", "i1", took_ms=80))
    say(log, WorkerHeartbeat("w0", "i1"))
    log.plain_writer().write([LogWrite(NAMES.cluster, b"no record of ours", partition=0)])
    worker.turns()
    assert not worker.host.finished
