"""librdkafka settings of every client this project opens, with the reasons. `overrides` always win."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sie_stream.edge.kafka_errors import ClientErrorLog

Config = dict[str, Any]

BATCH_HEADROOM_BYTES = 64 * 1024
"""A record batch is larger than its records; topics allow this much on top of the largest record."""


def common_config(bootstrap: str, overrides: Mapping[str, str] | None) -> Config:
    return {
        "bootstrap.servers": bootstrap,
        "error_cb": ClientErrorLog(),
        "log_level": 4,
        "socket.nagle.disable": True,
        "socket.keepalive.enable": True,
        # A broker restart is noticed and survived quickly; the default climbs to 10 s between attempts.
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1_000,
        # A lone broker that was fenced for a moment (a stall, a restart after a kill) is missing from its own metadata;
        # librdkafka then forgets it, and only starting again from bootstrap.servers brings it back.
        "metadata.recovery.strategy": "rebootstrap",
        "metadata.recovery.rebootstrap.trigger.ms": 3_000,
        # Topics are created and widened while we run.
        "topic.metadata.refresh.interval.ms": 15_000,
        "topic.metadata.refresh.fast.interval.ms": 50,
        # Records for a topic that does not exist fail after this long instead of 30 s.
        "topic.metadata.propagation.max.ms": 5_000,
        "allow.auto.create.topics": False,
        **(overrides or {}),
    }


def reader_config(
    bootstrap: str,
    group: str,
    overrides: Mapping[str, str] | None,
    prefetch_bytes: int,
    prefetch_records: int,
    fetch_wait_ms: int,
) -> Config:
    """A read_committed consumer that commits nothing by itself and prefetches little."""
    return common_config(bootstrap, None) | {
        "group.id": group,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # A lost position is a fact to be reported, never silently "latest".
        "auto.offset.reset": "error",
        # position() needs to know when the end is reached behind markers, which are never returned.
        "enable.partition.eof": True,
        "queued.max.messages.kbytes": max(1, prefetch_bytes // 1024),
        "queued.min.messages": prefetch_records,
        "fetch.max.bytes": prefetch_bytes,
        "max.partition.fetch.bytes": 1024 * 1024,
        # The default holds a full partition back for a whole second.
        "fetch.queue.backoff.ms": 5,
        "fetch.wait.max.ms": fetch_wait_ms,
        "fetch.min.bytes": 1,
        "fetch.error.backoff.ms": 50,
        **(overrides or {}),
    }


def writer_config(bootstrap: str, overrides: Mapping[str, str] | None, record_bytes_max: int) -> Config:
    """An idempotent producer, acks=all, that reports only failures."""
    return common_config(bootstrap, None) | {
        "acks": "all",
        "enable.idempotence": True,
        "compression.type": "lz4",
        # Keys land on the partitions where a Java producer would put them.
        "partitioner": "murmur2_random",
        "message.max.bytes": record_bytes_max + BATCH_HEADROOM_BYTES,
        "batch.size": max(1_000, min(record_bytes_max, 1_000_000)),
        "queue.buffering.max.messages": 200_000,
        "queue.buffering.max.kbytes": 128 * 1024,
        "delivery.report.only.error": True,
        # 100 ms by default, which shows as 100 ms stalls when one transaction follows another at once.
        "retry.backoff.ms": 2,
        "retry.backoff.max.ms": 200,
        **(overrides or {}),
    }
