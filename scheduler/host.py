"""The leading scheduler: gather records of sie.cluster, fold them, act, promise. Over ports only.

Everything the fold says goes out in the transaction that commits the offset of the record that caused it; side effects
follow after the commit, and their outcomes come back as records. So a crash anywhere repeats no decision and loses
none: what was committed and not carried out is asked for again by the fold.
"""

from __future__ import annotations

import msgspec

from scheduler.effects import Notice, SideEffects
from scheduler.guard import GuardedMachine
from scheduler.machine import fold_settings
from scheduler.rows import ROW_TYPES
from scheduler.snapshots import load_newest_snapshot, snapshot_writes
from schemas.codec import decode_cluster, encode_cluster, encode_decision, encode_row
from schemas.wire import CodecError
from sie_stream import __version__
from sie_stream.control import (
    ClusterRecord,
    EnsureTopic,
    FenceWorker,
    PublishState,
    RecordDecision,
    SchedulerCommand,
    SchedulerElected,
    Tick,
)
from sie_stream.errors import Fenced, Retriable, TransactionAborted
from sie_stream.ids import TopicPartition
from sie_stream.ports import Clock, LogReader, PlainWriter, TransactionalWriter
from sie_stream.records import CommittedOffset, LogRecord, LogWrite
from sie_stream.settings import Settings

BATCH_MAX = 500
"""Records gathered in one turn, and uncommitted records without outputs."""
COMMIT_EVERY_MS = 2_000
"""Without outputs the offset is committed this often."""
OUTCOME_WAIT_MS = 10
"""How long a turn waits for records while side effects are under way."""
ATTEMPTS_MAX = 5
"""Tries of one transaction that Kafka aborts; then the process ends and the next one folds again."""


