"""The folded state on sie.snapshots, so that a new leader folds thousands of records and not millions.

One snapshot is one or more records, keyed `scheduler.PART`, written in the transaction that commits the offset it
belongs to: it never holds what was not decided. Compaction keeps the newest record of each key; parts of a snapshot
that was only partly replaced do not fit together and are skipped. The state travels as JSON under zlib.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from scheduler.state import ClusterState, from_bytes, to_bytes
from sie_stream.errors import Retriable
from sie_stream.ids import TopicPartition
from sie_stream.ports import LogReader
from sie_stream.records import LogRecord, LogWrite

PART_BYTES_MAX = 512 * 1024
EMPTY_POLLS_MAX = 400
"""Polls of 50 ms that may bring nothing before the end of sie.snapshots is reached."""


class SnapshotPart(Struct, frozen=True):
    """Part `part` of `parts` of the state after folding every record below `next_offset`."""

    next_offset: int
    part: int
    parts: int
    data: bytes


_decoder = msgspec.msgpack.Decoder(SnapshotPart)


def snapshot_writes(state: ClusterState, topic: str, part_bytes_max: int = PART_BYTES_MAX) -> list[LogWrite]:
    """The records of one snapshot; each value stays below `part_bytes_max` and some dozen bytes."""
    packed = zlib.compress(to_bytes(state), 6)
    pieces = [packed[start : start + part_bytes_max] for start in range(0, len(packed), part_bytes_max)]
    return [
        LogWrite(
            topic=topic,
            key=f"scheduler.{number}".encode(),
            value=msgspec.msgpack.encode(SnapshotPart(state.next_offset, number, len(pieces), piece)),
            partition=0,
        )
        for number, piece in enumerate(pieces)
    ]


def newest_snapshot(records: Iterable[LogRecord]) -> ClusterState | None:
    """The newest complete snapshot among the records; None when there is none that this version can read."""
    found = _by_offset(records)
    return _first_readable(found, sorted(found, reverse=True))


def oldest_snapshot(records: Iterable[LogRecord], offset: int) -> ClusterState | None:
    """The oldest complete snapshot of `offset` or later, to fold on from where the log begins only there; or None."""
    found = _by_offset(records)
    return _first_readable(found, sorted(number for number in found if number >= offset))


def _by_offset(records: Iterable[LogRecord]) -> dict[int, dict[int, SnapshotPart]]:
    """{next_offset: {number: part}}."""
    found: dict[int, dict[int, SnapshotPart]] = {}
    for record in records:
        if record.value is None:
            continue
        try:
            part = _decoder.decode(record.value)
        except msgspec.MsgspecError:
            continue  # not ours, or of a format before this one
        found.setdefault(part.next_offset, {})[part.part] = part
    return found


def _first_readable(found: dict[int, dict[int, SnapshotPart]], order: Iterable[int]) -> ClusterState | None:
    for offset in order:
        parts = found[offset]
        if len(parts) == parts[min(parts)].parts:
            state = from_bytes(zlib.decompress(b"".join(parts[number].data for number in sorted(parts))))
            if state is not None:
                return state
    return None


def load_newest_snapshot(reader: LogReader, topic: str) -> ClusterState | None:
    """Read sie.snapshots from its beginning to its present end. Raises Retriable when that does not get on."""
    partition = TopicPartition(topic, 0)
    end = reader.end_offsets([partition])[partition]
    start = reader.beginning_offsets([partition])[partition]
    records: list[LogRecord] = []
    if start < end:
        reader.assign({partition: start})
        empty = 0
        while reader.position(partition) < end:
            found = reader.poll(1_000, 50)
            records.extend(found)
            empty = 0 if found else empty + 1
            if empty > EMPTY_POLLS_MAX:
                raise Retriable(f"{topic}: stuck at {reader.position(partition)} of {end}")
        reader.unassign([partition])
    return newest_snapshot(records)
