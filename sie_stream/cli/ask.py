"""Writes one command to sie.cluster and waits for the decision that answers it."""

from __future__ import annotations

import time
from collections.abc import Callable

from schemas.codec import decode_decision, encode_cluster
from schemas.wire import CodecError
from sie_stream.cli.declare import NotReady
from sie_stream.control import ClusterRecord
from sie_stream.decisions import Decision
from sie_stream.edge.connection import Connection
from sie_stream.ids import TopicPartition
from sie_stream.records import LogWrite

POLL_MS = 50


def ask(
    connection: Connection, command: ClusterRecord, is_answer: Callable[[Decision], bool], timeout_s: float
) -> Decision:
    """The first answer among the decisions written after the question. Raises NotReady when none comes in time."""
    topics = connection.settings.topics
    reader, writer = connection.reader(), connection.plain_writer()
    try:
        places = [TopicPartition(topics.decisions, number) for number in range(reader.partitions_of(topics.decisions))]
        reader.assign(reader.end_offsets(places))
        writer.write([LogWrite(topics.cluster, encode_cluster(command))])
        writer.flush(10_000)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for record in reader.poll(1_000, POLL_MS):
                try:
                    decision = decode_decision(record.value)
                except CodecError:
                    continue  # not the answer; `sie-stream audit decisions` reports what cannot be read
                if is_answer(decision):
                    return decision
        raise NotReady(
            f"the scheduler did not answer within {timeout_s:.0f} s. Is it running? `sie-stream doctor` looks."
        )
    finally:
        reader.close()
        writer.close()