class SchedulerHost:
    """One leader, from election to the end. `scheduler` names it on the log."""

    def __init__(
        self,
        settings: Settings,
        scheduler: str,
        reader: LogReader,
        writer: TransactionalWriter,
        plain: PlainWriter,
        effects: SideEffects,
        clock: Clock,
        notice: Notice,
    ) -> None:
        self.machine = GuardedMachine(settings)
        self._settings = settings
        self._names = settings.topics
        self._scheduler = scheduler
        self._reader = reader
        self._writer = writer
        self._plain = plain
        self._effects = effects
        self._clock = clock
        self._notice = notice
        self._cluster = TopicPartition(self._names.cluster, 0)
        self._decided_offset = 0
        """Records below it were decided by an earlier leader (or by us before): their commands are dropped."""
        self._next_offset = 0
        self._uncommitted = 0
        self._snapshot_offset = 0
        self._committed_at_ms = 0.0
        self._tick_at_ms = 0.0
        self._led = False

    def start(self) -> None:
        """Become the leader: take the id, load the newest snapshot, say so. The first turns fold the rest silently.

        Raises Fenced when another one takes the id in the meantime.
        """
        self._writer.init()
        state = load_newest_snapshot(self._reader, self._names.snapshots)
        if state is not None:
            self.machine = GuardedMachine(self._settings, state)
        committed = self._reader.committed([self._cluster])[self._cluster]
        start = self.machine.state.next_offset
        if state is None:
            start = self._reader.beginning_offsets([self._cluster])[self._cluster]
        # A snapshot commits together with its offset, so the group is behind it only when it expired or was reset.
        self._decided_offset = start if committed is None else max(start, committed.offset)
        self._next_offset = start
        self._snapshot_offset = start
        self._reader.assign({self._cluster: start})
        elected = SchedulerElected(self._scheduler, fold_settings(self._settings), __version__)
        self._transact([LogWrite(self._names.cluster, encode_cluster(elected), partition=0)])
        self._committed_at_ms = self._clock.monotonic_ms()
        self._notice("leading", {"scheduler": self._scheduler, "fold_from": start, "decide_from": self._decided_offset})

    def turn(self) -> None:
        """Gather, decide, act, promise. Raises Fenced once another scheduler leads."""
        self._write_cluster(self._effects.outcomes())
        self._tick_if_due()
        commands: list[SchedulerCommand] = []
        for record in self._reader.poll(BATCH_MAX, self._wait_ms()):
            commands += self._fold(record)
        self._promise(commands)
        self._carry_out(commands)

    def stop(self) -> None:
        """Commit what was folded; the next leader continues there."""
        if self._uncommitted:
            self._commit([])
        self._effects.close()

    # ------------------------------------------------------------ decide

    def _fold(self, record: LogRecord) -> list[SchedulerCommand]:
        self._next_offset = record.offset + 1
        self._uncommitted += 1
        try:
            fact = decode_cluster(record.value)
        except CodecError as error:
            self._notice("unreadable_cluster_record", {"offset": record.offset, "error": str(error)})
            return []
        commands = self.machine.step(record.offset, record.timestamp_ms, fact)
        if isinstance(fact, SchedulerElected):
            if self._led:
                raise Fenced(f"scheduler {fact.scheduler} leads since offset {record.offset}")
            self._led = fact.scheduler == self._scheduler
        return commands if record.offset >= self._decided_offset else []

    # ------------------------------------------------------------ promise

    def _promise(self, commands: list[SchedulerCommand]) -> None:
        """Publish what was decided, or at least where we are, now and then."""
        if commands:
            self._commit(self._writes(commands))
        elif self._uncommitted and (
            self._uncommitted >= BATCH_MAX or self._clock.monotonic_ms() - self._committed_at_ms >= COMMIT_EVERY_MS
        ):
            self._commit([])

    def _commit(self, writes: list[LogWrite]) -> None:
        self._committed_at_ms = self._clock.monotonic_ms()
        self._uncommitted = 0
        if self._next_offset <= self._decided_offset and not writes:
            return  # still folding what an earlier leader has decided: its commit stands
        if self._next_offset - self._snapshot_offset >= self._settings.snapshot_every_records:
            writes = [*writes, *snapshot_writes(self.machine.state, self._names.snapshots)]
            self._snapshot_offset = self._next_offset
        self._transact(writes, CommittedOffset(self._next_offset))

    def _transact(self, writes: list[LogWrite], position: CommittedOffset | None = None) -> None:
        """One transaction, tried again as a whole when Kafka aborts it: the writes are the same each time.

        Any other error ends this process; whether the transaction took effect, the next one sees in the offset.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                self._writer.begin()
                self._writer.write(writes)
                if position is not None:
                    self._writer.send_offsets(self._reader, {self._cluster: position})
                self._writer.commit()
                return
            except TransactionAborted as error:
                self._notice("transaction_aborted", {"attempt": attempt, "error": str(error)})
                self._writer.abort()
                if attempt == ATTEMPTS_MAX:
                    raise

    def _writes(self, commands: list[SchedulerCommand]) -> list[LogWrite]:
        writes: list[LogWrite] = []
        for command in commands:
            if isinstance(command, PublishState):
                writes.append(self._row_write(command))
            elif isinstance(command, RecordDecision):
                decision = command.decision
                writes.append(LogWrite(self._names.decisions, encode_decision(decision), key=decision.subject.encode()))
        return writes

    def _row_write(self, command: PublishState) -> LogWrite:
        topic = getattr(self._names, command.table)
        if command.body is None:
            return LogWrite(topic, None, key=command.name.encode())
        row = msgspec.json.decode(command.body, type=ROW_TYPES[command.table])
        return LogWrite(topic, encode_row(row), key=command.name.encode())

    # ------------------------------------------------------------ act

    def _carry_out(self, commands: list[SchedulerCommand]) -> None:
        """Start side effects, after the decision behind them is committed.

        A fence is not started when its incarnation was replaced in the meantime: it would hit the new one.
        """
        fences = [
            command
            for command in commands
            if isinstance(command, FenceWorker) and self._may_commit_still(command.worker, command.incarnation)
        ]
        topics = [command for command in commands if isinstance(command, EnsureTopic)]
        if fences or topics:
            self._effects.submit(fences, topics)

    def _may_commit_still(self, worker: str, incarnation: str) -> bool:
        known = self.machine.state.workers.get(worker)
        return known is not None and known.incarnation == incarnation and known.status == "lost"

    def _tick_if_due(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms >= self._tick_at_ms:
            self._tick_at_ms = now_ms + self._settings.tick_ms
            self._write_cluster([Tick(self._scheduler)])

    def _write_cluster(self, records: list[ClusterRecord]) -> None:
        """Outside the transaction. What is lost here is asked for again (outcomes) or comes again (ticks)."""
        if not records:
            return
        try:
            self._plain.write(
                [LogWrite(self._names.cluster, encode_cluster(record), partition=0) for record in records]
            )
        except Retriable as error:
            self._notice("cluster_write_failed", {"records": len(records), "error": str(error)})

    def _wait_ms(self) -> int:
        until_tick_ms = max(0, int(self._tick_at_ms - self._clock.monotonic_ms()))
        return min(until_tick_ms, OUTCOME_WAIT_MS) if self._effects.pending() else until_tick_ms
