"""The host over the simulated log: promises, side effects, crashes at every call, standby and takeover."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest
from msgspec import Raw

from scheduler.effects import InlineEffects
from scheduler.host import SchedulerHost
from scheduler.machine import SchedulerMachine
from scheduler.snapshots import newest_snapshot, snapshot_writes
from scheduler.standby import Standby
from scheduler.state import to_bytes
from schemas.codec import decode_cluster, decode_decision, decode_row, encode_cluster
from sie_stream.control import (
    ApplyModel,
    ClusterRecord,
    Decision,
    PlacementRow,
    RecordDecision,
    ReplicaReady,
    RouteRow,
    WorkerExited,
    WorkerHeartbeat,
)
from sie_stream.errors import Fenced, Retriable
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord, LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from tests.examples import rounds
from tests.unit.scheduler.kit import joined, spec_json
from topics.catalog import system_topics

RowT = TypeVar("RowT", bound=msgspec.Struct)


class Crash(Exception):
    """The process dies here. No LogError, so nobody handles it."""


class SimFencer:
    """Fences by taking the id, as the real one does."""

    def __init__(self, log: SimLog) -> None:
        self.log = log
        self.fenced: list[str] = []

    def fence(self, transactional_id: str) -> None:
        self.fenced.append(transactional_id)
        self.log.transactional_writer(transactional_id, client="fencer").init()


class Sim:
    """One simulated cluster with schedulers in it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings(snapshot_every_records=40)
        self.log = SimLog()
        self.log.admin().ensure(system_topics(self.settings))
        self.names = self.settings.topics
        self.fencer = SimFencer(self.log)
        self.notices: list[tuple[str, dict[str, str | int]]] = []
        self._writer = self.log.plain_writer(client="others")
        self.started = 0

    def host(self) -> SchedulerHost:
        self.started += 1
        return SchedulerHost(
            self.settings,
            f"s{self.started}",
            self.log.reader(self.names.scheduler_group, client="scheduler"),
            self.log.transactional_writer(self.names.scheduler_transactional_id, client="scheduler"),
            self.log.plain_writer(client="scheduler"),
            InlineEffects(self.fencer, self.log.admin(), self.settings, self.log.clock, self.notice),
            self.log.clock,
            self.notice,
        )

    def notice(self, event: str, fields: dict[str, str | int]) -> None:
        self.notices.append((event, fields))

    def leader(self) -> SchedulerHost:
        host = self.host()
        host.start()
        return host

    def tell(self, *records: ClusterRecord) -> None:
        self._writer.write([LogWrite(self.names.cluster, encode_cluster(record), partition=0) for record in records])

    def run(self, host: SchedulerHost, ms: int = 1_000, alive: tuple[tuple[str, str], ...] = ()) -> None:
        for _ in range(0, ms, 50):
            self.log.clock.advance(50)
            self.tell(*(WorkerHeartbeat(worker, incarnation) for worker, incarnation in alive))
            host.turn()

    def answer_loads(self) -> None:
        """Workers answer every placement of a replica that is on the table and has no answer yet."""
        answered = {
            (fact.worker, fact.model, fact.placement_epoch)
            for _, fact in self.history()
            if isinstance(fact, ReplicaReady)
        }
        for row in self.table(self.names.placements, PlacementRow).values():
            for replica in row.replicas:
                launch = replica.launch
                if (replica.worker, launch.model, replica.placement_epoch) not in answered:
                    self.tell(
                        ReplicaReady(
                            replica.worker,
                            replica.incarnation,
                            launch.model,
                            launch.version,
                            replica.placement_epoch,
                            launch.memory_bytes,
                            load_ms=5,
                            warmup_ms=1,
                        )
                    )

    def history(self) -> list[tuple[LogRecord, ClusterRecord]]:
        return [(record, decode_cluster(record.value)) for record in self.log.visible(self.names.cluster)]

    def decisions(self) -> list[Decision]:
        return [decode_decision(record.value) for record in self.log.visible(self.names.decisions)]

    def table(self, topic: str, kind: type[RowT]) -> dict[bytes, RowT]:
        rows: dict[bytes, RowT] = {}
        for record in self.log.visible(topic):
            assert record.key is not None
            rows.pop(record.key, None)
            if record.value is not None:
                rows[record.key] = decode_row(record.value, kind)
        return rows

    def refolded(self) -> list[Decision]:
        """Every decision that a fold of the whole log makes."""
        machine = SchedulerMachine(self.settings)
        return [
            command.decision
            for record, fact in self.history()
            for command in machine.step(record.offset, record.timestamp_ms, fact)
            if isinstance(command, RecordDecision)
        ]


TWO = {"min": 1, "max": 2}
ALIVE = (("w0", "a"), ("w1", "b"))


