"""A worker over the log in memory, for tests of what it reads and reports."""

from __future__ import annotations

from gpu_worker.committer import InlineCommitter, TransactionRunner
from gpu_worker.facts import Identity
from gpu_worker.host import WorkerHost
from gpu_worker.machine import WorkerMachine
from gpu_worker.outcomes import Outcomes
from gpu_worker.sim.engine import SimEngines
from schemas.codec import decode_cluster, encode_cluster, encode_row
from sie_stream.control import ClusterRecord, Device, PlacementRow
from sie_stream.postprocess import stage2_of
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from topics.catalog import system_topics, work_topic

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
    log.admin().ensure([*system_topics(SETTINGS), work_topic(SETTINGS, "m", 1)])
    return log


def say(log: SimLog, fact: ClusterRecord) -> None:
    log.plain_writer().write([LogWrite(NAMES.cluster, encode_cluster(fact), partition=0)])


def place(log: SimLog, row: PlacementRow) -> None:
    log.plain_writer().write([LogWrite(NAMES.placements, encode_row(row), key=row.model.encode())])


def said(log: SimLog) -> list[ClusterRecord]:
    """Everything on sie.cluster."""
    return [decode_cluster(record.value) for record in log.visible(NAMES.cluster)]
