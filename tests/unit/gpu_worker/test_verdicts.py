"""A worker with nothing to commit is told by nobody that it was fenced: it reads it in the control log."""

from __future__ import annotations

import pytest

from gpu_worker.committer import InlineCommitter, TransactionRunner
from gpu_worker.facts import Identity
from gpu_worker.host import WorkerHost
from gpu_worker.machine import WorkerMachine
from gpu_worker.outcomes import Outcomes
from gpu_worker.sim.engine import SimEngines
from schemas.codec import encode_cluster
from sie_stream.control import ClusterRecord, Device, WorkerFenced, WorkerHeartbeat, WorkerJoined
from sie_stream.errors import Fenced
from sie_stream.postprocess import stage2_of
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from topics.catalog import system_topics

SETTINGS = Settings()
NAMES = SETTINGS.topics


class Worker:
    """An idle worker over the log in memory."""

    def __init__(self, log: SimLog, name: str = "w0", incarnation: str = "i1") -> None:
        identity = Identity(name, incarnation, "host", 1, (Device("cpu:0", "cpu", 1 << 30),), ("sim",), {})
        stage2 = stage2_of(SETTINGS.record_bytes_max)
        outcomes = Outcomes(NAMES, identity, 1_000_000, 1_000, lambda launch: stage2)
        writer = log.transactional_writer(NAMES.worker_transactional_id(name))
        work = log.reader(NAMES.worker_group)
        writer.init()
        self.log = log
        self.host = WorkerHost(
            WorkerMachine(identity, SETTINGS, outcomes),
            work,
            log.reader(NAMES.worker_group),
            InlineCommitter(TransactionRunner(writer, work, log.clock, NAMES.prefix)),
            log.plain_writer(),
            SimEngines(log.clock),
            log.clock,
            NAMES,
        )

    def turns(self, count: int = 3) -> None:
        for _ in range(count):
            self.log.clock.advance(50)
            self.host.run_turn()


def new_log() -> SimLog:
    log = SimLog()
    log.admin().ensure(system_topics(SETTINGS))
    return log


def say(log: SimLog, fact: ClusterRecord) -> None:
    log.plain_writer().write([LogWrite(NAMES.cluster, encode_cluster(fact), partition=0)])


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
