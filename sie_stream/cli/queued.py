"""Counts the requests of a work topic that no worker has answered yet."""

from __future__ import annotations

from sie_stream.decisions import Decision
from sie_stream.edge.tables import read_to_end
from sie_stream.errors import FatalLogError, Retriable
from sie_stream.ids import TopicNames, TopicPartition
from sie_stream.offsets import OffsetLedger
from sie_stream.ports import LogReader

TIMEOUT_S = 30.0


def queued(reader: LogReader, topic: str, timeout_s: float = TIMEOUT_S) -> int | None:
    """Records between what the workers committed and the end, less those that were answered out of order.

    `reader` reads as the group of the workers. 0 for a topic that does not exist; None when they could not be counted
    in time: the deletion, which is under way by then, is to be told all the same.
    """
    try:
        return _counted(reader, topic, timeout_s)
    except (Retriable, FatalLogError):
        return None


def _counted(reader: LogReader, topic: str, timeout_s: float) -> int:
    places = [TopicPartition(topic, number) for number in range(reader.partitions_of(topic))]
    ledgers = {
        place.partition: OffsetLedger.resume(found)
        for place, found in reader.committed(places).items()
        if found is not None
    }
    since = {TopicPartition(topic, number): ledger.committable for number, ledger in ledgers.items()}
    waiting = 0
    for record in read_to_end(reader, topic, since, timeout_s):
        ledger = ledgers.get(record.partition)
        waiting += ledger is None or not ledger.is_done(record.offset)
    return waiting


def topic_of(deleting: Decision, topics: TopicNames) -> str:
    """Where requests for a model that is being deleted wait. Schedulers of older releases do not say it."""
    return str(deleting.chosen.get("topic_kept") or topics.work(deleting.subject))


def fate(deleting: Decision, topic: str, waiting: int | None) -> str:
    """What becomes of the requests that wait in `topic` of a model that is being deleted, as one sentence."""
    if waiting == 0:
        return f"No request waits in {topic}."
    requests = "1 request" if waiting == 1 else f"{waiting or 'Not yet counted'} requests"
    worked_off = deleting.chosen.get("worked_off")
    if worked_off == "yes":
        return f"{requests} in {topic}: answered before its replicas are unloaded."
    again = (
        "answered when the model is applied again and loads, before the topic's retention ends; "
        "`sie-stream audit verify` counts them as open."
    )
    if worked_off is None:
        return (
            f"{requests} in {topic}: answered by the replicas it still has; without any, {again} "
            "Whether it has any is not in the decision: the scheduler is of an older release."
        )
    return f"{requests} in {topic}: left without a result, as nobody serves them. They are {again}"
