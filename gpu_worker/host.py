"""The worker's hands: carries events from the ports to the machine and commands from the machine to the ports.

Over ports only, so the simulator runs this very code. One turn never waits longer than machine.wait_ms(), and
transactions run in the CommitPort, so heartbeats go out on time while the broker is slow; a stopped or stuck process
sends none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from gpu_worker.committer import CommitPort
from gpu_worker.engine_port import EnginePort
from gpu_worker.facts import (
    ActivateModel,
    CancelBatch,
    Commit,
    DataKeyChanged,
    DeactivateModel,
    DrainPartitions,
    DropImages,
    ExportSequences,
    FetchImages,
    KeepImage,
    LoadModel,
    MoveModelImage,
    Note,
    PartitionPositioned,
    PartitionReadOut,
    PausePartitions,
    PlacementChanged,
    PlacementUnreadable,
    PositionLost,
    PositionPartitions,
    RecordsPolled,
    ResumePartitions,
    SendReports,
    StopEngine,
    StopRequested,
    StreamTokens,
    SubmitBatch,
    TimePassed,
    TopicMissing,
    UnassignPartitions,
    UnloadModel,
    WorkerCommand,
    WorkerEvent,
)
from gpu_worker.machine import WorkerMachine
from gpu_worker.sequence_images import ImagesPort, NoImages
from schemas.codec import decode_cluster, decode_row, encode_cluster
from schemas.wire import CodecError
from sie_stream.control import PlacementRow, WorkerFenced, WorkerJoined
from sie_stream.errors import Fenced, Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.loop import Observer, turn
from sie_stream.ports import Clock, LogReader, PlainWriter
from sie_stream.records import CommittedOffset, LogRecord, LogWrite

PLACEMENTS_EVERY_MS = 10.0
PLACEMENTS_MAX = 1_000
RETRY_MS = 200.0
"""Pause before a look-up that failed for passing reasons is tried again."""
MISSING_TOLD_MS = 30_000.0
"""A topic that is not there is told about at once, and then this often."""
VERDICTS_SINCE_MS = 60_000
"""How far before its own start a worker reads sie.cluster: more than two clocks ever differ."""


class WorkerHost:
    """Implements loop.Inbox and loop.Effects for one WorkerMachine.

    work:       reads the work partitions; its group holds their committed offsets
    placements: follows the placements table from its beginning, what sie.cluster says about this incarnation, and,
                with a key ring, the data keys
    """

    def __init__(
        self,
        machine: WorkerMachine,
        work: LogReader,
        placements: LogReader,
        committer: CommitPort,
        reports: PlainWriter,
        engines: EnginePort,
        clock: Clock,
        names: TopicNames,
        observers: Iterable[Observer[WorkerEvent, WorkerCommand]] = (),
        device_changes: Callable[[], Sequence[WorkerEvent]] = tuple,
        images: ImagesPort | None = None,
    ) -> None:
        """`images`: None where running requests are not moved."""
        self.machine = machine
        self._work = work
        self._placements = placements
        self._committer = committer
        self._reports = reports
        self._engines = engines
        self._clock = clock
        self._names = names
        self._observers = tuple(observers)
        self._device_changes = device_changes
        self._images = images or NoImages()
        self._events: deque[WorkerEvent] = deque()
        self._commit: Commit | None = None
        self._to_position: dict[TopicPartition, int] = {}
        """Wanted partitions whose committed offset is not known yet, with their placement epoch."""
        self._assigned: dict[TopicPartition, None] = {}
        self._to_drain: dict[TopicPartition, tuple[int, int | None]] = {}
        """Partitions to be read out: (placement epoch, their end; None while it is not known)."""
        self._following = False
        self._missing_at = float("-inf")
        """When a missing topic was told the last time."""
        self._started_at = clock.monotonic_ms()
        self._verdicts_since_ms = clock.now_ms() - VERDICTS_SINCE_MS
        self._told_at: float | None = None
        """When the first report went out, which says that this incarnation joined."""
        self._joined = False
        self._began_ms = 0.0
        self._fence_of_earlier_life = (0, "")
        """When it ended, by the log's clock, and whose it was."""
        self._placements_at = float("-inf")
        self._retry_at = float("-inf")
        self._poll_at = float("-inf")

    @property
    def finished(self) -> bool:
        return self.machine.finished

    def run_turn(self) -> None:
        """Raises Fenced or FatalLogError when this incarnation is over."""
        turn(self.machine, self, self, self._observers)

    def request_stop(self) -> None:
        self._events.append(StopRequested())

    # ------------------------------------------------------------ gather

    def gather(self) -> Sequence[WorkerEvent]:
        # Before the poll: what is said to be read out came as records of earlier turns, and to earlier orders.
        read_out = self._read_out()
        wait = 0.0 if self._events or self._to_position else self.machine.wait_ms()
        records_max = self.machine.records_max
        if self.machine.busy or not records_max or self._clock.monotonic_ms() < self._poll_at:
            answers = self._engines.poll(wait)
            records = self._poll_work(records_max, 0)
        else:
            records = self._poll_work(records_max, int(wait))
            answers = self._engines.poll(0)
        events: list[WorkerEvent] = [TimePassed(self._clock.now_ms(), self._clock.monotonic_ms())]
        outcome = self._committer.outcome()
        if outcome is not None:
            events.append(outcome)
        events.extend(self._events)
        self._events.clear()
        events.extend(self._device_changes())
        events.extend(read_out)
        events.extend(answers)
        events.extend(self._images.poll())
        events.extend(self._poll_placements())
        for place, (wanted, continued_at) in self._work.lost_positions().items():
            events.append(PositionLost(place, wanted, continued_at))
        if records:
            events.append(RecordsPolled(records))
        return events

    def _poll_work(self, records_max: int, wait_ms: int) -> list[LogRecord]:
        if not records_max or self._clock.monotonic_ms() < self._poll_at:
            return []
        try:
            return self._work.poll(records_max, wait_ms)
        except Retriable:
            self._poll_at = self._clock.monotonic_ms() + RETRY_MS
            return []

    def _read_out(self) -> list[WorkerEvent]:
        if not self._to_drain:
            return []
        unknown = [place for place, (_, end) in self._to_drain.items() if end is None]
        at_ms = self._clock.monotonic_ms()
        if unknown and at_ms >= self._retry_at:
            try:
                for place, end in self._work.end_offsets(unknown).items():
                    self._to_drain[place] = (self._to_drain[place][0], end)
            except Retriable:
                self._retry_at = at_ms + RETRY_MS
        events: list[WorkerEvent] = []
        for place, (epoch, end) in list(self._to_drain.items()):
            if end is not None and self._work.position(place) >= end:
                del self._to_drain[place]
                events.append(PartitionReadOut(place, epoch))
        return events

    def _poll_placements(self) -> list[WorkerEvent]:
        """The newest row of every model that changed, in the order of their changes."""
        at_ms = self._clock.monotonic_ms()
        if at_ms - self._placements_at < PLACEMENTS_EVERY_MS:
            return []
        self._placements_at = at_ms
        try:
            if not self._following:
                self._follow()
            records = self._placements.poll(PLACEMENTS_MAX, 0)
        except Retriable:
            self._placements_at = at_ms + RETRY_MS
            return []
        changed: dict[str, WorkerEvent] = {}
        data_keys: list[WorkerEvent] = []
        for record in records:
            if record.topic == self._names.cluster:
                self._heed(record)
                continue
            if record.topic == self._names.keys:
                data_keys.append(DataKeyChanged(record.key, record.value))
                continue
            model = (record.key or b"").decode("utf-8", "replace")
            changed.pop(model, None)
            try:
                row = None if record.value is None else decode_row(record.value, PlacementRow)
                changed[model] = PlacementChanged(model, row)
            except CodecError as error:
                changed[model] = PlacementUnreadable(model, str(error))
        return [*data_keys, *changed.values()]

    def _follow(self) -> None:
        """Read the placements table from its beginning; try again later while it does not exist.

        That of the data keys too, where there is a key ring. It need not be read completely before work starts: for a
        subject whose key has not come yet another one is made.
        """
        topics = [self._names.placements, *([self._names.keys] if self.machine.state.outcomes.keeps_keys else [])]
        places = []
        for topic in topics:
            count = self._placements.partitions_of(topic)
            if not count:
                self._tell_missing(topic)
                raise Retriable(f"{topic} does not exist yet")
            places += [TopicPartition(topic, number) for number in range(count)]
        starts = self._placements.beginning_offsets(places)
        cluster = TopicPartition(self._names.cluster, 0)
        starts |= self._placements.offsets_at([cluster], self._verdicts_since_ms)
        self._placements.assign(starts)
        self._following = True

    def _tell_missing(self, topic: str) -> None:
        at_ms = self._clock.monotonic_ms()
        if at_ms - self._missing_at < MISSING_TOLD_MS:
            return
        self._missing_at = at_ms
        advice = "this worker follows no placements without it: run `sie-stream topics apply`"
        if topic == self._names.keys:
            advice += ", or unset SIE_STREAM_PII_KEYS (setting pii_keys) where no field is protected"
        self._events.append(TopicMissing(topic, advice))

    def _heed(self, record: LogRecord) -> None:
        """Raises Fenced when the log says that this incarnation is over.

        Kafka tells only those who commit. A worker that was paused, lost its partitions and woke up has nothing to
        commit any more: without this it would live on for ever, and nothing would ever be placed on it.

        A fence takes the transactional id of whoever has it by then. One of an earlier incarnation that ends after
        this one took the id has hit this one, too: better a new life now than at its first work.
        """
        try:
            fact = decode_cluster(record.value)
        except CodecError:
            return
        if not isinstance(fact, WorkerFenced | WorkerJoined):
            return
        me = self.machine.state.identity
        if fact.worker != me.worker:
            return
        mine = fact.incarnation == me.incarnation
        if isinstance(fact, WorkerFenced) and mine:
            raise Fenced(f"the scheduler fenced {me.incarnation} (sie.cluster offset {record.offset})")
        if isinstance(fact, WorkerFenced):
            self._fence_of_earlier_life = (record.timestamp_ms, fact.incarnation)
        elif self._joined and not mine:
            raise Fenced(f"incarnation {fact.incarnation} of {me.worker} took over from {me.incarnation}")
        elif mine and self._told_at is not None:
            self._joined = True
            # By the log's clock, which need not be ours.
            self._began_ms = record.timestamp_ms - (self._told_at - self._started_at)
        fenced_ms, earlier = self._fence_of_earlier_life
        if self._joined and fenced_ms > self._began_ms:
            raise Fenced(f"a fence of {earlier} ended after {me.incarnation} had begun")

    # ------------------------------------------------------------ act

    def act(self, commands: Sequence[WorkerCommand]) -> None:
        for command in commands:
            match command:
                case SubmitBatch():
                    self._engines.submit(command.engine, command.batch_id, command.slot, command.items, command.image)
                case CancelBatch():
                    self._engines.cancel(command.engine, command.batch_id)
                case ExportSequences():
                    self._engines.export(command.engine, command.batch_ids, command.bytes_max)
                case KeepImage() | DropImages() | FetchImages():
                    self._move_images(command)
                case Commit():
                    self._commit = command
                case PausePartitions():
                    self._work.pause(command.partitions)
                case ResumePartitions():
                    self._work.resume(command.partitions)
                case PositionPartitions():
                    self._to_position.update(command.partitions)
                case DrainPartitions():
                    self._to_drain.update({place: (epoch, None) for place, epoch in command.partitions})
                case UnassignPartitions():
                    self._unassign(command.partitions)
                case LoadModel():
                    self._engines.load(command.engine, command.slot, command.launch)
                case UnloadModel():
                    self._engines.unload(command.engine, command.slot)
                case ActivateModel():
                    self._engines.activate(command.engine, command.slot, command.pages)
                case DeactivateModel():
                    self._engines.deactivate(command.engine, command.slot)
                case MoveModelImage():
                    self._engines.move_image(command.engine, command.slot, command.to)
                case StopEngine():
                    self._engines.stop(command.engine)
                case SendReports():
                    self._send(command)
                case StreamTokens():
                    self._stream(command)
                case Note():
                    pass  # for observers
                case _:
                    assert_never(command)
        if self._to_position:
            self._position()

    def _move_images(self, command: KeepImage | DropImages | FetchImages) -> None:
        match command:
            case KeepImage():
                self._images.keep(command.partition, command.image)
            case DropImages():
                self._images.drop(command.partition)
            case FetchImages():
                self._images.fetch(command.partition, command.placement_epoch, command.images_at, command.bytes_max)
            case _:
                assert_never(command)

    def _position(self) -> None:
        """Committed offsets of all wanted partitions at once, and start reading there."""
        at_ms = self._clock.monotonic_ms()
        if at_ms < self._retry_at:
            return
        places = list(self._to_position)
        try:
            committed = self._work.committed(places)
            starts = self._work.beginning_offsets([place for place in places if committed[place] is None])
            found = {place: committed[place] or CommittedOffset(starts[place]) for place in places}
            self._work.assign({place: one.offset for place, one in found.items()})
        except Retriable:
            self._retry_at = at_ms + RETRY_MS
            return
        for place, one in found.items():
            self._assigned[place] = None
            self._events.append(PartitionPositioned(place, self._to_position[place], one))
        self._to_position.clear()

    def _unassign(self, partitions: Sequence[TopicPartition]) -> None:
        for place in partitions:
            self._to_position.pop(place, None)
            self._to_drain.pop(place, None)
        held = [place for place in partitions if place in self._assigned]
        self._work.unassign(held)
        for place in held:
            del self._assigned[place]

    def _send(self, command: SendReports) -> None:
        if self._told_at is None:
            self._told_at = self._clock.monotonic_ms()
        topic = self._names.cluster
        self._reports.write([LogWrite(topic, encode_cluster(report), None, 0) for report in command.reports])

    def _stream(self, command: StreamTokens) -> None:
        try:
            self._reports.write(command.writes)
        except Retriable:
            pass  # deltas are provisional, and the result has all of the text: nothing is worth waiting for them

    # ------------------------------------------------------------ promise

    def promise(self) -> None:
        if self._commit is not None:
            commit, self._commit = self._commit, None
            self._committer.start(commit)
