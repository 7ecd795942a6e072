"""What the log of a worker tells: everything unusual at once, the usual as counts now and then."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineStarted,
    LoadFailed,
    ModelLoaded,
    ModelSwitched,
    SwitchFailed,
)
from gpu_worker.facts import (
    CommitSucceeded,
    Note,
    RecordsPolled,
    SendReports,
    StopEngine,
    StopRequested,
    TimePassed,
    TopicMissing,
    WorkerCommand,
    WorkerEvent,
)
from sie_stream.control import PartitionReleased, ReplicaFailed, ReplicaReady

COUNTS_EVERY_MS = 30_000.0


class LogObserver:
    """Implements loop.Observer."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._counts_at: float | None = None
        self.records = 0
        self.batches = 0
        self.answers = 0
        self.commits = 0
        self.commit_ms = 0.0
        self._said = 0

    def saw(self, events: Sequence[WorkerEvent], commands: Sequence[WorkerCommand]) -> None:
        for event in events:
            self._event(event)
        for command in commands:
            self._command(command)

    def _event(self, event: WorkerEvent) -> None:
        match event:
            case TimePassed():
                self._tell_counts(event.at_ms)
            case RecordsPolled():
                self.records += len(event.records)
            case BatchCompleted():
                self.batches += 1
                self.answers += len(event.outputs)
            case CommitSucceeded():
                self.commits += 1
                self.commit_ms += event.took_ms
            case EngineStarted():
                self._log.info("engine_started", **event.engine._asdict(), pid=event.pid, versions=event.versions)
            case EngineDied():
                self._log.warning("engine_died", **event.engine._asdict(), cause=event.cause)
            case ModelLoaded():
                self._log.info(
                    "model_loaded",
                    **event.engine._asdict(),
                    slot=event.slot,
                    memory_bytes=event.memory_bytes,
                    load_ms=event.load_ms,
                    warmup_ms=event.warmup_ms,
                )
            case ModelSwitched():
                self._log.info(
                    "model_switched",
                    **event.engine._asdict(),
                    slot=event.slot,
                    switch_class=event.switch_class,
                    size_bytes=event.size,
                    ms=round(event.ms, 3),
                )
            case SwitchFailed():
                self._log.warning("switch_failed", **event.engine._asdict(), slot=event.slot, message=event.message)
            case LoadFailed():
                self._log.warning("load_failed", **event.engine._asdict(), code=event.code, message=event.message)
            case BatchFailed():
                self._log.warning("batch_failed", **event.engine._asdict(), code=event.code, message=event.message)
            case TopicMissing():
                self._log.warning("topic_missing", topic=event.topic, advice=event.advice)
            case StopRequested():
                self._log.info("stop_requested")
            case _:
                pass

    def _command(self, command: WorkerCommand) -> None:
        match command:
            case Note():
                self._log.info(command.event, **command.fields)
            case StopEngine():
                self._log.warning("engine_stopped", **command.engine._asdict(), reason=command.reason)
            case SendReports():
                for report in command.reports:
                    if isinstance(report, (ReplicaReady, ReplicaFailed, PartitionReleased)):
                        kind = type(report).__name__
                        self._log.info("reported", kind=kind, model=report.model, epoch=report.placement_epoch)
            case _:
                pass

    def _tell_counts(self, at_ms: float) -> None:
        if self._counts_at is None:
            self._counts_at = at_ms + COUNTS_EVERY_MS
        if at_ms < self._counts_at:
            return
        self._counts_at = at_ms + COUNTS_EVERY_MS
        if self.answers != self._said:
            self._said = self.answers
            self.tell_counts()

    def tell_counts(self) -> None:
        self._log.info(
            "counts",
            records=self.records,
            batches=self.batches,
            answers=self.answers,
            commits=self.commits,
            commit_ms=round(self.commit_ms / max(1, self.commits), 2),
        )
