"""Runs the egress machine over the ports: one synchronous transaction per turn, as ingress does."""

from __future__ import annotations

from collections.abc import Callable

from processors.egress.machine import CommitOutputs, EgressMachine, OutputsPolled, RoutesChanged
from processors.follow import RouteFollower
from processors.tokenise import TextEncoder
from processors.turns import Pace, Ports, Silence, Source, TopicLookup, Watcher, commit_turn
from sie_stream.errors import FatalLogError, RecordTooLarge
from sie_stream.settings import Settings

IDLE_WAIT_MS = 100
BATCH_MAX = 1_000
ABORTS_IN_A_ROW_MAX = 100


class EgressHost:
    """One egress process. Call start() once, then turn() for ever, then close()."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        encoder_of: Callable[[str, str], TextEncoder],
        watcher: Watcher | None = None,
    ) -> None:
        self._names = settings.topics
        self._ports = ports
        self._watcher = watcher or Silence()
        self._reader = ports.make_reader(f"{settings.topics.egress_group}.routes")
        self._topics = TopicLookup(self._reader, ports.clock)
        self._routes = RouteFollower(self._reader, settings.topics.routes)
        self._source = Source(settings.topics.egress_group, ports.make_group_reader(settings.topics.egress_group))
        self._pace = Pace(ports.clock)
        self._aborts_in_a_row = 0
        self.machine = EgressMachine(settings, encoder_of, self._topics)

    def start(self) -> None:
        """Take the transactional id (fencing the last incarnation), read the routes, join the group.

        Raises FatalLogError when the topics are missing or unreadable.
        """
        outputs = self._names.outputs
        if not self._topics(outputs):
            raise FatalLogError(f"topic {outputs!r} does not exist. Create it with `sie-stream topics apply`.")
        self._ports.writer.init()
        self.machine.decide([RoutesChanged(self._routes.read_table())])
        self._source.subscribe((outputs,))

    def turn(self) -> int:
        """One turn; waits at most IDLE_WAIT_MS. Returns how many records were settled. Raises Fenced, FatalLogError."""
        changed = self._routes.changes(self._pace.pause_ms())
        self._pace.began()
        if changed:
            self.machine.decide([RoutesChanged(changed)])
        while self._routes.problems:
            self._watcher.event("route_unreadable", problem=self._routes.problems.pop())
        records = self._source.poll(BATCH_MAX, IDLE_WAIT_MS)
        self._source.take_fresh()
        if not records:
            return 0
        for command in self.machine.decide([OutputsPolled(records, self._ports.clock.now_ms())]):
            if not self._promise(command):
                return 0
        return len(records)

    def close(self) -> None:
        self._source.reader.close()
        self._reader.close()
        self._ports.writer.close()

    def _promise(self, batch: CommitOutputs) -> bool:
        refusal = commit_turn(self._ports.writer, batch.writes, [(self._source.reader, batch.offsets)])
        self._pace.ended(len(batch.writes))
        if refusal is None:
            self._aborts_in_a_row = 0
            return True
        self._aborts_in_a_row += 1
        if self._aborts_in_a_row > ABORTS_IN_A_ROW_MAX or isinstance(refusal, RecordTooLarge):
            # Results are kept below record_bytes_max, so an oversize one means that the broker's limit is lower.
            raise FatalLogError(f"{self._aborts_in_a_row} transactions in a row were aborted; the last: {refusal}")
        self._watcher.event("batch_aborted", reason=str(refusal), records=len(batch.writes))
        self._topics.forget()
        self._source.rewind()
        return False