def owners(sim: Sim, model: bytes = b"churn") -> set[str]:
    return {placed.worker for placed in sim.table(sim.names.placements, PlacementRow)[model].partitions}


def test_from_apply_to_a_serving_replica_and_through_the_loss_of_its_worker() -> None:
    sim = Sim()
    host = sim.leader()
    sim.tell(joined("w0", "a"), joined("w1", "b"), ApplyModel(Raw(spec_json(replicas=TWO))))
    sim.run(host, 300, ALIVE)
    assert sim.log.cluster.topics[sim.names.work("churn")]
    assert sim.table(sim.names.routes, RouteRow)[b"churn"].width == 2
    sim.answer_loads()
    sim.run(host, 200, ALIVE)
    assert owners(sim) == {"w0"}
    old = sim.log.transactional_writer(sim.names.worker_transactional_id("w0"))
    old.init()
    old.begin()
    sim.tell(WorkerExited("w0", "a", -9, "up"))
    sim.run(host, 300, ALIVE[1:])
    assert sim.fencer.fenced == ["sie.worker.w0"]
    with pytest.raises(Fenced):
        old.write([LogWrite(sim.names.results, b"late")])
    sim.answer_loads()
    sim.run(host, 200, ALIVE[1:])
    assert owners(sim) == {"w1"}
    assert sim.decisions() == sim.refolded()


def test_silence_alone_is_noticed_by_ticks() -> None:
    sim = Sim()
    host = sim.leader()
    sim.tell(joined("w0", "a"), joined("w1", "b"), ApplyModel(Raw(spec_json(replicas=TWO))))
    sim.run(host, 300, ALIVE)
    sim.run(host, 2_600, ALIVE[1:])
    assert sim.fencer.fenced == ["sie.worker.w0"]


def test_idle_commits_are_rare_and_still_move_the_offset() -> None:
    sim = Sim()
    host = sim.leader()
    sim.run(host, 500)
    commits: list[str] = []
    sim.log.cluster.on_commit = lambda transaction: commits.append(transaction.transactional_id)
    sim.run(host, 10_000)
    assert 4 <= len(commits) <= 6
    place = TopicPartition(sim.names.cluster, 0)
    committed = sim.log.reader(sim.names.scheduler_group).committed([place])[place]
    assert committed is not None
    assert sim.history()[-1][0].offset + 1 - committed.offset <= 16


def test_many_models_take_one_topic_request_and_few_transactions() -> None:
    sim = Sim(Settings())
    host = sim.leader()
    sim.tell(joined("w0", "a", memory_mb=20_000), joined("w1", "b", memory_mb=20_000))
    sim.run(host, 300, ALIVE)
    calls: list[str] = []
    sim.log.cluster.before = lambda operation, client: calls.append(operation)
    sim.tell(*(ApplyModel(Raw(spec_json(f"m{number:03}"))) for number in range(117)))
    sim.run(host, 200, ALIVE)
    assert calls.count("ensure") == 1
    sim.answer_loads()
    sim.run(host, 200, ALIVE)
    assert calls.count("commit") <= 6
    placements = sim.table(sim.names.placements, PlacementRow)
    counts = [sum(placed.partitions[0].worker == worker for placed in placements.values()) for worker in ("w0", "w1")]
    assert sorted(counts) == [58, 59]


def test_a_scheduler_that_lost_the_lead_stops() -> None:
    sim = Sim()
    old = sim.leader()
    sim.run(old, 300)
    new = sim.leader()
    sim.run(new, 300)
    sim.tell(joined("w0", "a"))
    with pytest.raises(Fenced):
        sim.run(old, 2_000)
    sim.run(new, 300)
    assert sim.decisions() == sim.refolded()
    assert [d.subject for d in sim.decisions() if d.kind == "scheduler_elected"] == ["s1", "s2"]


def test_a_record_that_cannot_be_read_is_told_and_skipped() -> None:
    sim = Sim()
    host = sim.leader()
    sim.log.plain_writer().write([LogWrite(sim.names.cluster, b"\xff", partition=0)])
    sim.tell(joined("w0", "a"))
    sim.run(host, 300)
    assert "unreadable_cluster_record" in [event for event, _ in sim.notices]
    assert host.machine.state.workers["w0"].status == "live"


def test_the_next_leader_continues_from_a_snapshot() -> None:
    sim = Sim()
    host = sim.leader()
    sim.tell(joined("w0", "a"), joined("w1", "b"), ApplyModel(Raw(spec_json(replicas=TWO))))
    sim.run(host, 3_000, ALIVE)
    snapshot = newest_snapshot(sim.log.visible(sim.names.snapshots))
    assert snapshot is not None
    assert snapshot.next_offset > 40
    sim.log.delete_before(TopicPartition(sim.names.cluster, 0), snapshot.next_offset)
    before = len(sim.decisions())
    successor = sim.leader()
    sim.run(successor, 300, ALIVE)
    assert successor.machine.state.models["churn"].replicas
    assert [d.kind for d in sim.decisions()[before:]] == ["scheduler_elected"]


