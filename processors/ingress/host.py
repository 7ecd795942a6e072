"""Runs the ingress machine over the ports: gather, decide, act and promise in one transaction per turn.

No Kafka and no clock of its own, so the simulation runs this very code. Each turn is synchronous: when poll() is called
again, nothing is open, so a rebalance inside poll() finds every record either committed or untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

from processors.follow import RouteChange, RouteFollower
from processors.ingress.events import (
    BatchAborted,
    BatchTooLarge,
    CommitBatch,
    GroupBatch,
    IngressCommand,
    RecordsPolled,
    RoutesChanged,
    ShareChanged,
    Subscribe,
    Unsubscribe,
    WindowRead,
)
from processors.ingress.held import RoutesReporter
from processors.ingress.machine import IngressMachine
from processors.ingress.references import NoContents
from processors.ingress.routes import TextEncoders
from processors.ingress.sleepers import SleepWatch
from processors.ingress.window import WindowReader, start_at_end
from processors.turns import Pace, Ports, Silence, Source, TopicLookup, Watcher, commit_turn
from schemas.registry_follower import SchemaTableFollower
from sie_stream.errors import FatalLogError, RecordTooLarge, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import Contents, LogReader
from sie_stream.settings import Settings

IDLE_WAIT_MS = 100
SHARED_WAIT_MS = 5
"""How long an idle turn waits: on the only group, or on each of several."""
HELD_WAIT_MS = 20
"""How long a turn waits for what a reference names; all others wait with it, so it is short."""
ABORTS_IN_A_ROW_MAX = 100


class IngressHost:
    """One ingress process. Call start() once, then turn() for ever, then close()."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        encoders: TextEncoders,
        watcher: Watcher | None = None,
        name: str = "ingress",
        contents: Contents | None = None,
    ) -> None:
        """`contents` None: nothing is read that a request names."""
        self._settings = settings
        self._ports = ports
        self._watcher = watcher or Silence()
        self._reader = ports.make_reader(f"{settings.topics.ingress_group}.routes")
        self._topics = TopicLookup(self._reader, ports.clock)
        self._routes = RouteFollower(self._reader, settings.topics.routes)
        self._sources: dict[str, Source] = {}
        self._window = WindowReader(settings.dedupe_window_ms, ports.clock)
        self._busy = False
        self._pace = Pace(ports.clock)
        self._aborts_in_a_row = 0
        self._registry_reader = ports.make_reader(f"{settings.topics.ingress_group}.schemas")
        self._registry = SchemaTableFollower(self._registry_reader, settings.topics.schemas, ports.clock)
        reports = ports.make_plain_writer()
        self._sleepers = SleepWatch(
            lambda: ports.make_reader(settings.topics.worker_group), reports, settings.topics, ports.clock
        )
        self.machine = IngressMachine(settings, encoders, self._topics, self._registry, contents)
        self._contents = contents or NoContents()
        self._held = RoutesReporter(name, settings.topics.cluster, reports, ports.clock)

    def start(self) -> None:
        """Take the transactional id (fencing the last incarnation), read the routes, join the groups.

        Raises FatalLogError when the topics are missing or unreadable.
        """
        requests = self._settings.topics.requests
        if not self._topics(requests):
            raise FatalLogError(f"topic {requests!r} does not exist. Create it with `sie-stream topics apply`.")
        self._ports.writer.init()
        rows = self._routes.read_table()
        self._apply(rows)
        self._watcher.event("routes_read", rows=len(rows))

    def turn(self) -> int:
        """One turn; waits at most IDLE_WAIT_MS. Returns how many records were settled. Raises Fenced, FatalLogError."""
        self._held.beat()
        changed = self._routes.changes(self._pace.pause_ms())
        self._pace.began()
        if changed:
            self._apply(changed)
        self._sleepers.turn()
        self._join_new_topics()
        while self._routes.problems:
            self._watcher.event("route_unreadable", problem=self._routes.problems.pop())
        while self._registry.problems:
            self._watcher.event("schema_ignored", problem=self._registry.problems.pop())
        batches = self._gather()
        self._busy = bool(batches)
        settled = sum(len(batch.records) for batch in batches)
        if not batches:
            return 0
        commands = self.machine.decide([RecordsPolled(batches, self._ports.clock.now_ms())])
        done = self._act(commands)
        self._pace.ended(settled)
        return settled if done else 0

    def close(self) -> None:
        """Leave the groups. Nothing is open between turns."""
        self._sleepers.close()
        self._held.leave()
        for source in self._sources.values():
            source.reader.close()
        self._reader.close()
        self._registry_reader.close()
        self._ports.writer.close()

    def _apply(self, changes: tuple[RouteChange, ...]) -> None:
        before = self.machine.routes.conflicts
        self._act(self.machine.decide([RoutesChanged(changes)]))
        self._sleepers.change(changes)
        self._held.routes_changed(changes)
        conflicts = self.machine.routes.conflicts
        if conflicts and conflicts != before:
            self._watcher.event("bindings_ignored", conflicts=conflicts)

    # ------------------------------------------------------------------------------------------------ gather

    def _gather(self) -> tuple[GroupBatch, ...]:
        wait_ms = IDLE_WAIT_MS if len(self._sources) == 1 else SHARED_WAIT_MS
        batches = []
        room = self._settings.ingress_batch_max
        for source in self._sources.values():
            records = source.poll(max(1, room), 0 if self._busy or batches else wait_ms)
            if source.take_changed():
                self._tell_share()
            fresh = source.take_fresh()
            if fresh and not self._welcome(source, fresh):
                source.rewind()  # what was polled is not wanted, or will be read again
                continue
            if records:
                batches.append(GroupBatch(source.group, records))
                room -= len(records)
        return tuple(batches)

    def _welcome(self, source: Source, fresh: list[TopicPartition]) -> bool:
        """Prepare for partitions just assigned. False if the source must start from its committed positions again."""
        reader = self._ports.make_reader(source.group)
        try:
            if source.offset_reset == "latest" and start_at_end(self._ports.writer, source, reader, fresh):
                return False
            self._rebuild_window(source.group, reader, fresh)
        except Retriable as trouble:
            source.still_fresh(fresh)
            self._watcher.event("window_unreadable", group=source.group, reason=str(trouble))
            return False
        finally:
            reader.close()
        return True

    def _rebuild_window(self, group: str, reader: LogReader, fresh: list[TopicPartition]) -> None:
        started_ms = self._ports.clock.monotonic_ms()
        topics = dict.fromkeys(partition.topic for partition in fresh)
        bound_to = {topic: self.machine.routes.bound(group, topic) for topic in topics}
        remembered = 0
        for topic, entries in self._window.read(reader, fresh, bound_to):
            self.machine.decide([WindowRead(group, topic, entries)])
            remembered += len(entries)
        self._watcher.event(
            "partitions_assigned",
            group=group,
            partitions=[f"{topic}[{number}]" for topic, number in fresh],
            remembered=remembered,
            took_ms=round(self._ports.clock.monotonic_ms() - started_ms),
        )

    def _tell_share(self) -> None:
        held = sum(len(source.assigned) for source in self._sources.values())
        total = sum(self._topics.partitions(topic) for source in self._sources.values() for topic in source.topics)
        self.machine.decide([ShareChanged(held / total if held and total else 1.0)])

    # ------------------------------------------------------------------------------------------------ act

    def _act(self, commands: Sequence[IngressCommand]) -> bool:
        """Carry commands out. False if a transaction was aborted."""
        done = True
        for command in commands:
            match command:
                case Subscribe():
                    self._subscribe(command)
                case Unsubscribe():
                    self._sources.pop(command.group).reader.close()
                case CommitBatch():
                    done = self._promise(command)
        return done

    def _subscribe(self, command: Subscribe) -> None:
        source = self._sources.get(command.group)
        if source is None:
            source = Source(command.group, self._ports.make_group_reader(command.group))
            self._sources[command.group] = source
        source.wanted = command.topics
        source.offset_reset = command.offset_reset
        source.subscribe(self._existing(source))

    def _join_new_topics(self) -> None:
        """Subscribe to bound topics that exist by now."""
        for source in self._sources.values():
            if source.topics != source.wanted:
                source.subscribe(self._existing(source))

    def _existing(self, source: Source) -> tuple[str, ...]:
        return tuple(topic for topic in source.wanted if self._topics(topic))

    def _promise(self, batch: CommitBatch) -> bool:
        offsets = [(self._sources[group].reader, positions) for group, positions in batch.offsets if positions]
        refusal = commit_turn(self._ports.writer, batch.writes, offsets) if offsets else None
        if refusal is None:
            self._aborts_in_a_row = 0
            for _, positions in batch.offsets:
                self._window.known(positions)
            self._contents.settled()
            self._hold(batch)
            return True
        self._aborts_in_a_row += 1
        if self._aborts_in_a_row > ABORTS_IN_A_ROW_MAX:
            raise FatalLogError(f"{self._aborts_in_a_row} transactions in a row were aborted; the last: {refusal}")
        self._watcher.event("batch_aborted", reason=str(refusal), records=len(batch.writes))
        self._topics.forget()
        for group, _ in batch.offsets:
            self._sources[group].rewind()
        too_large = isinstance(refusal, RecordTooLarge)
        self.machine.decide([BatchTooLarge(batch) if too_large else BatchAborted(batch)])
        return False

    def _hold(self, batch: CommitBatch) -> None:
        """Read partitions again from requests whose inputs are not there yet; wait a little for these."""
        for group, places in batch.held:
            self._sources[group].reader.seek(places)
        if batch.held:
            self._contents.wait(HELD_WAIT_MS)
