"""`sie-stream delete`: how many requests wait, and what becomes of them."""

from __future__ import annotations

from msgspec import structs

from sie_stream.cli.queued import fate, queued, topic_of
from sie_stream.control import DeleteModel
from sie_stream.errors import Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.offsets import OffsetLedger
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite
from sie_stream.sim.log import SimLog
from tests.unit.scheduler.kit import Cluster, decisions, joined, running, spec_json

TOPIC = "sie.work.churn"
GROUP = "sie.workers"


def with_requests(*partitions: int) -> SimLog:
    log = SimLog()
    log.admin().ensure([TopicSpec(TOPIC, 3, {})])
    log.plain_writer().write([LogWrite(TOPIC, b"{}", None, partition) for partition in partitions])
    return log


def test_what_was_committed_or_answered_out_of_order_does_not_wait() -> None:
    log = with_requests(0, 0, 0, 0, 1)
    ledger = OffsetLedger(0)
    ledger.start_many([0, 1, 2, 3])
    ledger.finish_many([0, 2])
    writer = log.transactional_writer("w0")
    writer.init()
    writer.begin()
    writer.send_offsets(log.reader(GROUP), {TopicPartition(TOPIC, 0): ledger.to_commit()})
    writer.commit()
    assert queued(log.reader(GROUP), TOPIC) == 3, "offsets 1 and 3, and the one of a partition that nobody held"


def test_nothing_waits_in_a_topic_that_does_not_exist() -> None:
    assert queued(SimLog().reader(GROUP), TOPIC) == 0


def test_a_deletion_is_told_also_when_nobody_could_count_in_time() -> None:
    log = with_requests(0)

    def unreachable(operation: str, _client: str) -> None:
        if operation == "poll":
            raise Retriable("a broker is starting again")

    log.cluster.before = unreachable
    waiting = queued(log.reader(GROUP), TOPIC, timeout_s=0)
    [served] = decisions(running().append(DeleteModel("churn")), "model_deleting")
    assert fate(served, TOPIC, waiting).startswith("Not yet counted requests in sie.work.churn: answered before")


def test_it_says_who_answers_them() -> None:
    waiting = queued(with_requests(0, 2).reader(GROUP), TOPIC)
    [served] = decisions(running().append(DeleteModel("churn")), "model_deleting")
    assert fate(served, TOPIC, waiting) == "2 requests in sie.work.churn: answered before its replicas are unloaded."
    assert fate(served, TOPIC, 0) == "No request waits in sie.work.churn."
    assert topic_of(served, TopicNames()) == TOPIC
    cluster = Cluster()
    cluster.lead()
    cluster.append(joined("w0", "a"))
    cluster.apply(spec_json(memory_mb=5_000))
    [alone] = decisions(cluster.append(DeleteModel("churn")), "model_deleting")
    assert fate(alone, TOPIC, 1).startswith("1 request in sie.work.churn: left without a result")


def test_a_scheduler_of_an_older_release_says_less() -> None:
    [served] = decisions(running().append(DeleteModel("churn")), "model_deleting")
    before_worked_off = structs.replace(served, chosen={"version": "1.0.0", "linger_ms": 5_000, "topic_kept": TOPIC})
    before_topic_kept = structs.replace(served, chosen={"version": "1.0.0"})
    for older in (before_worked_off, before_topic_kept):
        assert topic_of(older, TopicNames()) == TOPIC
        said = fate(older, TOPIC, 2)
        assert said.startswith("2 requests in sie.work.churn: answered by the replicas it still has; without any")
        assert "of an older release" in said
        assert fate(older, TOPIC, 0) == "No request waits in sie.work.churn."