def test_a_snapshot_in_parts_comes_back_and_a_partial_one_is_skipped() -> None:
    sim = Sim()
    host = sim.leader()
    sim.tell(ApplyModel(Raw(spec_json())))
    sim.run(host, 300)
    old, new = (snapshot_writes(host.machine.state, "t", part_bytes_max=size) for size in (200, 150))
    assert len(old) > 2

    def records(writes: list[LogWrite]) -> list[LogRecord]:
        return [LogRecord("t", 0, place, 0, write.key, write.value) for place, write in enumerate(writes)]

    whole = newest_snapshot(records(old))
    assert whole is not None
    assert to_bytes(whole) == to_bytes(host.machine.state)
    host.machine.state.next_offset += 1
    newer = snapshot_writes(host.machine.state, "t", part_bytes_max=150)
    found = newest_snapshot(records([*old, *newer[:-1]]))
    assert found is not None
    assert found.next_offset == whole.next_offset, "the newer one lacks a part"
    assert newest_snapshot(records(new[:1])) is None


class Killer:
    """Kills the scheduler at its n-th call to the log: before the call takes effect, or after."""

    def __init__(self, sim: Sim, at: int, moment: str) -> None:
        self.left = at
        self.fired = False
        setattr(sim.log.cluster, moment, self._hook)

    def _hook(self, operation: str, client: str) -> None:
        if client not in ("scheduler", "fencer", "admin") or self.fired:
            return
        self.left -= 1
        if self.left < 0:
            self.fired = True
            raise Crash(operation)


@pytest.mark.parametrize(("moment", "calls_min"), [("before", 80), ("after", 15)])
def test_a_crash_at_any_call_loses_no_decision_and_repeats_none(moment: str, calls_min: int) -> None:
    apart = 100 // rounds(100)  # under profile quick it crashes at every tenth call only
    for at in range(0, 1_000, apart):
        sim = Sim()
        killer = Killer(sim, at, moment)
        host = sim.host()
        turns = 0
        started = False
        while turns < 45:
            try:
                if not started:
                    host.start()
                    started = True
                if turns == 3:
                    sim.tell(joined("w0", "a"), joined("w1", "b"), ApplyModel(Raw(spec_json(replicas=TWO))))
                if turns in (12, 30):
                    sim.answer_loads()
                if turns == 18:
                    sim.tell(WorkerExited("w0", "a", -9, "up"))
                turns += 1
                sim.run(host, 50, ALIVE if turns <= 18 else ALIVE[1:])
            except (Crash, Retriable):
                host, started = sim.host(), False
        if not killer.fired:
            assert at >= calls_min, "the scenario has fewer calls than it had"
            return
        for _ in range(3):
            sim.run(host, 12_000, ALIVE[1:])  # fences and topics that were lost are asked for again
            sim.answer_loads()
        sim.run(host, 1_500, ALIVE[1:])
        assert sim.decisions() == sim.refolded(), (at, moment)
        assert owners(sim) == {"w1"}, (at, moment)


def test_a_standby_waits_for_the_leader_to_fall_silent() -> None:
    sim = Sim()
    cold = Standby(sim.settings, sim.log.reader("x", client="standby"), sim.log.clock)
    cold.start()
    assert cold.turn(), "nobody has ever led"
    host = sim.leader()
    sim.run(host, 1_000)
    standby = Standby(sim.settings, sim.log.reader("x", client="standby"), sim.log.clock)
    standby.start()
    for _ in range(20):
        sim.run(host, 250)
        assert not standby.turn()
    sim.log.clock.advance(1_400)
    assert not standby.turn()
    sim.log.clock.advance(200)
    assert standby.turn()


def test_an_effect_that_fails_is_asked_for_again() -> None:
    sim = Sim()
    host = sim.leader()
    sim.tell(joined("w0", "a"), ApplyModel(Raw(spec_json())))
    broken = True

    def hook(operation: str, client: str) -> None:
        if broken and (client == "fencer" or operation == "ensure"):
            raise Retriable("coordinator not available")

    sim.log.cluster.before = hook
    sim.run(host, 500, ALIVE[:1])
    sim.tell(WorkerExited("w0", "a", 1, "up"))
    sim.run(host, 500)
    kinds = [decision.kind for decision in sim.decisions()]
    assert "topic_failed" in kinds
    assert "worker_fenced" not in kinds
    assert "fence_failed" in [event for event, _ in sim.notices]
    broken = False
    sim.run(host, 11_000)
    kinds = [decision.kind for decision in sim.decisions()]
    assert "worker_fenced" in kinds
    assert sim.table(sim.names.routes, RouteRow)
